"""K as it pays: on a virtual clock with known costs, noisy measurements and the engine's own scheduler and control."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence as Seq
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pilotfish.engine.control.acceptance import Acceptance, Source
from pilotfish.engine.control.adaptive import AdaptiveK
from pilotfish.engine.control.constants import EXPLORING
from pilotfish.engine.control.controller import Control, Speedup
from pilotfish.engine.control.cost_model import KNOTS, CostModel, quantities
from pilotfish.engine.control.goodput import Found, Offer, Traits, drafting_seconds
from pilotfish.engine.control.step_time import BatchLoad, StepFeedback
from pilotfish.engine.params import MAX_NUM_DRAFT, SpeculationMode
from pilotfish.engine.types import Sequence
from tests.clockwork import BUDGET, COSTS, MOST, READS, Books, Costs, Machine
from tests.engine.test_scheduler import sequence

INT8, SMALL, GPU = COSTS

# ------------------------------------------------------------------------------------------------- never slower

Cell = tuple[str, int, float, int]  # costs, batch, acceptance, context
BATCHES, ACCEPTANCES, CONTEXTS = (1, 4, 32), (0, 0.3, 0.6, 0.9), (64, 1024)


def pairs(shift: int) -> list[Cell]:
    """Any two values of different columns stand together in one of them; batches of 4 are short."""
    return [
        (list(COSTS)[(a + b + shift) % 3], batch, acceptance, CONTEXTS[(a + b // 2 + shift) % 2 if batch != 4 else 0])
        for b, batch in enumerate(BATCHES)
        for a, acceptance in enumerate(ACCEPTANCES)
    ]


GRID = pytest.mark.parametrize(
    ("cells", "runs"),  # first steps, and those that follow
    [
        pytest.param(pairs(0), (200, 120), id="pairs"),
        pytest.param(pairs(1), (500, 250), id="other pairs, longer", marks=pytest.mark.slow),
    ],
)


@cache
def settled(cell: Cell, runs: tuple[int, int]) -> tuple[Books, Books]:
    """A server just started: its first steps, and those after."""
    costs, batch, acceptance, context = cell
    machine = Machine(COSTS[costs], batch=batch, acceptance=acceptance, prompt=context)
    machine.warm_up()
    return machine.run(runs[0]), machine.run(runs[1])


@GRID
def test_never_slower_than_plain(cells: list[Cell], runs: tuple[int, int]) -> None:
    """With noise of 20 %, and one measurement in fifty five times too long. The first steps also have to find out."""
    for cell in cells:
        first, then = settled(cell, runs)
        assert first.against_plain >= 0.95, cell
        assert then.against_plain >= 0.97, cell


@GRID
def test_hardly_slower_than_the_best_fixed_number(cells: list[Cell], runs: tuple[int, int]) -> None:
    """Where the best gains less than 12 %, finding out may take longer than this.

    And where half of an output is over before the draft model has read everybody's prompt, K is not what matters.
    """
    found = {c: settled(c, runs)[1] for c in cells if c[1] * c[3] / BUDGET < 128 / 2}
    telling = {cell: books for cell, books in found.items() if books.fixed[0] / books.fixed.min() > 1.12}
    assert len(telling) >= 3
    assert {cell: b.against_best for cell, b in telling.items() if b.against_best < 0.9} == {}


@GRID
def test_trials_lose_their_share_at_most(cells: list[Cell], runs: tuple[int, int]) -> None:
    """Beside it what was saved up, and what a trial that had begun was allowed to owe."""
    for cell in cells:
        first, then = settled(cell, runs)
        lost, seconds = first.trial_seconds + then.trial_seconds, first.seconds + then.seconds
        assert lost <= EXPLORING * seconds * 1.2 + 12 * seconds / sum(runs), cell


def test_a_load_that_comes_and_goes_is_followed() -> None:
    """Speculation pays for one sequence, not for 32 of them, and again for one."""
    machine = Machine(COSTS[INT8], batch=1, acceptance=0.6, prompt=64)
    machine.warm_up()
    for batch in (1, 32, 1):
        machine.batch = batch
        machine.run(150)
        books = machine.run(100)
        assert books.against_plain >= 0.97
        assert books.against_best >= 0.9


def test_text_that_changes_is_followed() -> None:
    """From predictable to hopeless within a hundred steps; back again as fast as 1 % of the time finds out."""
    machine = Machine(COSTS[INT8], batch=1, acceptance=0.9, prompt=64)
    machine.warm_up()
    machine.run(100)
    machine.acceptance = 0.0
    assert machine.run(100).against_plain > 0.7
    assert machine.run(200).against_plain >= 0.97
    machine.acceptance = 0.9
    machine.run(400)
    assert machine.run(100).against_best >= 0.9


# On a machine without AVX-512 a draft model reads a prompt of 1,024 tokens in the time of twenty plain steps.
SLOW_READER = Costs(
    lambda n, rows, context, attended: 0.038 + 0.009 * rows + 2e-7 * context + 1e-6 * attended,
    lambda n, rows, context, attended: 0.008 + 0.001 * rows + 2e-8 * attended,
)


@pytest.mark.slow
def test_a_trial_that_costs_many_steps_is_saved_up_for() -> None:
    """Drafts begin to be right while nobody is drafted for: that is found out, and until then little is lost."""
    plain, spent = np.zeros(3), np.zeros(3)
    for seed in range(3):
        machine = Machine(SLOW_READER, batch=1, acceptance=0.0, prompt=1024, seed=seed)
        machine.warm_up()
        for i, steps in enumerate((1500, 1500, 1000)):
            machine.acceptance = 0.9 if i else 0.0
            books = machine.run(steps)
            plain[i], spent[i] = plain[i] + books.fixed[0], spent[i] + books.seconds
    assert (plain / spent >= (0.97, 1.0, 1.1)).all()


def test_looking_up_pays_where_it_finds_and_costs_nothing_where_not() -> None:
    """A proposer that returns nothing three times of four, and costs microseconds."""
    for acceptance, hits in ((0.8, 0.25), (0.0, 0.5)):
        machine = Machine(COSTS[INT8], batch=8, acceptance=acceptance, hits=hits, prompt=64, looks_up=True)
        machine.warm_up()
        machine.run(200)
        books = machine.run(120)
        assert books.against_plain >= 0.97, (acceptance, hits)
        assert books.against_best >= 0.9, (acceptance, hits)


def test_its_own_estimate_of_the_gain_is_about_right() -> None:
    machine = Machine(COSTS[GPU], batch=4, acceptance=0.9, prompt=64, noise=0.1, outliers=0)
    machine.warm_up()
    machine.run(250)
    books = machine.run(120)
    assert Speedup.ratio_of(machine.control.gain) == pytest.approx(books.against_plain, rel=0.15)


def test_fixed_stays_fixed_and_off_stays_off() -> None:
    """Whatever it costs; control only learns from them."""
    fixed = Machine(COSTS[SMALL], batch=4, acceptance=0.0, prompt=64, output=500, mode=SpeculationMode.FIXED)
    off = Machine(COSTS[GPU], batch=4, acceptance=0.9, prompt=64, output=500, mode=SpeculationMode.OFF)
    fixed.run(40)
    off.run(40)
    assert {k for step in fixed.chosen[5:] for k in step} == {MOST}
    assert {k for step in off.chosen for k in step} == {0}


# ------------------------------------------------------------------------------------------------ broken clocks


@settings(max_examples=10, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(
    times=st.lists(st.sampled_from([0.0, -1.0, 1e-12, 0.004, 0.02, 1e3, 1e9, 1e300, math.inf, math.nan]), min_size=1),
    batch=st.integers(1, 9),
    looks_up=st.booleans(),
    acceptance=st.sampled_from([0.0, 0.5, 1.0]),
)
def test_a_broken_clock_costs_speed_at_most(times: list[float], batch: int, looks_up: bool, acceptance: float) -> None:
    machine = Machine(COSTS[SMALL], batch=batch, acceptance=acceptance, prompt=9, output=30, looks_up=looks_up)
    count = iter(range(10**9))
    machine.measured = lambda _: times[next(count) % len(times)]
    for _ in range(40):
        machine.step()
        assert all(0 <= k <= MOST for k in machine.chosen[-1])
    machine.schedule.check_invariants()


# ---------------------------------------------------------------------------------------------------- the parts


@settings(max_examples=20, derandomize=True)
@given(
    wishes=st.lists(st.tuples(st.sampled_from(SpeculationMode), st.integers(0, MAX_NUM_DRAFT)), min_size=1, max_size=9),
    budget=st.integers(0, 40),
    prompt_rows=st.sampled_from([0, 0, 30]),
)
def test_limits_and_budget_are_kept(wishes: list[tuple[SpeculationMode, int]], budget: int, prompt_rows: int) -> None:
    sequences = [sequence(str(i), 5 + i, max_len=60) for i in range(len(wishes))]
    for one, (mode, limit) in zip(sequences, wishes, strict=True):
        one.speculation = replace(one.speculation, mode=mode, num_draft_tokens=limit)
    limits = [limit if mode is not SpeculationMode.OFF else 0 for mode, limit in wishes]
    for control in (Control(), AdaptiveK(), AdaptiveK({"model": READS})):
        for _ in range(4):
            chosen = control.choose(sequences, limits, budget, prompt_rows)
            assert sum(chosen) <= budget
            assert all(k <= limit for k, limit in zip(chosen, limits, strict=True))
            control.learn(round_of(sequences, chosen))


def test_nothing_is_weighed_without_room_for_a_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes some 10 ms, which first tokens of others wait for."""
    control, weighed = AdaptiveK(), list[object]()
    monkeypatch.setattr(control, "_look_up", lambda sequences, limits: weighed.append(sequences))
    sequences = [sequence(str(i), 5, max_len=60) for i in range(3)]
    for budget, expected in ((0, 0), (8, 1)):
        control.choose(sequences, [4] * 3, budget, 0)
        assert len(weighed) == expected


