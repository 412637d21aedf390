"""The interface that chooses how many drafts each sequence gets, and the speed-up that results."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from pilotfish.engine.control.constants import KEEP
from pilotfish.engine.control.step_time import StepFeedback, StepTime
from pilotfish.engine.params import SpeculationMode
from pilotfish.engine.types import Sequence


class Speedup:
    """Seconds that plain decoding would have taken for the same tokens, over those spent: recently, and by sequence.

    1 is plain decoding, and the value before any step.
    """

    def __init__(self) -> None:
        self._plain = self._spent = 0.0
        self._each: dict[Sequence, tuple[float, float]] = {}

    @staticmethod
    def ratio_of(*gains: Speedup) -> float:
        """The recent speed-up of all of them together."""
        spent = sum(gain._spent for gain in gains)  # noqa: SLF001 - its own
        return sum(gain._plain for gain in gains) / spent if spent > 0 else 1.0  # noqa: SLF001

    def of(self, sequence: Sequence) -> float:
        """The speed-up over all steps of one output."""
        plain, spent = self._each.get(sequence, (0.0, 0.0))
        return plain / spent if spent > 0 else 1.0

    def add(self, sequences: Seq[Sequence], num_tokens: Seq[int], spent: float, plain_step: float) -> None:
        """Add a step: tokens of each sequence, its seconds, and those of a plain step, which yields one token each."""
        mean = sum(num_tokens) / len(sequences)
        self._plain = self._plain * KEEP + mean * plain_step
        self._spent = self._spent * KEEP + spent
        for sequence, tokens in zip(sequences, num_tokens, strict=True):
            plain, already = self._each.get(sequence, (0.0, 0.0))
            self._each[sequence] = plain + tokens * plain_step, already + spent

    def forget(self, sequence: Sequence) -> None:
        self._each.pop(sequence, None)


class Control:
    """Chooses K. This one gives each sequence its maximum number of drafts, whatever they cost."""

    is_exploring = False  # whether the latest choice has drafts only to learn whether they would pay

    def __init__(self, times: StepTime | None = None) -> None:
        self.gain = Speedup()  # measured, over plain decoding
        self.times = StepTime() if times is None else times

    def choose(self, sequences: Seq[Sequence], limits: Seq[int], budget: int, prompt_rows: int) -> list[int]:
        """K of each sequence in the planned step: at most its limit each, at most `budget` together."""
        return within(limits, budget)

    def learn(self, done: StepFeedback) -> None:
        """Learn from the outcome of a step."""
        self.times.learn(done)

    def practising(self) -> AbstractContextManager[None]:
        """Within it costs and acceptance are learned, but the measured speed-up stays as it is."""
        return nullcontext()

    def end(self, sequence: Sequence) -> None:
        """Learn from the end of a sequence, once, and drop its state."""
        self.forget(sequence)

    def forget(self, sequence: Sequence) -> None:
        """Drop the state of a sequence; a step that is learned after its end has created it again."""

    def state(self) -> dict[str, Any]:
        """What was learned, as JSON values with which a later process can start."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Start with a `state` of an earlier process. Raises ValueError, KeyError or TypeError for anything else."""


def within(limits: Seq[int], budget: int) -> list[int]:
    """Limits [3, 3, 3], budget 5 -> [3, 2, 0]."""
    given = []
    for limit in limits:
        given.append(min(limit, budget))
        budget -= given[-1]
    return given


def levelled(sequences: Seq[Sequence], limits: Seq[int], chosen: Seq[int]) -> list[int]:
    """Fit the `chosen` K of each to a round on the device, which has rows for its largest K for every sequence.

    The rows that were chosen for AUTO are spread evenly over its sequences. A sequence whose draft model would first
    have to read more tokens than it then drafts gets drafts only if they were chosen for it. FIXED keeps its K.
    [4, 4, 0, 0] -> [2, 2, 2, 2]; [1, 0, 0, 0], an exploration -> [1, 1, 1, 1].
    """
    free = [i for i, s in enumerate(sequences) if limits[i] and s.speculation.mode is SpeculationMode.AUTO]
    wanted, given = sum(chosen[i] for i in free), list(chosen)
    for i in free:
        given[i] = 0
    depth = max(1, round(wanted / len(free))) if wanted else 0
    widest = max([depth, *given], default=0)
    for i in free:
        cursor, length = sequences[i].draft, len(sequences[i].tokens)
        if chosen[i] or length - 2 - cursor.kv_len <= widest:
            given[i] = min(limits[i], widest)
    return given
