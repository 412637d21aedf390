"""How much faster than plain decoding this is: time spent, against what the same tokens would have taken plainly."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from engine.types import Sequence

_KEEP = 0.99  # per step: the ratio is of the last hundred or so


class Speedup:
    """Live over all sequences, and of each since it began. 1 is plain decoding, and what is said before any step."""

    def __init__(self) -> None:
        self._plain = self._spent = 0.0
        self._each: dict[Sequence, tuple[float, float]] = {}

    @property
    def ratio(self) -> float:
        """Over the last steps."""
        return self.ratio_of(self)

    @staticmethod
    def ratio_of(*gains: Speedup) -> float:
        """Over the last steps of several kinds."""
        spent = sum(gain._spent for gain in gains)  # noqa: SLF001 - its own
        return sum(gain._plain for gain in gains) / spent if spent > 0 else 1.0  # noqa: SLF001

    def of(self, sequence: Sequence) -> float:
        """Over all steps of one output."""
        plain, spent = self._each.get(sequence, (0.0, 0.0))
        return plain / spent if spent > 0 else 1.0

    def add(self, sequences: Seq[Sequence], num_tokens: Seq[int], spent: float, plain_step: float) -> None:
        """Add a step: tokens of each sequence, its seconds, and those of a plain step, which yields one token each."""
        mean = sum(num_tokens) / len(sequences)
        self._plain = self._plain * _KEEP + mean * plain_step
        self._spent = self._spent * _KEEP + spent
        for sequence, tokens in zip(sequences, num_tokens, strict=True):
            plain, already = self._each.get(sequence, (0.0, 0.0))
            self._each[sequence] = plain + tokens * plain_step, already + spent

    def forget(self, sequence: Sequence) -> None:
        """The sequence is over."""
        self._each.pop(sequence, None)
