"""Prompt lookup (Saxena 2023): drafts the tokens that followed an earlier occurrence of the last few tokens."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from itertools import cycle, islice
from weakref import WeakKeyDictionary

from pilotfish.engine.control.goodput import Found
from pilotfish.engine.proposers.base import Lookup
from pilotfish.engine.types import Sequence

_MOST_READ = 1024  # tokens indexed per sequence and step: a millisecond with the default sizes


class NGramIndex:
    """The last end position of each n-gram of `size` tokens; extended incrementally.

    A long prompt is indexed in parts, one per look-up, so that no step waits for all of it.
    """

    def __init__(self, size: int) -> None:
        self._size, self._seen, self._ends = size, 0, {}  # type: int, int, dict[tuple[int, ...], int]

    def lookup(self, tokens: list[int]) -> int | None:
        """Position after the newest earlier occurrence of the last `size` tokens, or None."""
        # The last n-gram itself is excluded: it would match itself.
        stop = min(len(tokens), self._seen + _MOST_READ)
        for end in range(max(self._seen, self._size), stop):
            self._ends[tuple(tokens[end - self._size : end])] = end
        self._seen = stop
        return self._ends.get(tuple(tokens[-self._size :]))


class NGramProposer(Lookup):
    """Finds the longest n-gram of `sizes` that occurred before and drafts the tokens after it."""

    def __init__(self, sizes: Seq[int] = (4, 3, 2)) -> None:
        self._sizes = tuple(sizes)
        self._indexes: WeakKeyDictionary[Sequence, tuple[NGramIndex, ...]] = WeakKeyDictionary()

    def look_up(self, sequence: Sequence, k: int) -> Found:
        """Wraps around if the match overlaps the end: [.. a b a b], found before b -> b a b."""
        if sequence not in self._indexes:
            self._indexes[sequence] = tuple(NGramIndex(size) for size in self._sizes)
        tokens = sequence.tokens
        found = [index.lookup(tokens) for index in self._indexes[sequence]]
        start = next((position for position in found if position is not None), len(tokens))
        return Found(tuple(islice(cycle(tokens[start : start + k]), k)))
