"""Which shapes rounds on the device come in, and which are worth recording first. Knows no tensor and no model."""

from __future__ import annotations

from itertools import takewhile
from typing import TYPE_CHECKING, NamedTuple

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

    def stands_in_for(self, other: RoundShape) -> bool:
        """Whether it does what the other does: with idle places, or looking for cuts that are not there."""
        return self.k == other.k and self.size >= other.size and self.truncated >= other.truncated


def allows_rounds(config: EngineConfig) -> bool:
    """Whether rounds on a device are not ruled out by what is asked for."""
    return config.loop != "plain" and config.tensor_parallel_size == 1


def places_for(count: int) -> int:
    """Places of a batch that holds so many: 3 -> 4, 129 -> 192."""
    return next((size for size in _SIZES if size >= count), -(-count // _BEYOND) * _BEYOND)


def sizes_for(count: int) -> list[int]:
    """Places of batches of up to so many: 6 -> 1, 2, 4, 8; 200 -> 1, 2, .., 128, 192, 256."""
    largest = places_for(count)
    return [*takewhile(lambda size: size <= largest, _SIZES), *range(_SIZES[-1] + _BEYOND, largest + 1, _BEYOND)]


def covering(most_places: int, most_drafts: int) -> list[RoundShape]:
    """A few that can stand in for all; the largest come first, as memory is then laid out for all that follow."""
    return [RoundShape(places_for(most_places), k, truncated=True) for k in _in_order(most_drafts)]


def in_order_of_worth(most_places: int, most_drafts: int) -> list[RoundShape]:
    """All shapes: first those that can stand in for all, then small batches before large ones, and cuts last."""
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
