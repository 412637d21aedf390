"""`auto`: of several proposers each text gets the one that is best for it, on a virtual clock with known costs."""

from __future__ import annotations

import numpy as np
import pytest

from pilotfish.engine.control.adaptive import AdaptiveK
from pilotfish.engine.control.cost_model import CostModel
from pilotfish.engine.control.goodput import Traits, drafting_seconds, pick
from pilotfish.engine.params import SpeculationMode
from tests.clockwork import COSTS
from tests.covering import some
from tests.crossroads import Crossroads, Right, Text
from tests.engine.control.test_control import INT8, priced

TEXTS: dict[str, Text] = {
    "code": {"model": Right(0.68), "eagle": Right(0.62), "block": Right(0.5), "suffix": Right(0.85, 0.55, 4)},
    "repetition": {"model": Right(0.9), "eagle": Right(0.85), "block": Right(0.8), "suffix": Right(0.99, 1.0, 16)},
    "edits": {"model": Right(0.75), "eagle": Right(0.7), "block": Right(0.6), "suffix": Right(0.95, 0.9, 16)},
    "JSON": {"model": Right(0.85), "eagle": Right(0.7), "block": Right(0.75), "suffix": Right(0.6, 0.5, 3)},
    "unlike": {"model": Right(0.3), "eagle": Right(0.35), "block": Right(0.2), "suffix": Right(0.15, 0.2, 2)},
}
SINGLES = ("model", "eagle", "block", "suffix")


@pytest.mark.parametrize("text", some(TEXTS, ["code"]))
def test_hardly_slower_than_the_best_single_proposer(text: str) -> None:
    """Which one that is differs from text to text; what is lost is what finding out costs."""
    rates = {names: _rate(text, names) for names in (SINGLES, *((name,) for name in SINGLES))}
    auto = rates.pop(SINGLES)
    assert auto >= 0.93 * max(rates.values()), rates
    assert auto >= 0.97


def _rate(text: str, names: tuple[str, ...]) -> float:
    machine = Crossroads(COSTS[INT8], TEXTS[text], names)
    machine.rate(80)
    return machine.rate(240)


def test_a_fixed_number_of_drafts_is_of_the_best_proposer_too() -> None:
    """At K=4 whatever it costs: from the text where that repeats itself, and elsewhere of a model."""
    by_heart: Text = {"model": Right(0.9), "suffix": Right(0.1, 0.9, 3)}
    for text, best in ((TEXTS["repetition"], "suffix"), (by_heart, "model")):
        machine = Crossroads(COSTS[INT8], text, ("model", "suffix"), mode=SpeculationMode.FIXED, most=4)
        before = dict(machine.asked)
        machine.rate(100)
        asked = {name: machine.asked[name] - before[name] for name in machine.names}
        assert asked[best] > 0.7 * sum(asked.values()), (best, asked)


def test_a_text_that_changes_is_followed() -> None:
    """One output of which the first half repeats itself and the second is what the draft model knows, and back."""
    machine = Crossroads(COSTS[INT8], TEXTS["repetition"], ("model", "suffix"), output=100_000)
    machine.rate(150)
    machine.text = {"model": Right(0.9), "suffix": Right(0.05, 0.9, 16)}
    machine.rate(100)
    assert machine.rate(150) >= 0.9 * 2.6, "what the draft model makes of it alone"
    machine.text = TEXTS["repetition"]
    machine.rate(30)
    assert machine.rate(100) >= 0.9 * 7.0, "and the lookups, which are judged without being asked"


def making(prices: CostModel, traits: Traits, sequences: int, depth: int) -> np.ndarray:
    """Seconds of each draft of each sequence, if all share the passes."""
    kept, none = np.ones((sequences, depth)), np.zeros(sequences)
    return drafting_seconds(prices, kept, none, none, np.ones(sequences), traits, is_even=True)


def test_a_pass_that_makes_all_drafts_is_paid_once() -> None:
    """A pass costs 5 and a row 1: four drafts take one pass of five rows, or four passes of one."""
    prices = priced(5.0, 1.0)
    assert making(prices, Traits(is_parallel=True), 1, 4).tolist() == [[7, 1, 1, 1]]
    assert making(prices, Traits(), 1, 4).tolist() == [[6, 6, 6, 6]]
    assert making(prices, Traits(find=lambda *_: None), 1, 4).tolist() == [[0, 0, 0, 0]]


def test_passes_are_cheaper_for_those_who_share_them() -> None:
    """Each alone would draft with the cheap head; together they share the passes of the better model."""
    makers = [(priced(3.0, 0.01), Traits()), (priced(1.0, 0.01), Traits())]
    for sequences, seconds, best in ((1, 4.0, 1), (8, 16.0, 0)):
        kept = np.array([[[0.9, 0.8, 0.7]] * sequences, [[0.6, 0.3, 0.1]] * sequences]).cumsum(2)
        spent = np.array([making(*maker, sequences, 3) for maker in makers]).cumsum(2)
        limits, free = np.full((2, sequences), 3), np.zeros(sequences, bool)
        best_of = pick(kept, spent, limits, free, [False, False], float(sequences), seconds)
        assert best_of.tolist() == [best] * sequences


@pytest.mark.parametrize("is_fixed", [True, False])
def test_with_a_fixed_number_of_drafts_none_is_no_choice(is_fixed: bool) -> None:
    """The model's drafts do not pay, and the lookup has found nothing: the model drafts, as it was told to."""
    kept, spent = np.array([[[0.9, 1.8]], [[0.1, 0.2]]]), np.array([[[0.0, 0.0]], [[9.0, 18.0]]])
    limits = np.array([[0], [2]])
    assert pick(kept, spent, limits, np.array([is_fixed]), [True, False], 1.0, 1.0).tolist() == [1]


def test_drafts_that_a_proposer_cannot_make_are_not_counted_on() -> None:
    control, sequence = AdaptiveK({"medusa": Traits(most=4), "model": Traits()}), object()
    most = [control._most(sequence, name, limit) for name, limit in (("medusa", 8), ("medusa", 2), ("model", 8))]
    assert most == [4, 2, 8]
