"""Control inside the engine: practice at load, and what an engine with it does."""

from __future__ import annotations

from itertools import count

import pytest

from engine.control.adaptive import AdaptiveK
from engine.engine import Engine
from engine.startup.calibrate import SHAPES, calibrate
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
    assert engine.free_pages == engine.total_pages
    control = engine.control
    assert control.target.count > len(SHAPES)
    assert engine.spec_gain == 1.0


def test_practice_keeps_to_its_time() -> None:
    engine, clock = engine_with(draft_law=LAW), Ticks()
    calibrate(engine, 0.0, clock)
    assert engine.control.target.count == 0
    calibrate(engine, 0.002, clock)
    few = engine.control.target.count
    calibrate(engine, 1e9, clock)
    assert 0 < few < engine.control.target.count / 2


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