def round_of(sequences: Seq[object], chosen: list[int], seconds: float = 0.01) -> StepFeedback:
    passes = [(len(sequences), len(sequences))] * max(chosen)
    lengths = [len(s.tokens) for s in sequences]
    accepted = [k // 2 for k in chosen]
    return StepFeedback(sequences, lengths, chosen, chosen, accepted, passes, seconds / 4, seconds)


@settings(max_examples=40, derandomize=True)
@given(
    chances=st.lists(st.lists(st.floats(0.05, 0.99), min_size=3, max_size=3), min_size=1, max_size=3),
    a_row=st.floats(0, 2),
    a_pass=st.floats(0, 1),
)
def test_the_choice_is_the_best_of_all_that_take_the_likeliest_first(
    chances: list[list[float]], a_row: float, a_pass: float
) -> None:
    """Against every prefix of the ranking, each priced by hand."""
    kept = np.cumprod(np.array(chances), 1)
    count, depth = kept.shape
    prices, target = priced(a_pass, 0.1), priced(5.0, a_row)
    zeros = np.zeros(count)
    seconds = drafting_seconds(prices, kept, zeros, zeros, np.ones(count), Traits())
    offer = Offer(np.full(count, depth), kept, seconds, 0.0, zeros, zeros)
    load = BatchLoad(count, count, count, 0, 0)
    found = offer.best(load, target, 99)
    slots = sorted((-kept[i, d], i, d) for i in range(count) for d in range(depth))
    rates = []
    for taken in range(len(slots) + 1):
        ks = [sum(1 for _, j, _ in slots[:taken] if j == i) for i in range(count)]
        tokens = count + sum(-slot[0] for slot in slots[:taken])
        passes = [sum(k > d for k in ks) for d in range(max(ks))]
        cost = 5.0 + a_row * (count + sum(ks)) + sum(a_pass + 0.1 * n for n in passes)
        rates.append(tokens / cost)
    rate = found.load.tokens / (5.0 + a_row * found.load.rows + found.load.seconds)
    assert rate == pytest.approx(max(rates), rel=1e-3)


def priced(a_pass: float, a_row: float) -> CostModel:
    """Prices that are known."""
    prices = CostModel()
    prices.most_rows, prices._values = 100.0, np.array([a_pass, 0, *[0] * 4, *[a_row] * (len(prices._curve) - 1)])
    prices._curve = a_row * np.cumsum([0, *np.diff(KNOTS)])
    return prices


def test_prices_are_found_and_never_fall() -> None:
    """From noisy steps of many shapes: what unseen shapes between them cost."""
    random, prices = np.random.default_rng(1), CostModel()
    for _ in range(2000):
        n, k = int(random.integers(1, 17)), int(random.integers(0, 8))
        prices.learn(shape(n, n * (1 + k)), true_seconds(n, n * (1 + k)) * random.lognormal(0, 0.2))
    for n, k in ((1, 0), (1, 5), (7, 2), (16, 0), (16, 7)):
        rows = n * (1 + k)
        assert prices.of(shape(n, rows)) == pytest.approx(true_seconds(n, rows), rel=0.12)
    assert (np.diff(prices.rows(np.arange(1.0, 400.0))) >= 0).all()


def shape(n: int, rows: int) -> np.ndarray:
    return quantities(passes=1, sequences=n, rows=[rows])


def true_seconds(n: int, rows: int) -> float:
    return 0.01 + 0.0002 * n + 0.0004 * max(0, rows - 16)


def test_what_was_not_measured_for_long_is_still_known() -> None:
    """A thousand steps of one size leave what is known of another as it was."""
    prices = CostModel()
    for _ in range(30):
        prices.learn(shape(1, 1), 0.010)
        prices.learn(shape(1, 5), 0.014)
    for _ in range(1000):
        prices.learn(shape(1, 5), 0.014)
    assert prices.of(shape(1, 1)) == pytest.approx(0.010, rel=0.05)


MODEL = Source("model")


def auto(name: str, prompt: int, max_len: int) -> Sequence:
    one = sequence(name, prompt, max_len=max_len)
    one.speculation = replace(one.speculation, mode=SpeculationMode.AUTO, num_draft_tokens=8)
    return one


def judged(acceptance: Acceptance, sequences: Seq[object], drafted: Seq[int], accepted: Seq[int]) -> None:
    acceptance.learn([(one, MODEL) for one in sequences], np.array(drafted), np.array(accepted))


def test_acceptance_follows_the_text_and_strangers_get_the_average() -> None:
    acceptance, old, new = Acceptance(), sequence("old", 4), sequence("new", 4)
    for kept, least, most in ((4, 0.85, 1.0), (0, 0.0, 0.1)):
        for _ in range(300):
            judged(acceptance, [old], [4], [kept])
        chances = acceptance.kept([(old, MODEL), (new, MODEL)], 4)
        assert (chances[:, 0] >= least).all()
        assert (chances[:, 0] <= most).all()
        assert acceptance.kept([(new, MODEL)], 1, hope=0.8)[0, 0] >= 0.5, "it may be unlike any before"
    acceptance.forget(old)
    assert acceptance.kept([(old, MODEL)], 4) == pytest.approx(acceptance.kept([(new, MODEL)], 4)), "it is over"


def test_a_few_drafts_tell_what_a_sequence_is_like() -> None:
    """Of sequences that keep every draft or none, three drafts tell which kind one is; the average is of neither."""
    acceptance = Acceptance()
    for i in range(40):
        pair = sequence(f"good {i}", 4), sequence(f"bad {i}", 4)
        for _ in range(6):
            judged(acceptance, pair, [4, 4], [4, 0])
        for one in pair:
            acceptance.forget(one)
    for kept, least, most in ((1, 0.8, 1.0), (0, 0.0, 0.1)):
        fresh = sequence(f"fresh {kept}", 4)
        before = acceptance.kept([(fresh, MODEL)], 1)[0, 0]
        for _ in range(3):
            judged(acceptance, [fresh], [1], [kept])
        assert 0.3 < before < 0.7
        assert least <= acceptance.kept([(fresh, MODEL)], 1)[0, 0] <= most


def test_an_output_is_expected_to_go_on_for_as_long_as_earlier_ones_were() -> None:
    control, one, nothing = AdaptiveK(), auto("one", 60, max_len=1060), np.zeros(1)
    assert control._rounds([one], nothing, nothing) == 1000, "its limit is all that is known"
    for length in (40, 50, 60):
        ended = auto(str(length), 60, max_len=1060)
        ended.tokens += [1] * length
        control.end(ended)
    assert control._rounds([one], nothing, nothing) == pytest.approx(50, rel=0.02)
    assert control._rounds([one], nothing, np.ones(1)) == pytest.approx(25, rel=0.02), "two tokens in each"
    with control.practising():
        control.end(auto("none", 60, max_len=1060))
        control.end(ended)
    assert control._rounds([one], nothing, nothing) == pytest.approx(50, rel=0.02)


def test_short_matches_and_long_ones_and_a_model_are_known_apart() -> None:
    """Of two that draft for a sequence: where a long match was found it is kept, else the model's drafts are."""
    one = auto("one", 4, max_len=4000)
    one.candidates, one.choice = ("model", "suffix"), "model"
    is_long = False
    control = AdaptiveK({"suffix": Traits(find=lambda *_: Found((1,) * 4, 16 if is_long else 2))})
    chosen = Counter[tuple[bool, str, bool]]()
    for step in range(400):
        is_long = step % 2 == 1
        (k,) = control.choose([one], [4], 64, 0)
        is_model = one.drafter == "model"
        if step >= 200 and not control.is_exploring and k:
            chosen[is_long, one.drafter, k > 2] += 1
        kept = min(k, 3) if is_model else k if is_long else 0
        passes = [(1, 1)] * k if is_model else []
        feedback = [one], [len(one.tokens)], [k], [k], [kept], passes, 0.001 * len(passes), 0.01
        one.tokens += [1 if is_long else 3] * kept + [2]
        control.learn(StepFeedback(*feedback))
    assert set(chosen) == {(True, "suffix", True), (False, "model", True)}
    assert min(chosen.values()) > 50


def test_a_control_begins_with_what_another_knew() -> None:
    """After a way through JSON it chooses as the first one would; what is no state is refused."""
    machine = Machine(COSTS[INT8], batch=2, acceptance=0.9, prompt=64)
    machine.warm_up()
    machine.run(200)
    old, new = machine.control, AdaptiveK({"model": READS})
    state = json.loads(json.dumps(old.state()))
    new.restore(state)
    old._since_plain = 0
    both = [auto(str(i), 60, max_len=200) for i in range(2)]
    assert any(old.choose(both, [8, 8], 64, 0))
    assert new.choose(both, [8, 8], 64, 0) == old.choose(both, [8, 8], 64, 0)
    for broken in ({}, state | {"target": {"count": 3}}, state | {"acceptance": [{"proposer": "model"}]}):
        with pytest.raises((ValueError, KeyError, TypeError)):
            AdaptiveK().restore(broken)
    with pytest.raises(ValueError, match="prices"):
        AdaptiveK().restore(state | {"target": state["target"] | {"values": [-1.0] * len(state["target"]["values"])}})


def test_gain() -> None:
    gain, one, two = Speedup(), sequence("one", 4), sequence("two", 4)
    assert (Speedup.ratio_of(gain), gain.of(one)) == (1.0, 1.0)
    gain.add([one, two], [4, 1], spent=0.02, plain_step=0.01)
    assert Speedup.ratio_of(gain) == pytest.approx(1.25)
    assert gain.of(one) == pytest.approx(2.0)
    assert gain.of(two) == pytest.approx(0.5)
    gain.forget(one)
    assert gain.of(one) == 1.0
