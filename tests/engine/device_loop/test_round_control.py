"""How many drafts rounds get: AUTO by what rounds cost and bring, on a clock of their own."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from torch import Tensor

from engine.control.controller import DelayedFeedback, FixedK, levelled
from engine.control.controller import StepFeedback as Done
from engine.control.cost_model import KNOTS
from engine.device_loop.repertoire import Repertoire
from engine.device_loop.round import Round, RoundOutput
from engine.params import SamplingParams, SpeculationMode, SpeculationSettings, Verification
from engine.types import KVCursor, Request, Sequence
from tests import zoo
from tests.loops import engine_of, models

pytestmark = pytest.mark.slow

AUTO, FIXED = SpeculationMode.AUTO, SpeculationMode.FIXED


def sequence(mode: SpeculationMode = AUTO, unseen: int = 0) -> Sequence:
    """Of ten tokens, of which the draft model has missed some."""
    request = Request(request_id="r", token_ids=tuple(range(10)))
    settings = SpeculationSettings(mode=mode, num_draft_tokens=8, proposer="model", verification=Verification.COUPLED)
    cursors = {"target": KVCursor([0], 9), "draft": KVCursor([0], 8 - unseen)}
    return Sequence(request, 0, settings, 60, frozenset(), list(range(10)), **cursors)


@pytest.mark.parametrize(
    ("chosen", "given"),
    [
        ([4, 4, 0, 0], [2, 2, 2, 2]),
        ([1, 0, 0, 0], [1, 1, 1, 1]),  # a probe
        ([0, 0, 0, 0], [0, 0, 0, 0]),
        ([3, 2, 3, 3], [3, 3, 3, 3]),
    ],
)
def test_a_round_has_one_k(chosen: list[int], given: list[int]) -> None:
    assert levelled([sequence() for _ in chosen], [4] * 4, chosen) == given


def test_limits_and_fixed_ones_stay() -> None:
    assert levelled([sequence(), sequence()], [4, 1], [4, 1]) == [2, 1]
    assert levelled([sequence(FIXED), sequence(FIXED)], [3, 1], [3, 1]) == [3, 1]
    # Rows that are there anyway are used.
    assert levelled([sequence(FIXED), sequence()], [4, 4], [4, 0]) == [4, 4]
    assert levelled([], [], []) == []


def test_who_would_have_much_to_read_gets_drafts_only_if_chosen() -> None:
    far = sequence(unseen=8)
    assert levelled([sequence(), far], [4, 4], [4, 0]) == [2, 0]
    assert levelled([sequence(), far], [4, 4], [2, 2]) == [2, 2]


def test_rows_that_count_for_nobody_are_paid_for() -> None:
    one = sequence()
    usual = {"sequences": [one], "lengths": [10], "asked": [2], "drafted": [2], "accepted": [1], "draft_passes": []}
    done = Done(**usual, draft_seconds=1.0, other_seconds=1.0, has_prompts=False, rows=12)
    assert done.load.rows == 12
    assert done.load.quantities[6:].sum() == min(12, KNOTS[-1])


class Script(FixedK):
    """These choices, one after another, and whether each is a trial."""

    def __init__(self, *choices: tuple[int, bool]) -> None:
        super().__init__()
        self.choices = list(choices)

    def choose(self, sequences, limits, budget, prompt_rows):
        k, self.is_exploring = self.choices.pop(0)
        return [k] * len(sequences)


def test_a_plain_step_that_is_not_known_yet_is_not_asked_for_again() -> None:
    """Drafts, a plain step that is due, then drafts as before; plain steps that go on are not interrupted twice."""
    one, inner = sequence(), Script((3, False), (0, False), (4, False), (0, False), (0, False), (0, False))
    late = DelayedFeedback(inner)
    assert [late.choose([one], [8], 8, 0)[0] for _ in range(8)] == [3, 0, 3, 4, 0, 4, 0, 0]
    late.forget(one)


def test_a_trial_is_not_repeated() -> None:
    one, inner = sequence(), Script((1, True), (0, False), (0, False))
    late = DelayedFeedback(inner)
    assert [late.choose([one], [8], 8, 0)[0] for _ in range(3)] == [1, 0, 0]


@dataclass
class Costs:
    """Seconds of rounds on a clock that nothing else moves."""

    a_draft: float
    a_verification: float
    a_row: float
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Costly:
    """Records rounds that take as long as they cost; recording itself takes longer than any round."""

    costs: Costs
    has_room = True

    def __call__(self, round_: Round):
        self.costs.now += 1.5

        def run(slots: Tensor, between) -> RoundOutput:
            drafts = round_.propose(slots)
            self.costs.now += self.costs.a_draft * round_.k
            between()
            self.costs.now += self.costs.a_verification + self.costs.a_row * round_.size * (round_.k + 1)
            return round_.verify(slots, drafts)

        return run


def rate(costs: Costs, pair, mode: SpeculationMode, rounds: int = 300, seed: int = 0) -> tuple[float, float]:
    """Tokens per second with four sequences at a time, and drafts per round and sequence; the last third counts."""
    engine = engine_of(pair=pair, speculation=mode, max_model_len=128, max_batch_size=4, num_draft_tokens=4, pages=40)
    engine._rounds._clock = costs
    engine._rounds.repertoire = Repertoire(engine._rounds._round, Costly(costs), clock=costs)
    engine.record()
    made = drafted = 0
    for i in range(rounds):
        while engine.num_running + engine.num_waiting < 4:
            seed += 1
            sampling = SamplingParams(temperature=1.0, max_tokens=100, ignore_eos=True, seed=seed)
            engine.add(Request(request_id=f"{i}-{engine.num_waiting}", token_ids=(5, 6, 7), sampling=sampling))
        stats = engine.step().stats
        if i == 2 * rounds // 3:
            began, made, drafted = costs.now, 0, 0
        made, drafted = made + stats.generated_tokens, drafted + stats.drafted
    return made / (costs.now - began), drafted / (4 * rounds / 3)


def wrong():
    """A draft that knows nothing."""
    return models()[0], zoo.ours(zoo.reference("llama", seed=7))


def test_right_and_cheap_drafts_are_made() -> None:
    target = models()[0]
    auto, drafts = rate(Costs(0.1, 1.0, 0.0), (target, target), AUTO)
    plain, _ = rate(Costs(0.1, 1.0, 0.0), (target, target), SpeculationMode.OFF)
    assert drafts > 3
    assert auto > 2.5 * plain


def test_wrong_drafts_are_left() -> None:
    """Not slower than plain decoding, but for probes; a hundred rounds may hold a series that others pay for."""
    costs = 0.5, 1.0, 0.02
    plain, _ = rate(Costs(*costs), wrong(), SpeculationMode.OFF)
    runs = [rate(Costs(*costs), wrong(), AUTO, seed=1000 * i) for i in range(4)]
    auto, drafts = (sum(values) / len(runs) for values in zip(*runs, strict=True))
    assert drafts < 0.1
    assert auto > 0.93 * plain


def test_right_drafts_that_cost_more_than_they_bring_are_left() -> None:
    """Where rows are what costs, as in large batches, a round of K drafts costs K + 1 times as much."""
    target = models()[0]
    auto, _ = rate(Costs(0.3, 0.05, 0.25), (target, target), AUTO)
    plain, _ = rate(Costs(0.3, 0.05, 0.25), (target, target), SpeculationMode.OFF)
    assert auto > 0.92 * plain
