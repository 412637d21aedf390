"""How often a proposer returns drafts when it is asked for them, by depth. Knows no cost and no clock.

Whether a lookup finds anything is decided anew at each position, so one chance for each depth tells nearly all. A
sequence's own record is short and is shrunk toward the record of its proposer over all sequences. Both fade by steps.
"""

from __future__ import annotations

import numpy as np

from engine.beliefs import Floats, Ints
from engine.types import MAX_NUM_DRAFT

_DEPTHS = np.arange(MAX_NUM_DRAFT)
_OWN_KEEP, _IDLE_KEEP = 0.97, 0.995  # of a sequence's record, per step with drafts and without
_COMMON_KEEP = 0.98  # of a proposer's record, per step
_COMMON_LEAST = 8.0  # trials that stay: what was known long ago is still the best guess, and soon outweighed
_SHRINK = 48.0  # trials that the proposer's record counts for beside a sequence's own
_DEEPER = 4.0  # trials that the depth above counts for beside a depth's own


class Tally:
    """Hits and trials by depth: of each sequence, and of each proposer together."""

    def __init__(self, prior: float) -> None:
        self._prior = prior
        self._own = np.zeros((2, 0, MAX_NUM_DRAFT))  # hits and trials, by place
        self._common: dict[str, Floats] = {}  # [2, depth]

    def make_room(self, places: int) -> None:
        """There are at least so many places."""
        missing = places - self._own.shape[1]
        if missing > 0:
            self._own = np.concatenate([self._own, np.zeros((2, missing + places, MAX_NUM_DRAFT))], 1)

    def clear(self, place: int) -> None:
        """Nothing is known of the sequence at `place`."""
        self._own[:, place] = 0

    def average(self, proposer: str) -> Floats:
        """The chance at each depth, over all sequences; a depth that was seldom reached leans on the one above."""
        chance, found = self._prior, np.empty(MAX_NUM_DRAFT)
        hits, trials = self._common.get(proposer, np.zeros((2, MAX_NUM_DRAFT))).tolist()
        for depth in range(MAX_NUM_DRAFT):
            weight = _DEEPER if depth else 1.0
            chance = (hits[depth] + weight * chance) / (trials[depth] + weight)
            found[depth] = chance
        return found

    def chances(self, places: Ints, proposer: str) -> Floats:
        """The chance of each sequence at each depth, `[len(places), MAX_NUM_DRAFT]`."""
        average = self.average(proposer)
        hits, trials = self._own[:, places]
        # How much better this sequence does than others, over all depths: a hint for those it has hardly reached.
        luck = (hits.sum(1) - trials @ average) / (trials.sum(1) + _SHRINK)
        prior = np.clip(average + luck[:, None], 0.0, 0.995)
        return (hits + _SHRINK * prior) / (trials + _SHRINK)  # type: ignore[no-any-return]

    def add(self, places: Ints, proposer: str, num_hits: Ints, num_trials: Ints, idle: int) -> None:
        """One round, `idle` steps after the last: how many depths of each sequence were tried, and were hits."""
        fresh = np.stack([num_hits[:, None] > _DEPTHS, num_trials[:, None] > _DEPTHS])
        keep = np.where(num_trials > 0, _OWN_KEEP, _IDLE_KEEP) * _IDLE_KEEP**idle
        self._own[:, places] = self._own[:, places] * keep[:, None] + fresh
        common = self._common.setdefault(proposer, np.zeros((2, MAX_NUM_DRAFT)))
        least = np.minimum(1.0, _COMMON_LEAST / np.maximum(common[1], 1e-9))
        self._common[proposer] = common * np.maximum(_COMMON_KEEP ** (1 + idle / 4), least) + fresh.sum(1)
