"""Callers of one engine: each gets an equal share of tokens, whoever asks for more, and waits for no end of others."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pilotfish.engine import turns as shares
from pilotfish.engine.control.prefill_budget import PrefillBudget
from pilotfish.engine.control.step_time import StepFeedback
from pilotfish.engine.kv.pages import PagePool
from pilotfish.engine.scheduler import Scheduler
from pilotfish.engine.startup.warm import make_ready
from pilotfish.engine.step import Work
from pilotfish.engine.turns import TURN, Shares, equal_parts
from pilotfish.engine.types import Sequence
from tests import fakes

PLACES = 8
ENDLESS = 10**6


def output(caller: str, name: str, prompt: int = 4, tokens: int = ENDLESS) -> Sequence:
    return fakes.sequence([1] * prompt, name=name, caller=caller, k=0, max_len=prompt + tokens)


class Service:
    """A scheduler without a model: what is planned is fed, and each sequence that is fed to its end gets a token."""

    def __init__(self, pages: int = 10**5, places: int = PLACES, budget: int = 128) -> None:
        self.schedule = Scheduler(PagePool(pages, 4), places, budget)
        self.had: Counter[str] = Counter()  # tokens of prompts and outputs, by caller
        self.first: dict[str, int] = {}  # steps from the arrival to the first token, by name
        self.fed: list[set[str]] = []  # callers of each step
        self.works: tuple[Work, ...] = ()
        self.num_preempted = self._count = 0
        self._arrived: dict[str, int] = {}
        self._fed: dict[str, int] = {}

    def ask(self, caller: str, prompt: int = 4, tokens: int = ENDLESS) -> Sequence:
        self._count += 1
        one = output(caller, str(self._count), prompt, tokens)
        self._arrived[one.request_id] = len(self.fed)
        self.schedule.add(one)
        return one

    def step(self) -> None:
        self.schedule.admit()
        plan = self.schedule.plan()
        self.num_preempted += plan.counts.get("preempted", 0)
        self.works = plan.works
        self.fed.append({work.sequence.request.caller for work in plan.works})
        for work in plan.works:
            one = work.sequence
            known = self._fed.get(one.request_id, 0)
            self.had[one.request.caller] += max(0, work.span.stop - known)
            self._fed[one.request_id] = max(known, work.span.stop)
            one.target.advance(work.span.stop)
            if work.reaches_end:
                one.tokens.append(1)
                self.first.setdefault(one.request_id, len(self.fed) - self._arrived[one.request_id])
                if len(one.tokens) >= one.max_len:
                    self.schedule.remove(one)
        if len(self.fed) % 16 == 0:
            self.schedule.check_invariants()

    def run(self, steps: int, before: Callable[[int], None] = lambda step: None) -> Counter[str]:
        """What each caller has had in so many steps."""
        start = Counter(self.had)
        for step in range(steps):
            before(step)
            self.step()
        return self.had - start


@pytest.mark.parametrize("num_hogs", [1, 3])
def test_who_asks_for_one_at_a_time_waits_for_no_hog(num_hogs: int) -> None:
    """Its first token comes in the first step after it asks, and that step serves it alone."""
    service = Service()
    for i in range(num_hogs):
        for _ in range(6 * PLACES):
            service.ask(f"hog {i}")
    service.run(50)
    assert service.num_preempted <= PLACES, "hogs that came one after another share the places"
    for _ in range(20):
        one = service.ask("meek", prompt=20, tokens=4)
        service.step()
        assert service.fed[-1] == {"meek"}
        service.run(20)
        assert service.first[one.request_id] == 1


def test_unequal_demands_get_equal_shares_of_tokens_as_far_as_they_want_them() -> None:
    """One with many short requests, one with few long ones, one with long prompts, and one that wants little."""
    service = Service()

    def ask(_: int) -> None:
        waiting = Counter(s.request.caller for s in service.schedule.sequences)
        for caller, most, prompt, tokens in (("short", 60, 6, 10), ("long", 10, 6, 400), ("prompts", 20, 90, 10)):
            for _ in range(most - waiting[caller]):
                service.ask(caller, prompt, tokens)
        if not waiting["meek"]:
            service.ask("meek", 5, 5)

    service.run(200, ask)
    had = service.run(800, ask)
    meek, total = had.pop("meek"), had.total()
    assert meek == pytest.approx(800 / 5 * 9, rel=0.2), "it gets all it asks for"
    assert {caller: share / total for caller, share in had.items()} == pytest.approx(dict.fromkeys(had, 1 / 3), rel=0.1)


def test_one_caller_alone_has_the_whole_machine_in_the_order_of_its_requests() -> None:
    service = Service()
    asked = [service.ask("lone", tokens=8) for _ in range(5 * PLACES)]
    assert service.run(1)["lone"] == 4 * PLACES
    service.run(50)
    assert service.num_preempted == 0
    first = [service.first[one.request_id] for one in asked]
    assert first == sorted(first)
    assert max(first) == 4 * 8 + 1, "no step passes without all places"


def test_what_a_caller_leaves_others_use() -> None:
    service = Service()
    for caller, demand in (("a", 4 * PLACES), ("b", PLACES // 4)):
        for _ in range(demand):
            service.ask(caller)
    service.run(10)
    assert service.run(100) == {"a": 100 * PLACES * 3 // 4, "b": 100 * PLACES // 4}


def test_who_pauses_saves_nothing_up() -> None:
    service = Service()
    for caller in ("steady", "sleeper"):
        service.ask(caller, tokens=8)
    service.run(20)
    for _ in range(4 * PLACES):
        service.ask("steady")
    service.run(300)
    for _ in range(4 * PLACES):
        service.ask("sleeper")
    had = service.run(300)
    assert had["sleeper"] == pytest.approx(had["steady"], rel=0.1)


def test_leaving_and_coming_back_at_once_pays_no_debt() -> None:
    service = Service()
    for _ in range(4 * PLACES):
        service.ask("steady")

    def ask(_: int) -> None:
        if not any(s.request.caller == "fickle" for s in service.schedule.sequences):
            service.ask("fickle", prompt=100, tokens=2)

    service.run(100, ask)
    had = service.run(300, ask)
    assert had["fickle"] <= 1.1 * had["steady"]


def test_outputs_of_one_request_count_each() -> None:
    service = Service()
    many = [output("many", f"m{i}") for i in range(4 * PLACES)]
    service.schedule.add(*many)
    for one in many:
        service._arrived[one.request_id] = 0
    service.run(5)
    for _ in range(PLACES):
        service.ask("other")
    service.run(20)
    had = service.run(500)
    assert had["other"] == pytest.approx(had["many"], rel=0.1)


def test_a_sequence_that_holds_all_pages_gives_way_after_its_turn() -> None:
    service = Service(pages=64)
    service.ask("hog", prompt=200, tokens=50)
    service.step()
    waiting = [service.ask("meek", prompt=80, tokens=4) for _ in range(3)]
    service.run(400)
    assert all(one.request_id in service.first for one in waiting)
    assert service.num_preempted < 20
    assert not service.schedule.sequences, "and it came to its end all the same"


def test_places_change_hands_once_and_not_at_every_step() -> None:
    service = Service()
    for _ in range(4 * PLACES):
        service.ask("a")
    service.run(100)
    for _ in range(4 * PLACES):
        service.ask("b")
    service.run(10)
    assert service.num_preempted == PLACES // 2
    service.run(200)
    assert service.num_preempted == PLACES // 2


def taught(schedule: Scheduler, works: tuple[Work, ...], seconds: float) -> None:
    """The time of a step, as an engine reports it."""
    decoding = [work for work in works if len(work.span) == 1 and work.reaches_end]
    none, chunks = [0] * len(decoding), [len(work.span) for work in works if work not in decoding]
    sequences, lengths = [work.sequence for work in decoding], [work.length for work in decoding]
    schedule.control.times.learn(StepFeedback(sequences, lengths, none, none, none, [], 0.0, seconds, chunks))


def test_prompts_of_callers_share_a_step() -> None:
    service = Service(budget=100)
    for caller in ["hog"] * 10 + ["meek"] * 5:
        service.ask(caller, prompt=500)
    had = service.run(5)
    assert had["hog"] == had["meek"]


def test_steps_are_short_where_somebody_may_ask_at_any_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step takes 8 ms and 2 for each that decodes. Half of the places cost a quarter of the tokens per second."""

    def timed(service: Service, steps: int) -> list[int]:
        sizes = []
        for _ in range(steps):
            service.step()
            sizes.append(len(service.works))
            taught(service.schedule, service.works, 0.008 + 0.002 * sizes[-1])
        return sizes

    monkeypatch.setattr(shares, "_RECENT", 800)
    service = Service()
    for size in (1, 2, 4, PLACES) * 20:  # what calibration has measured
        none = [0] * size
        done = StepFeedback([output("", "")] * size, none, none, none, none, [], 0.0, 0.008 + 0.002 * size)
        service.schedule.control.times.learn(done)
    for _ in range(2 * PLACES):
        service.ask("hog")
    service.step()
    assert set(timed(service, 20)) == {PLACES}, "alone it has all"
    service.ask("meek", tokens=1)
    service.step()
    assert timed(service, 20)[5:] == [PLACES // 2] * 15, "still fewer are too slow"
    lengths = [len(one.tokens) for one in service.schedule.running]
    assert max(lengths) - min(lengths) <= 4, "in turn"
    timed(service, 1000 // (PLACES // 2))
    assert set(timed(service, 20)) == {PLACES}, "who has not come back is not expected any more"


@dataclass(frozen=True)
class Machine:
    """Seconds of a step: of the pass, of each sequence that decodes, of each token of a prompt."""

    step: float
    sequence: float
    token: float


class Timed(Service):
    """A service whose steps take time, from which it learns as an engine does."""

    def __init__(self, machine: Machine) -> None:
        super().__init__(places=64, budget=1024)
        self.schedule = Scheduler(PagePool(10**5, 4), 64, 1024, prefill=PrefillBudget(0.25))
        self.machine, self.now, self.num_decoding, self.num_reading = machine, 0.0, 0, 0

    def step(self) -> None:
        super().step()
        newest = [len(work.span) == 1 and work.reaches_end for work in self.works]
        self.num_decoding = sum(newest)
        self.num_reading = sum(len(work.span) for work in self.works) - self.num_decoding
        costs = self.machine
        seconds = costs.step + costs.sequence * self.num_decoding + costs.token * self.num_reading
        taught(self.schedule, self.works, seconds)
        self.now += seconds

    def first_token(self, after: float, prompt: int) -> float:
        """Seconds to the first token of one that asks so long from now; the step under way goes on."""
        start = self.now + after
        while self.schedule.sequences and self.now < start:
            self.step()
        self.now = max(self.now, start)
        one = self.ask("meek", prompt, 8)
        while one.request_id not in self.first:
            self.step()
        seconds = self.now - start
        while one in self.schedule.sequences:
            self.step()
        return seconds


def test_a_step_decodes_or_reads_where_somebody_may_ask_at_any_moment() -> None:
    """In turn, so that neither prompts nor outputs of the large caller wait for the other."""
    service = Timed(Machine(step=0.02, sequence=0.006, token=0.006))
    service.first_token(0.0, 17)
    for _ in range(3 * PLACES):
        service.ask("hog", prompt=300, tokens=400)
    service.run(400)
    kinds = []
    for _ in range(40):
        service.step()
        kinds.append((service.num_decoding > 0, service.num_reading > 0))
    assert kinds in ([(True, False), (False, True)] * 20, [(False, True), (True, False)] * 20)


def test_a_server_that_has_just_started_expects_nobody_back() -> None:
    """What it ran to be ready was of no caller."""
    law = fakes.hashed_law(20)
    engine = fakes.fake_engine(law, draft_law=law, vocab_size=20, num_pages=400, max_batch_size=2 * PLACES)
    make_ready(engine, 0.1)
    asked = fakes.requests([[1, 2]] * 2 * PLACES, max_tokens=2)
    for one in asked:
        engine.add(replace(one, caller="lone"))
    engine.step()
    assert not engine.scheduler.shares.is_uneven


@pytest.mark.parametrize(
    "machine",
    [
        Machine(step=0.02, sequence=0.006, token=0.006),  # each row takes time: a small model, a few cores
        Machine(step=0.003, sequence=0.0006, token=0.0003),
        Machine(step=0.3, sequence=0.005, token=0.02),  # a large one, of which a pass reads all weights
        Machine(step=0.01, sequence=0.00002, token=0.00002),  # a GPU
    ],
    ids=["small", "tiny", "large", "gpu"],
)
@pytest.mark.parametrize(("prompt", "tokens"), [(12, 600), (300, 20)], ids=["outputs", "prompts"])
def test_a_first_token_beside_endless_streams_takes_at_most_three_times_as_long(
    machine: Machine, prompt: int, tokens: int
) -> None:
    rng, service = random.Random(1), Timed(machine)
    for _ in range(20):
        alone = service.first_token(0.05, 17)
    for _ in range(200):
        service.ask("hog", prompt, tokens)
    had, taken = service.had["hog"], list[float]()
    for _ in range(30):
        taken.append(service.first_token(rng.uniform(0, 0.1), 17))
        for _ in range(200 - sum(s.request.caller == "hog" for s in service.schedule.sequences)):
            service.ask("hog", prompt, tokens)
    assert sorted(taken)[-3] <= 3 * alone, "but for steps that try how long they take"
    assert service.had["hog"] - had > 0


calls = st.tuples(st.sampled_from("abc"), st.integers(1, 200), st.integers(1, 60))


@settings(max_examples=25)
@given(st.lists(st.tuples(st.integers(0, 5), st.lists(calls, max_size=6)), max_size=12), st.integers(70, 120))
def test_everybody_comes_to_an_end(arrivals, pages: int) -> None:
    """With few pages: whoever was preempted for another caller goes on, and nobody is forgotten."""
    service = Service(pages=pages, places=4)
    asked = []
    for pause, requests in arrivals:
        asked += [service.ask(*request) for request in requests]
        service.run(pause)
    for _ in range(20_000):
        if not service.schedule.sequences:
            break
        service.step()
    assert all(len(one.tokens) == one.max_len for one in asked)


def test_who_had_an_idle_machine_alone_owes_nothing() -> None:
    service = Service()
    service.ask("early", tokens=400)
    service.run(440)
    for caller in ("late", "early"):
        for _ in range(4 * PLACES):
            service.ask(caller)
    had = service.run(200)
    assert had["early"] == pytest.approx(had["late"], rel=0.1)


def test_counters_are_kept_for_those_alone_who_are_there_or_ahead() -> None:
    counters = Shares()
    counters.join("steady", [], [])
    for i in range(100):
        counters.join(f"{i}", ["steady"], ["steady"])
        counters.charge(f"{i}", TURN)
        counters.charge("steady", TURN)
    counters.join("ahead", ["steady"], ["steady"])
    counters.charge("ahead", TURN)
    counters.join("new", ["steady"], ["steady"])
    assert counters.rank("new") == counters.rank("steady") == counters.rank("ahead", -TURN)
    assert len(counters._had) == 3
    counters.join("later", [], [])
    assert len(counters._had) == 1


@given(st.lists(st.integers(0, 50), max_size=10), st.integers(0, 200))
def test_equal_parts(wanted: list[int], total: int) -> None:
    parts = equal_parts(sorted(wanted), total)
    assert sum(parts) == min(total, sum(wanted))
    cut = [part for part, most in zip(parts, sorted(wanted), strict=True) if part < most]
    assert not cut or max(parts) - min(cut) <= 1
