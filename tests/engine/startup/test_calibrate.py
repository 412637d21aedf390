"""Control inside the engine: calibration at load and in idle time, and what an engine with it does."""

from __future__ import annotations

from dataclasses import replace
from itertools import count

import pytest

from pilotfish.engine.control.adaptive import AdaptiveK
from pilotfish.engine.engine import Engine
from pilotfish.engine.startup import warm
from pilotfish.engine.startup.calibrate import SHAPES, Calibration, calibrate
from tests import fakes
from tests.clockwork import READS
from tests.engine.test_engine import LAW, VOCAB

EVERYTHING = {"vocab_size": VOCAB, "max_model_len": 600, "num_pages": 400, "num_draft_tokens": 8}


class Ticks:
    """A clock on which everything takes as long as it is called for."""

    def __init__(self) -> None:
        self._ticks = count()

    def __call__(self) -> float:
        return next(self._ticks) * 0.001


def engine_with(**options: object) -> Engine:
    options = {**EVERYTHING, "control": AdaptiveK({"model": READS}), "clock": Ticks(), **options}
    return fakes.fake_engine(LAW, **options)


@pytest.mark.parametrize("options", [{"draft_law": LAW}, {"max_model_len": 20}, {"max_batch_size": 2}])
def test_practice_teaches_costs_and_leaves_no_request(options: dict[str, object]) -> None:
    engine = engine_with(**options)
    calibrate(engine, 1e9)
    engine.check_invariants()
    assert not engine.has_work
    assert engine.load.free_pages == engine.facts.total_pages
    control = engine.control
    assert control.times.target.count > len(SHAPES)
    assert engine.load.spec_gain == 1.0


def test_practice_keeps_to_its_time() -> None:
    engine, clock = engine_with(draft_law=LAW), Ticks()
    calibrate(engine, 0.0, clock)
    assert engine.control.times.target.count == 0
    calibrate(engine, 0.002, clock)
    few = engine.control.times.target.count
    calibrate(engine, 1e9, clock)
    assert 0 < few < engine.control.times.target.count / 2


@pytest.mark.parametrize(("salt", "least", "most"), [(0, 3.0, 8.0), (9, 0.0, 1.0)])
def test_drafts_that_are_kept_are_made_and_others_are_not(salt: int, least: float, most: float) -> None:
    """A draft with the target's own law, and one with another; on this clock a pass costs the same at any size."""
    engine = engine_with(draft_law=fakes.hashed_law(VOCAB, salt=salt), proposer="model")
    engine.add(fakes.request((1, 2), max_tokens=400, ignore_eos=True))
    steps = drafted = 0
    while engine.has_work:
        stats = engine.step().stats
        steps, drafted = steps + 1, drafted + stats.drafted
    assert least <= drafted / steps <= most
    assert (stats.spec_gain > 2) == (salt == 0)


def after(num_steps: int) -> object:
    """What says after so many steps that a request has come."""
    left = count(num_steps - 1, -1)
    return lambda: next(left) <= 0


def answers(engine: Engine, calibration: Calibration | None) -> tuple[list[object], list[object]]:
    """Events and statistics of requests, between which the engine calibrates; times aside."""
    events, stats = list[object](), list[object]()
    for i in range(12):
        if calibration is not None:
            calibration.go_on(after(1 + i))
        prompt = [i % 3] * 70  # every third one finds its prompt cached
        engine.add(fakes.request(prompt, name=str(i), max_tokens=9, seed=i, temperature=1.0))
        while engine.has_work:
            output = engine.step()
            events += output.events
            stats.append(replace(output.stats, phase_seconds={}, decode_seconds=(), prompt_token_seconds=0.0))
    return events, stats


@pytest.mark.parametrize("options", [{"draft_law": LAW}, {"draft_law": LAW, "max_batch_size": 2}, {}])
def test_requests_do_not_notice_a_calibration_in_parts(options: dict[str, object]) -> None:
    alone, calibrating = (engine_with(control=None, **options) for _ in range(2))
    calibrating.pages.watch()
    alone.pages.watch()
    assert answers(calibrating, Calibration(calibrating, 1e9)) == answers(alone, None)
    calibrating.check_invariants()
    assert calibrating.pages.take_changes() == alone.pages.take_changes()
    assert vars(calibrating.scheduler.shares) == vars(alone.scheduler.shares)


