"""Tests of a load run once: the next load of the same model takes what passed, and runs what failed."""

from __future__ import annotations

import pytest

from engine.config import EngineConfig
from engine.model.fusion import fuse, straight
from engine.startup import self_test
from engine.startup.build import build_engine
from engine.verdicts import Verdicts, collected, verdict
from models import embedded_draft, embedded_eagle, embedded_medusa, embedded_target


def outcomes(known: list[bool], tests: list[bool]) -> tuple[list[bool], list[int], list[bool]]:
    """The outcomes, which tests ran, and what is found for the next load."""
    ran: list[int] = []
    verdicts = Verdicts(known)
    with collected(verdicts):
        results = [verdict(lambda i=i, passes=passes: ran.append(i) or passes) for i, passes in enumerate(tests)]
    return results, ran, verdicts.found


def test_what_passed_is_taken_and_what_failed_runs_again() -> None:
    tests = [True, False, True, True]
    assert outcomes([], tests) == (tests, [0, 1, 2, 3], tests)
    assert outcomes(tests, tests) == (tests, [1], tests)
    assert outcomes(tests[:2], tests) == (tests, [1, 2, 3], tests)


def test_a_test_that_raises_has_its_place_and_raises_again() -> None:
    def fails() -> bool:
        raise ValueError("refused")

    first, second = Verdicts(), None
    for verdicts in (first, second or Verdicts(first.found)):
        with collected(verdicts), pytest.raises(ValueError, match="refused"):
            verdict(fails)
        with collected(verdicts):
            assert verdict(lambda: True)
        assert verdicts.found == [False, True]


def test_outside_of_a_load_every_test_runs() -> None:
    ran: list[int] = []
    for i in range(2):
        assert verdict(lambda i=i: ran.append(i) or True)
    assert ran == [0, 1]


def test_a_pair_that_was_tested_is_loaded_without_a_test_and_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    heads = {"medusa": str(embedded_medusa()), "eagle": str(embedded_eagle())}
    config = EngineConfig(target=str(embedded_target()), draft=str(embedded_draft()), threads=1, **heads)
    first = Verdicts()
    with collected(first):
        tested = build_engine(config)
    assert first.found
    assert all(first.found)

    def never(*_: object) -> bool:
        raise AssertionError("tested twice")

    for module, name in ((fuse.agree.__globals__, "_agree"), (straight.__dict__, "_same_bits")):
        monkeypatch.setitem(module, name, never)
    monkeypatch.setattr(self_test, "_passes", never)
    second = Verdicts(first.found)
    with collected(second):
        untested = build_engine(config)
    assert second.found == first.found
    assert kinds(tested) == kinds(untested)


def kinds(engine: object) -> list[str]:
    model = engine._target_pass._target.model
    return [type(module).__name__ for module in model.modules()] + [type(model.forward).__name__]
