"""Prompt lookup (Saxena 2023): text repeats itself, so what followed the last few tokens before may follow again."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from weakref import WeakKeyDictionary

from engine.control.goodput import Found
from engine.proposers.base import Proposal
from engine.types import Sequence

_MOST_READ = 1024  # tokens of a sequence in a step: with the default sizes a millisecond


class NGramIndex:
    """For each run of `size` tokens, where it last ended; grows with the sequence and is never rescanned.

    Of a long prompt it takes a part at each look-up, so that no step waits for all of it.
    """

    def __init__(self, size: int) -> None:
        self._size, self._seen, self._ends = size, 0, {}  # type: int, int, dict[tuple[int, ...], int]

    def lookup(self, tokens: list[int]) -> int | None:
        """Position after the newest earlier occurrence of the last `size` tokens, or None."""
        # The last run itself is left out: it would find itself.
        stop = min(len(tokens), self._seen + _MOST_READ)
        for end in range(max(self._seen, self._size), stop):
            self._ends[tuple(tokens[end - self._size : end])] = end
        self._seen = stop
        return self._ends.get(tuple(tokens[-self._size :]))


class NGramProposer:
    """Looks for the longest of `sizes` that occurred before and proposes what came after it."""

    uses_draft_kv = False
    shares_draft_kv = False

    def __init__(self, sizes: Seq[int] = (4, 3, 2)) -> None:
        self._sizes = tuple(sizes)
        # Weak keys: an index goes when its sequence goes, with no call to forget.
        self._indexes: WeakKeyDictionary[Sequence, tuple[NGramIndex, ...]] = WeakKeyDictionary()

    def find(self, sequence: Sequence, k: int) -> Found:
        """The drafts that there are."""
        return Found(tuple(self._guess(sequence, k)))

    def propose(self, sequences: Seq[Sequence], k_each: Seq[int]) -> Proposal:
        """Look each sequence up in itself."""
        return Proposal.certain([self._guess(s, k) for s, k in zip(sequences, k_each, strict=True)])

    def _guess(self, sequence: Sequence, k: int) -> list[int]:
        if sequence not in self._indexes:
            self._indexes[sequence] = tuple(NGramIndex(size) for size in self._sizes)
        found = [index.lookup(sequence.tokens) for index in self._indexes[sequence]]
        start = next((position for position in found if position is not None), None)
        return [] if start is None else _continue(sequence.tokens, start, k)


def _continue(tokens: list[int], start: int, k: int) -> list[int]:
    """The k tokens from `start`, going round when a repetition overlaps the end: [.. a b a b], start at b -> b a b."""
    period = len(tokens) - start
    return [tokens[start + i % period] for i in range(k)]