def test_the_speed_up_of_requests_is_theirs() -> None:
    engine = engine_with(draft_law=LAW, proposer="model")
    calibration = Calibration(engine, 1e9)
    while not calibration.is_over:
        before, learned = engine.control.gain, engine.control.times.target.count
        fakes.run(engine, [fakes.request((1, 2), max_tokens=30)])
        gain = engine.load.spec_gain
        calibration.go_on()
        assert (engine.control.gain is before, engine.load.spec_gain) == (True, gain)
        assert engine.control.times.target.count > learned


def test_a_calibration_takes_no_page_that_the_prefix_cache_keeps() -> None:
    engine = engine_with(draft_law=LAW, num_pages=30, max_model_len=200)
    for i in range(30):
        fakes.run(engine, [fakes.request([i % VOCAB, i // VOCAB] * 30, name=str(i), max_tokens=2)])
    kept = dict(engine.pages._pages)
    before, calibration = engine.control.times.target.count, Calibration(engine, 1e9)
    while not calibration.is_over:
        calibration.go_on()
    assert engine.pages._pages == kept
    assert engine.control.times.target.count == before


def test_a_request_ends_a_calibration_after_the_step_under_way_and_it_begins_again() -> None:
    engine = engine_with(draft_law=LAW)
    calibration, step, steps = Calibration(engine, 1e9), engine.step, list[object]()
    engine.step = lambda: steps.append(output := step()) or output
    for _ in range(3):
        steps.clear()
        calibration.go_on(after(1))
        assert len(steps) == 1
        assert not engine.has_work
    assert len(calibration._todo) == len(Calibration(engine, 1e9)._todo)


@pytest.mark.parametrize(
    ("options", "saved", "tried", "calibrated", "kept"),
    [
        ({}, False, True, "before", 1),  # nobody calls `rest`
        ({"defers": True}, False, True, "idle", 1),
        ({"defers": True}, True, True, "idle", 1),  # a part of it, as the machine may be slower now
        ({"defers": True, "is_successor": True}, True, False, "never", 0),
        ({"defers": True, "is_successor": True}, False, False, "idle", 1),  # its predecessor was killed too early
        ({"defers": True, "calibrates": False}, False, True, "never", 0),
    ],
)
def test_what_an_engine_learns_before_it_is_ready_and_what_when_idle(
    options: dict[str, bool], saved: bool, tried: bool, calibrated: str, kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, told, keeps = engine_with(draft_law=LAW), list[str](), list[object]()
    monkeypatch.setattr(warm, "build_engine", lambda *_: engine)
    monkeypatch.setattr(warm, "_text", lambda *_: (1, 2, 3))
    monkeypatch.setattr("pilotfish.engine.engine.learned.recall", lambda *_: saved)
    monkeypatch.setattr("pilotfish.engine.engine.learned.keep", lambda *_: keeps.append(1))
    assert warm.load(engine.config, told.append, **options) is engine
    assert told == ["warming up"] * tried
    assert (engine.control.times.target.count > 0) == (calibrated == "before")
    engine.idle_tick()
    assert (engine.control.times.target.count > 0) == (calibrated == "before"), (
        "a standby is idle, and the machine is not"
    )
    while engine.idle_tick(lambda: False):
        assert not engine.has_work
    assert (engine.control.times.target.count > 0) == (calibrated != "never")
    assert len(keeps) == kept


def test_a_standby_takes_what_was_saved_since_it_was_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, found = engine_with(draft_law=LAW), iter([False, True])
    monkeypatch.setattr("pilotfish.engine.engine.learned.recall", lambda *_: next(found))
    warm.make_ready(engine, 4.0, uses_saved_calibration=True, is_successor=True, defers=True)
    assert not engine.idle_tick(lambda: False)
    assert engine.control.times.target.count == 0
    assert next(found, None) is None
