"""Tests of a load run once: the next load of the same model takes what passed, and runs what failed."""

from __future__ import annotations

import pytest
import torch

from engine.config import EngineConfig
from engine.model.decoder.families.table import architecture_for
from engine.startup import self_test
from engine.startup.build import assemble, build_engine
from engine.verdicts import Verdicts, collected, verdict
from models import embedded_draft, embedded_eagle, embedded_medusa, embedded_target
from tests import fakes, zoo
from tests.engine.model.test_stack import plain_model, several_passes


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


def test_a_pair_that_was_tested_is_loaded_without_a_test(monkeypatch: pytest.MonkeyPatch) -> None:
    heads = {"medusa": str(embedded_medusa()), "eagle": str(embedded_eagle())}
    config = EngineConfig(target=str(embedded_target()), draft=str(embedded_draft()), threads=1, **heads)
    first = Verdicts()
    with collected(first):
        tested = build_engine(config)
    assert all(first.found)

    def never(*_: object) -> bool:
        raise AssertionError("tested twice")

    monkeypatch.setattr(self_test, "_passes", never)
    again = Verdicts(first.found)
    with collected(again):
        untested = build_engine(config)
    assert again.found == first.found
    requests = fakes.requests([(5 + i, 6, 7) for i in range(4)], max_tokens=40, temperature=0.8, seed=3)
    assert fakes.run(untested, requests).tokens == fakes.run(tested, requests).tokens


HELD = [(torch.float32, False), (torch.bfloat16, False), (torch.float32, True), (torch.bfloat16, True)]
OUTSIDE = sorted(family for family in zoo.FAMILIES if architecture_for(zoo.family_config(family)) is None)


@pytest.mark.parametrize(
    ("family", "dtype", "int8"),
    [
        pytest.param(family, *HELD[i % 4], marks=[pytest.mark.slow] * (i % 4 > 0), id=family)
        for i, family in enumerate(OUTSIDE)
    ],
)
def test_a_model_that_was_tested_gives_the_same_bits_without_a_test(
    family: str, dtype: torch.dtype, int8: bool
) -> None:
    """No test of a load may leave behind what the model needs."""
    logits, known = [], Verdicts()
    for _ in range(2):
        known = Verdicts(known.found)
        with collected(known):
            made = zoo.as_served(plain_model(family, dtype), "int8" if int8 else None)
            assemble(EngineConfig(target=family), made)
        logits.append(several_passes(made))
    assert any(known.found)
    assert torch.equal(*logits)
