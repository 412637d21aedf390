"""The cache of recorded rounds, which also selects a recorded round for a shape that is not recorded.

Defines which shapes exist and their order of recording. Nothing is recorded while a request waits, because that takes
tenths of a second.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from itertools import takewhile
from typing import TYPE_CHECKING, NamedTuple

from pilotfish.engine.device_loop.round import Round, Run
from pilotfish.engine.kernels import faults
from pilotfish.engine.stats import Clock

if TYPE_CHECKING:  # only attributes are used: a GPU machine without pydantic passes benchmarks/harness/bare.py
    from pilotfish.engine.config import EngineConfig
    from pilotfish.engine.device_loop.graphs import Graphs

MOST_RECORDED = 256  # shapes; each takes tens of MiB, and tenths of a second at load
_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128)  # places of a batch
_BEYOND = 64  # and multiples of this


class RoundShape(NamedTuple):
    """A round of `size` places and `k` drafts; `truncated`: rows may have a top-k, top-p or min-p."""

    size: int
    k: int
    truncated: bool

    def can_replace(self, other: RoundShape) -> bool:
        """Whether it can run in place of the other, with idle places or unnecessary truncation."""
        return self.k == other.k and self.size >= other.size and self.truncated >= other.truncated


def allows_rounds(config: EngineConfig) -> bool:
    """Whether the configuration allows rounds on a device."""
    return config.loop != "plain" and config.tensor_parallel_size == 1


def places_for(count: int) -> int:
    """Places of a batch with `count` sequences: 3 -> 4, 129 -> 192."""
    return next((size for size in _SIZES if size >= count), -(-count // _BEYOND) * _BEYOND)


def sizes_for(count: int) -> list[int]:
    """Places of batches of up to `count` sequences: 6 -> 1, 2, 4, 8; 200 -> 1, 2, .., 128, 192, 256."""
    largest = places_for(count)
    return [*takewhile(lambda size: size <= largest, _SIZES), *range(_SIZES[-1] + _BEYOND, largest + 1, _BEYOND)]


def covering(most_places: int, most_drafts: int) -> list[RoundShape]:
    """A few shapes that can replace all others; the largest first, because it determines the memory layout."""
    return [RoundShape(places_for(most_places), k, truncated=True) for k in _in_order(most_drafts)]


def in_order_of_worth(most_places: int, most_drafts: int) -> list[RoundShape]:
    """All shapes by priority: first those that can replace all others, then small batches, truncation last."""
    every = [
        RoundShape(size, k, truncated)
        for truncated in (False, True)
        for size in sizes_for(most_places)
        for k in _in_order(most_drafts)
    ]
    return list(dict.fromkeys([*covering(most_places, most_drafts), *every]))


def _in_order(most_drafts: int) -> list[int]:
    """4 -> 4, 0, 1, 2, 3: the maximum and none are the most frequent."""
    return [most_drafts, *range(most_drafts)]


log = logging.getLogger(__name__)

SECONDS = 60.0  # for recording at load: about as long as loading the weights of a large model
_OFTEN = 64  # rounds of an unrecorded shape after which it replaces a recorded one if memory is full


class GraphCache:
    """Rounds by shape, recorded or not.

    Args:
        make: makes a round of a shape; its second argument: whether any sequence uses the rejection rule.
        recorder: None: rounds run unrecorded.
        covering: shapes that are never evicted, because they can replace all others.
    """

    def __init__(
        self, make: Callable[[RoundShape, bool], Round], recorder: Graphs | None = None,
        covering: Iterable[RoundShape] = (), most: int = MOST_RECORDED, clock: Clock = time.perf_counter,
    ) -> None:  # fmt: skip
        self._make, self._recorder, self._covering, self._most = make, recorder, frozenset(covering), most
        self._clock = clock
        self._recorded: OrderedDict[RoundShape, Run] = OrderedDict()  # most recently used last
        self.unrecorded: dict[tuple[RoundShape, bool], Run] = {}  # run operation by operation
        self._missed: Counter[RoundShape] = Counter()
        self._refused: set[RoundShape] = set()  # cannot be recorded
        self._missing: list[RoundShape] = []  # to be recorded while idle, by priority

    def __len__(self) -> int:
        return len(self._recorded)

    def of(self, count: int, k: int, *, truncated: bool, rejects: bool) -> tuple[int, Run]:
        """The round for `count` sequences, and its number of places. Records nothing.

        Rounds with the rejection rule are never recorded: their distributions would take too much memory.
        """
        wanted = RoundShape(places_for(count), k, truncated)
        found = None if rejects else self._nearest(wanted)
        if self._recorder is not None and found != wanted and not rejects:
            self._missed[wanted] += 1
        if found is None:
            return wanted.size, self._as_it_is(wanted, rejects)
        self._recorded.move_to_end(found)
        return found.size, self._recorded[found]

    def try_out(self, shape: RoundShape) -> Run:
        """Run a round as in a request. Raises the error if it fails."""
        if self._recorder is None:
            return self._as_it_is(shape, rejects=False)
        self._recorded[shape] = self._recorder(self._make(shape, False))
        return self._recorded[shape]

    def record(
        self, shapes: Iterable[RoundShape], progress: Callable[[str], None] = lambda _: None, first: int | None = None
    ) -> None:
        """Record the `first` of these shapes, or all, in this order, within the limits of memory and time.

        The rest is left to `record_missing`. The log reports the number of recorded rounds.
        """
        if self._recorder is None:
            return
        start, seconds, shapes = self._clock(), 0.0, list(shapes)
        self._missing = [shape for shape in shapes if shape not in self._recorded and shape not in self._refused]
        todo = [shape for shape in shapes[:first] if shape in self._missing]
        for i, shape in enumerate(todo, 1):
            if self._is_full or seconds >= SECONDS or not self._missing:
                break
            progress(f"recording rounds: {i} of {len(todo)}")
            self._add(shape)
            seconds = self._clock() - start
        done = sum(shape in self._recorded for shape in todo)
        log.info("recorded %d of %d rounds in %.1f s, %d in all", done, len(todo), seconds, len(self))

    def record_missing(self) -> bool:
        """While idle: record the shape that was missed most often; return whether another is left.

        If memory is full, it replaces the least recently used shape, if it was missed often.
        """
        if not self._missing:
            return False
        shape = max(self._missing, key=self._missed.__getitem__)  # the first of several
        if self._is_full:
            oldest = next((known for known in self._recorded if known not in self._covering), None)
            if oldest is None or self._missed[shape] < _OFTEN:
                return False
            del self._recorded[oldest]
            self._missing.append(oldest)
        self._add(shape)
        return bool(self._missing)

    @property
    def _is_full(self) -> bool:
        return self._recorder is None or len(self) >= self._most or not self._recorder.has_room

    def _nearest(self, wanted: RoundShape) -> RoundShape | None:
        """The smallest recorded shape that can replace it."""
        if wanted in self._recorded:
            return wanted
        return min((shape for shape in self._recorded if shape.can_replace(wanted)), default=None)

    def _add(self, shape: RoundShape) -> None:
        """Record a missing shape. A failed capture leaves an undefined device state, a failed compilation does not."""
        assert self._recorder is not None
        self._missing.remove(shape)
        del self._missed[shape]
        refusals: tuple[type[Exception], ...] = (RuntimeError, *faults())
        try:
            self._recorded[shape] = self._recorder(self._make(shape, False))
        except refusals as error:
            self._refused.add(shape)
            log.warning("rounds of %d places and %d drafts are not recorded: %s", shape.size, shape.k, error)
            if isinstance(error, RuntimeError):
                self._missing.clear()

    def _as_it_is(self, shape: RoundShape, rejects: bool) -> Run:
        key = shape, rejects
        if key not in self.unrecorded:
            self.unrecorded[key] = self._make(shape, rejects)
        return self.unrecorded[key]
