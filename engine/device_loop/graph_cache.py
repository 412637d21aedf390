"""Rounds that are recorded, and which of them replaces one that is not. Knows no sequence and no device.

Their shapes come first: which there are, and which are worth recording first.
Nothing is recorded while a request waits: that takes some tenths of a second.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from itertools import takewhile
from typing import TYPE_CHECKING, NamedTuple, Protocol

from torch import Tensor

from engine.device_loop.round import Round
from engine.kernels import faults
from engine.kernels.args import Committed
from engine.stats import Clock

if TYPE_CHECKING:  # only its values are read: a GPU machine without pydantic passes benchmarks/harness/bare.py
    from engine.config import EngineConfig

MOST_RECORDED = 256  # shapes; each is some tens of MiB, and some tenths of a second at load
_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128)  # places of a batch
_BEYOND = 64  # and multiples of this


class RoundShape(NamedTuple):
    """A round of `size` places and `k` drafts; `truncated`: rows may have a top-k, top-p or min-p."""

    size: int
    k: int
    truncated: bool

    def can_replace(self, other: RoundShape) -> bool:
        """Whether it does what the other does: with idle places, or looking for cuts that are not there."""
        return self.k == other.k and self.size >= other.size and self.truncated >= other.truncated


def allows_rounds(config: EngineConfig) -> bool:
    """Whether rounds on a device are not ruled out by what is asked for."""
    return config.loop != "plain" and config.tensor_parallel_size == 1


def places_for(count: int) -> int:
    """Places of a batch that holds `count` sequences: 3 -> 4, 129 -> 192."""
    return next((size for size in _SIZES if size >= count), -(-count // _BEYOND) * _BEYOND)


def sizes_for(count: int) -> list[int]:
    """Places of batches of up to `count` sequences: 6 -> 1, 2, 4, 8; 200 -> 1, 2, .., 128, 192, 256."""
    largest = places_for(count)
    return [*takewhile(lambda size: size <= largest, _SIZES), *range(_SIZES[-1] + _BEYOND, largest + 1, _BEYOND)]


def covering(most_places: int, most_drafts: int) -> list[RoundShape]:
    """A few that can replace all others; the largest come first, as memory is then laid out for all that follow."""
    return [RoundShape(places_for(most_places), k, truncated=True) for k in _in_order(most_drafts)]


def in_order_of_worth(most_places: int, most_drafts: int) -> list[RoundShape]:
    """All shapes: first those that can replace all others, then small batches before large ones, and cuts last."""
    every = [
        RoundShape(size, k, truncated)
        for truncated in (False, True)
        for size in sizes_for(most_places)
        for k in _in_order(most_drafts)
    ]
    return list(dict.fromkeys([*covering(most_places, most_drafts), *every]))


def _in_order(most_drafts: int) -> list[int]:
    """4 -> 4, 0, 1, 2, 3: as many as there may be, and none, are what most rounds have."""
    return [most_drafts, *range(most_drafts)]


log = logging.getLogger(__name__)

SECONDS = 60.0  # for recording at load: about as long as the weights of a large model take
_OFTEN = 64  # rounds of a shape that was not recorded, after which an idle engine records it

Run = Callable[[Tensor, Callable[[], None]], Committed]  # slots, and what to call between drafting and verification


class Recorder(Protocol):
    """Makes rounds that run at once; `graphs.Graphs` on CUDA."""

    @property
    def has_room(self) -> bool:
        """Whether what was recorded has left anything of the memory set aside for it."""

    def __call__(self, round_: Round) -> Run:
        """Record it."""


class GraphCache:
    """Rounds by shape, recorded or not.

    Args:
        make: a round of a shape, and whether any sequence is of the rejection rule.
        recorder: None where rounds are run as they are.
        covering: shapes that are never given up, as they can replace all others.
    """

    def __init__(
        self, make: Callable[[RoundShape, bool], Round], recorder: Recorder | None = None,
        covering: Iterable[RoundShape] = (), most: int = MOST_RECORDED, clock: Clock = time.perf_counter,
    ) -> None:  # fmt: skip
        self._make, self._recorder, self._covering, self._most = make, recorder, frozenset(covering), most
        self._clock = clock
        self._recorded: OrderedDict[RoundShape, Run] = OrderedDict()  # the one used last comes last
        self._plain: dict[tuple[RoundShape, bool], Run] = {}  # run operation by operation
        self._missed: Counter[RoundShape] = Counter()
        self._refused: set[RoundShape] = set()  # that cannot be recorded
        self._later: list[RoundShape] = []  # left for an idle engine, in order of worth

    def __len__(self) -> int:
        return len(self._recorded)

    @property
    def num_unrecorded(self) -> int:
        """How many rounds are kept that run operation by operation."""
        return len(self._plain)

    def of(self, count: int, k: int, *, truncated: bool, rejects: bool) -> tuple[int, Run]:
        """How to run a round of `count` sequences, and how many places it has. Records nothing.

        Rounds of the rejection rule are never recorded: their distributions would take all memory.
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
        """As it will run in a request. Raises what makes it impossible."""
        if self._recorder is None:
            return self._as_it_is(shape, rejects=False)
        self._recorded[shape] = self._recorder(self._make(shape, False))
        return self._recorded[shape]

    def record(
        self, shapes: Iterable[RoundShape], progress: Callable[[str], None] = lambda _: None,
        later: Iterable[RoundShape] = (),
    ) -> None:  # fmt: skip
        """Record what is not yet, in this order, while there is memory and time; the log says how far it came.

        Of those for `later` the ones that are not recorded then are left to an idle engine.
        """
        if self._recorder is None:
            return
        start, seconds = self._clock(), 0.0
        missing = [shape for shape in shapes if shape not in self._recorded and shape not in self._refused]
        for i, shape in enumerate(missing, 1):
            if self._is_full or seconds >= SECONDS:
                break
            progress(f"recording rounds: {i} of {len(missing)}")
            if not self._add(shape):
                break
            seconds = self._clock() - start
        done = sum(shape in self._recorded for shape in missing)
        self._later = [shape for shape in later if shape not in self._recorded]
        log.info("recorded %d of %d rounds in %.1f s, %d in all", done, len(missing), seconds, len(self))

    def rest(self) -> bool:
        """While the engine is idle: record one shape, and return whether another one was left for later.

        First come those that were left, the most missed before others, while there is room; then the shape that was
        missing most often, if that was often, where there is no room in that of the one whose last use is longest ago.
        """
        often = [shape for shape, times in self._missed.most_common(1) if times >= _OFTEN]
        if not (self._later or often):
            return False
        shape = max(self._later or often, key=self._missed.__getitem__)  # of several the first
        del self._missed[shape]
        if self._later:
            self._later.remove(shape)
            if self._is_full or not self._add(shape):
                self._later.clear()
            if not self._later:
                log.info("%d rounds are recorded, in all", len(self))
        elif not self._is_full or self._give_up_oldest():
            self._add(shape)
        return bool(self._later)

    def _give_up_oldest(self) -> bool:
        oldest = next((known for known in self._recorded if known not in self._covering), None)
        return oldest is not None and self._recorded.pop(oldest, None) is not None

    @property
    def _is_full(self) -> bool:
        return self._recorder is None or len(self) >= self._most or not self._recorder.has_room

    def _nearest(self, wanted: RoundShape) -> RoundShape | None:
        """The smallest that does the same."""
        if wanted in self._recorded:
            return wanted
        return min((shape for shape in self._recorded if shape.can_replace(wanted)), default=None)

    def _add(self, shape: RoundShape) -> bool:
        """Whether recording may go on: a capture that broke off leaves the device in doubt, a compiler does not."""
        assert self._recorder is not None
        if shape in self._refused:
            return True
        refusals: tuple[type[Exception], ...] = (RuntimeError, *faults())
        try:
            self._recorded[shape] = self._recorder(self._make(shape, False))
        except refusals as error:
            self._refused.add(shape)
            log.warning("rounds of %d places and %d drafts are not recorded: %s", shape.size, shape.k, error)
            return not isinstance(error, RuntimeError)
        return True

    def _as_it_is(self, shape: RoundShape, rejects: bool) -> Run:
        key = shape, rejects
        if key not in self._plain:
            self._plain[key] = self._make(shape, rejects)
        return self._plain[key]
