"""How many drafts rounds get: AUTO by what rounds cost and bring, on a clock of their own."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from torch import Tensor

from pilotfish.engine.control.adaptive import AdaptiveK
from pilotfish.engine.control.controller import levelled
from pilotfish.engine.control.cost_model import KNOTS
from pilotfish.engine.control.step_time import StepFeedback as Done
from pilotfish.engine.device_loop.graph_cache import GraphCache, covering
from pilotfish.engine.device_loop.graphs import Graphs, MemoryBudget, MemoryUse
from pilotfish.engine.device_loop.round import Round
from pilotfish.engine.kernels.args import Committed
from pilotfish.engine.params import SpeculationMode
from pilotfish.engine.types import KVCursor, Sequence
from tests import fakes
from tests.card import here
from tests.loops import on_the_card, recorded

AUTO, FIXED = SpeculationMode.AUTO, SpeculationMode.FIXED


def sequence(mode: SpeculationMode = AUTO, unseen: int = 0) -> Sequence:
    """Of ten tokens, of which the draft model has missed some."""
    made = fakes.sequence(range(10), mode=mode, k=8, max_len=60)
    made.target, made.draft = KVCursor([0], 9), KVCursor([0], 8 - unseen)
    return made


@pytest.mark.parametrize(
    ("who", "limits", "chosen", "given"),
    [
        ("aaaa", [4, 4, 4, 4], [4, 4, 0, 0], [2, 2, 2, 2]),
        ("aaaa", [4, 4, 4, 4], [1, 0, 0, 0], [1, 1, 1, 1]),  # a probe
        ("aaaa", [4, 4, 4, 4], [0, 0, 0, 0], [0, 0, 0, 0]),
        ("aaaa", [4, 4, 4, 4], [3, 2, 3, 3], [3, 3, 3, 3]),
        ("aa", [4, 1], [4, 1], [2, 1]),
        ("ff", [3, 1], [3, 1], [3, 1]),
        ("fa", [4, 4], [4, 0], [4, 4]),  # rows that are there anyway are used
        ("", [], [], []),
        ("ar", [4, 4], [4, 0], [2, 0]),  # who would have much to read gets drafts only if chosen
        ("ar", [4, 4], [2, 2], [2, 2]),
    ],
)
def test_a_round_has_one_k(who: str, limits: list[int], chosen: list[int], given: list[int]) -> None:
    """Limits and fixed ones stay. `a` is for AUTO, `f` for FIXED, `r` for one whose draft has much to read."""
    kinds = {"a": (AUTO, 0), "f": (FIXED, 0), "r": (AUTO, 8)}
    assert levelled([sequence(*kinds[kind]) for kind in who], limits, chosen) == given


def test_rows_that_count_for_nobody_are_paid_for() -> None:
    one = sequence()
    usual = {"sequences": [one], "lengths": [10], "asked": [2], "drafted": [2], "accepted": [1], "draft_passes": []}
    done = Done(**usual, draft_seconds=1.0, other_seconds=1.0, rows=12)
    assert done.load.rows == 12
    assert done.load.quantities[6:].sum() == min(12, KNOTS[-1])


def test_a_plain_step_is_not_asked_for_again_before_its_time_is_known() -> None:
    """Rounds are read one late: each choice knows nothing of the one before it."""
    one, control, asked, late = sequence(), AdaptiveK(), list[int](), list[Done]()
    for k in [0, 4, 0, 4, *[None] * 300]:  # first what it practises
        k = control.choose([one], [4], 8, 0)[0] if k is None else k
        asked.append(k)
        late.append(Done([one], [10], [k], [k], [k], [(1, 1)] * k, 0.001 * k, 1.0))
        if len(late) > 1 or len(asked) < 5:
            control.learn(late.pop(0))
    plain = [i for i, k in enumerate(asked[4:]) if not k]
    assert len(plain) > 2
    assert not any(i + 1 in plain for i in plain)


@dataclass
class Costs:
    """Seconds of rounds on a clock that nothing else moves."""

    a_draft: float
    a_verification: float
    a_row: float
    now: float = 0.0

    def __call__(self) -> float:
        return self.now

    def plainly(self) -> float:
        """Tokens per second without drafts, of four sequences at a time."""
        return 4 / (self.a_verification + 4 * self.a_row)


class Costly:
    """Records rounds that take as long as they cost; recording itself takes longer than any round."""

    has_room = True

    def __init__(self, costs: Costs) -> None:
        self._costs, self._graphs = costs, Graphs(MemoryBudget(1, lambda: MemoryUse(0, 0)))

    def __call__(self, round_: Round):
        play, costs = self._graphs(round_), self._costs
        costs.now += 1.5

        def run(slots: Tensor, between) -> Committed:
            def drafted() -> None:
                costs.now += costs.a_draft * round_.k
                between()
                costs.now += costs.a_verification + costs.a_row * round_.size * (round_.k + 1)

            return play(slots, drafted)

        return run


def rate(costs: Costs, rounds: int) -> tuple[float, float]:
    """Tokens per second with four sequences at a time, and drafts per round and sequence; the last third counts."""
    with here(clock=costs):
        target, seed = on_the_card()[0], 0
        engine = recorded(
            shapes=(), pair=(target, target), speculation=AUTO, max_model_len=128, max_batch_size=4, num_draft_tokens=4
        )
        engine.rounds.graphs = GraphCache(engine.rounds.round_of, Costly(costs), clock=costs)
        engine.rounds.graphs.record(covering(4, 4))
        made = drafted = 0
        for i in range(rounds):
            while engine.load.num_running + engine.load.num_waiting < 4:
                seed += 1
                asked = {"temperature": 1.0, "max_tokens": 100, "ignore_eos": True, "seed": seed}
                engine.add(fakes.request((5, 6, 7), name=f"{i}-{engine.load.num_waiting}", **asked))
            stats = engine.step().stats
            if i == 2 * rounds // 3:
                began, made, drafted = costs.now, 0, 0
            made, drafted = made + stats.generated_tokens, drafted + stats.drafted
    return made / (costs.now - began), drafted / (4 * rounds / 3)


def test_right_and_cheap_drafts_are_made() -> None:
    costs = Costs(0.1, 1.0, 0.0)
    auto, drafts = rate(costs, rounds=60)
    assert drafts > 3
    assert auto > 2.5 * costs.plainly()


@pytest.mark.slow
def test_right_drafts_that_cost_more_than_they_bring_are_left() -> None:
    """Where rows are what costs, as in large batches, a round of K drafts costs K + 1 times as much."""
    costs = Costs(0.3, 0.05, 0.25)
    assert rate(costs, rounds=300)[0] > 0.92 * costs.plainly()
