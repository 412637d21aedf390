"""How much of prompts a step reads: a machine of scripted costs is kept to the bound, whatever was believed before."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from pilotfish.engine.config import EngineConfig
from pilotfish.engine.control.constants import AIM, ALONE
from pilotfish.engine.control.prefill_budget import PrefillBudget
from pilotfish.engine.control.step_time import StepFeedback
from pilotfish.engine.engine import Engine
from pilotfish.engine.stats import StepStats
from tests import fakes, heads, zoo

BOUND = 0.25
FULL = AIM * BOUND


class Machine:
    """What steps cost, and a clock that only they move."""

    def __init__(self, *, sequence: float, token: float, context: float = 0.0, every: float = 0.0) -> None:
        self.sequence, self.token, self.context, self.every = sequence, token, context, every

    def seconds(self, decoding: int, tokens: int, read: int = 0) -> float:
        return self.every + decoding * self.sequence + tokens * (self.token + self.context * read)


def teach(prefill: PrefillBudget, decoding: int, tokens: int, seconds: float) -> None:
    none, chunks = [0] * decoding, [tokens] if tokens else []
    sequences = [fakes.sequence([1], name=str(i)) for i in range(decoding)]
    done = StepFeedback(sequences, none, none, none, none, [], 0.0, seconds, chunks)
    prefill.times.learn(done)


def catches_up(prefill: PrefillBudget, num_sequences: int, tokens: int, seconds: float) -> None:
    """A step in which the draft model is fed so much in its first pass."""
    each = [1] * num_sequences
    sequences, passes = [fakes.sequence([1], name=str(i)) for i in each], [(num_sequences, tokens)]
    prefill.times.learn(StepFeedback(sequences, each, each, each, each, passes, seconds, 0.02))


def fitting(prefill: PrefillBudget, decoding: int, *, alone: bool = False) -> float:
    return prefill.tokens([0] * decoding, alone=alone)


def learned(prefill: PrefillBudget, machine: Machine, decoding: int, steps: int = 20) -> PrefillBudget:
    """Decoding alone is known, and what a chunk costs."""
    for _ in range(steps):
        teach(prefill, decoding, 0, machine.seconds(decoding, 0))
    teach(prefill, 0, 512, machine.seconds(0, 512))
    return prefill


def steps_of(prefill: PrefillBudget, machine: Machine, decoding: int, prompt: int, most: int = 512) -> list[float]:
    """Seconds of each step in which a prompt is read while so many decode."""
    read, taken = 0, list[float]()
    while read < prompt:
        tokens = int(min(most, prompt - read, fitting(prefill, decoding, alone=not decoding)))
        taken.append(machine.seconds(decoding, tokens, read))
        teach(prefill, decoding, tokens, taken[-1])
        read += tokens
    return taken


@pytest.mark.parametrize(
    "machine",
    [Machine(sequence=0.05, token=0.002), Machine(sequence=0.1, token=0.02), Machine(sequence=0.001, token=0.0005)],
    ids=["middling", "slow", "fast"],
)
def test_a_prompt_is_read_in_steps_that_fit_the_bound_and_fill_it(machine):
    taken = steps_of(learned(PrefillBudget(BOUND), machine, 1), machine, 1, 8192)
    assert max(taken) <= 1.001 * FULL
    full = [seconds for seconds in taken[:-1] if seconds < machine.seconds(1, 512)]  # else the budget in tokens decides
    assert all(seconds > FULL - 2 * machine.token for seconds in full)


@pytest.mark.parametrize(
    ("machine", "decoding", "prompt", "least", "most"),
    [
        # What grows with the context is followed.
        (Machine(sequence=0.03, token=0.001, context=2e-7), 1, 8192, 0.8 * BOUND, BOUND),
        # Where decoding takes most of the bound, reading doubles the step.
        (Machine(sequence=0.4, token=0.01), 1, 400, 0.776, 0.824),
        # A prompt alone may take longer steps, and never endless ones.
        (Machine(sequence=0.1, token=0.02), 0, 500, 0.8 * ALONE * FULL, ALONE * FULL),
    ],
)
def test_how_long_steps_are_that_read(machine, decoding, prompt, least, most):
    taken = steps_of(learned(PrefillBudget(BOUND), machine, 1), machine, decoding, prompt)
    assert max(taken) <= most
    assert min(taken[3:-1]) > least


def test_a_pass_that_alone_takes_too_long_still_reads_as_much_again():
    """A large model: weights are read once per pass, so many small passes would take for ever."""
    machine = Machine(sequence=0.0, token=0.02, every=1.5)
    unpractised = PrefillBudget(BOUND)
    taken = steps_of(unpractised, machine, 0, 2000)
    assert sum(taken) < 3 * machine.seconds(0, 2000)
    assert sum(steps_of(unpractised, machine, 1, 2000)) < 3 * machine.seconds(0, 2000)


@pytest.mark.parametrize(("before", "after"), [((0.01, 0.0002), (0.1, 0.01)), ((0.1, 0.01), (0.01, 0.0002))])
def test_a_machine_that_became_another_is_learned_within_some_steps(before, after):
    """Even where decoding is not seen alone again: a long prompt is being read."""
    prefill = learned(PrefillBudget(BOUND), Machine(sequence=before[0], token=before[1]), 1)
    machine = Machine(sequence=after[0], token=after[1])
    taken = steps_of(prefill, machine, 1, 8192)
    assert all(seconds <= BOUND for seconds in taken[8:])
    assert all(seconds > 0.7 * min(BOUND, machine.seconds(1, 512)) for seconds in taken[12:-1])


def test_one_stall_is_no_new_machine():
    machine = Machine(sequence=0.05, token=0.002)
    prefill = learned(PrefillBudget(BOUND), machine, 1)
    before = fitting(prefill, 1)
    teach(prefill, 1, int(before), 60.0)
    assert fitting(prefill, 1) >= int(before / 4)
    steps_of(prefill, machine, 1, 1000)
    assert fitting(prefill, 1) == pytest.approx(before, rel=0.1)


def test_numbers_that_decode_are_known_apart():
    machine = Machine(sequence=0.002, token=0.002)
    prefill = PrefillBudget(BOUND)
    for decoding in (1, 48):
        learned(prefill, machine, decoding, steps=200)
    few, many = (fitting(prefill, decoding) for decoding in (1, 48))
    assert (few, many) == pytest.approx(((FULL - 0.002) / 0.002, (FULL - 48 * 0.002) / 0.002), rel=0.01)


@pytest.mark.parametrize(
    ("seconds", "few"),
    [
        ((0.03, 0.03, 0.03, 0.03, 0.04, 0.045, 0.08), 32),
        ((0.03,) * 7, 64),
        (tuple(2.0**i for i in range(7)), 1),
        ((), 48),
    ],
)
def test_as_few_decode_as_give_most_throughput_for_the_delay(seconds, few):
    """Of 48, by the seconds of steps of 1, 2, 4, ... 64; all of them where nothing was measured."""
    prefill = PrefillBudget(BOUND)
    prefill.times.by_batch_size = lambda most: seconds
    assert prefill.few(48) == few


def test_nobody_is_slowed_down_on_a_guess_and_a_clock_that_stands_still_teaches_nothing():
    prefill = PrefillBudget(BOUND)
    assert fitting(prefill, 1) == math.inf
    teach(prefill, 1, 5, 0.0)
    assert fitting(prefill, 1) == math.inf


def test_a_draft_model_reads_as_much_as_its_own_speed_allows_in_what_the_target_leaves():
    prefill = learned(PrefillBudget(BOUND), Machine(sequence=0.02, token=0.01), 1)
    most = int(fitting(prefill, 1))
    assert prefill.tokens_of_draft("model", 1) == most + 2, "at first it is taken to be as slow as the target"
    catches_up(prefill, 1, 100, 0.1)
    assert prefill.tokens_of_draft("model", 1) == pytest.approx((FULL - 0.02) / 0.001 + 2, abs=1)
    prefill.spend(most // 2)
    assert prefill.tokens_of_draft("model", 1) == pytest.approx((FULL - 0.02) / 0.002, rel=0.1)
    prefill.spend(most)
    assert prefill.tokens_of_draft("model", 1) == most + 2
    fitting(prefill, 1)
    catches_up(prefill, 4, 40, 5.0)  # what drafting needs anyway
    assert prefill.tokens_of_draft("model", 1) == pytest.approx((FULL - 0.02) / 0.001 + 2, abs=1)


def test_draft_models_that_catch_up_in_one_step_share_its_time():
    prefill = learned(PrefillBudget(BOUND), Machine(sequence=0.02, token=0.01), 1)
    most = int(fitting(prefill, 1))
    prefill.spend_of_draft(2, 3)  # what drafting needs anyway
    assert prefill.tokens_of_draft("model", 1) == most + 2
    prefill.spend_of_draft(1, most - 8)
    assert prefill.tokens_of_draft("model", 1) == 10 + 2
    prefill.spend_of_draft(1, 400)
    assert prefill.tokens_of_draft("model", 3) == 2 * 3
    fitting(prefill, 1)
    assert prefill.tokens_of_draft("model", 1) == most + 2, "the next step has its own"


def with_draft_model(_folder: Path) -> Engine:
    law = fakes.hashed_law(20, salt=3)
    return fakes.fake_engine(law, draft_law=law, vocab_size=20, num_pages=200, num_draft_tokens=2)


def with_head(folder: Path) -> Engine:
    config = EngineConfig(target="llama", proposer="eagle", speculation="fixed", draft=heads.eagle(folder))
    return heads.assembled(config, zoo.ours(zoo.reference("llama")))


@pytest.mark.parametrize("engine_of", [with_draft_model, with_head])
def test_whatever_catches_up_says_what_it_has_read(tmp_path, engine_of):
    engine, said = engine_of(tmp_path), []
    engine.scheduler.prefill.spend_of_draft = lambda *read: said.append(read)
    fakes.run(engine, [fakes.request((5,) * 20, max_tokens=8)])
    assert said[0] in ((1, 20), (1, 21))
    assert all(tokens <= 4 for _, tokens in said[1:])


# ------------------------------------------------------------------------------------------- in an engine


def serve(
    bound_ms: float, prompts: dict[str, int], machine: Machine, draft: Machine | None = None
) -> tuple[fakes.Outputs, list[StepStats]]:
    """One request decodes, then the others come; all tokens, and every step."""
    now, law = [0.0], fakes.hashed_law(20, salt=3)
    engine = fakes.fake_engine(
        law,
        draft_law=law if draft else None,
        vocab_size=20,
        num_pages=200,
        max_model_len=600,
        clock=lambda: now[0],
        max_step_ms=bound_ms,
        max_batch_tokens=128,
        num_draft_tokens=2 if draft else 0,
    )

    def take_time(model, costs):
        forward = model.forward

        def timed(feeds):
            decoding = sum(len(feed.tokens) == 1 for feed in feeds)
            now[0] += costs.seconds(decoding, sum(len(feed.tokens) for feed in feeds) - decoding)
            return forward(feeds)

        model.forward = timed

    take_time(engine.runner, machine)
    if draft:
        take_time(engine.proposers.by_name["model"].runner, draft)
    outputs, steps, waiting = fakes.Outputs(), [], list(prompts.items())
    while waiting or engine.has_work:
        if waiting and len(steps) % 8 == 0:
            name, length = waiting.pop(0)
            tokens, most = tuple((7 * i + length) % 20 for i in range(length)), 300 if draft and length < 300 else 60
            engine.add(fakes.request(tokens, name=name, max_tokens=most))
        step = engine.step()
        outputs.take(step.events)
        steps.append(step.stats)
    return outputs, steps


def test_who_decodes_waits_no_longer_than_the_bound_and_tokens_are_the_same():
    machine, prompts = Machine(sequence=0.02, token=0.01), {"first": 20, "long": 500, "other": 90}
    free, unbounded = serve(1e6, prompts, machine)
    kept, bounded = serve(250.0, prompts, machine)
    longest = [max(sum(s.phase_seconds.values()) for s in steps if s.running > 1) for steps in (unbounded, bounded)]
    assert longest[0] > 1.0
    assert longest[1] <= 0.25
    assert kept.tokens == free.tokens
    assert kept.finished.keys() == free.finished.keys() == prompts.keys()


def test_a_draft_model_that_catches_up_keeps_the_bound_and_takes_nobodys_drafts():
    """A prompt that the target has read is news to it; whoever decodes goes on with drafts meanwhile."""
    machine, draft = Machine(sequence=0.01, token=0.01), Machine(sequence=0.005, token=0.005)
    prompts = {"first": 20, "long": 500}
    free, unbounded = serve(1e6, prompts, machine, draft)
    kept, bounded = serve(250.0, prompts, machine, draft)
    assert max(s.phase_seconds["propose"] for s in unbounded) > 0.6
    beside = [s for s in bounded if s.running > 1]
    assert max(sum(s.phase_seconds.values()) for s in beside) <= 0.25
    catching_up = [s for s in beside if any(f.kind == "draft" and f.tokens > 6 for f in s.forwards)]
    assert len(catching_up) > 10
    assert all(s.drafted >= 1 for s in catching_up)
    assert kept.tokens == free.tokens


def test_a_rehearsal_is_neither_bounded_nor_learned_from():
    engine = fakes.fake_engine(fakes.hashed_law(20), vocab_size=20, max_step_ms=1.0)
    teach(engine.scheduler.prefill, 0, 4, 1.0)
    few = fitting(engine.scheduler.prefill, 0, alone=True)
    with engine.rehearsing():
        assert fitting(engine.scheduler.prefill, 0, alone=True) == math.inf
        engine.warm_up()
    assert not engine.has_work
    assert engine.load.free_pages == engine.facts.total_pages
    assert fitting(engine.scheduler.prefill, 0, alone=True) == few < 4
