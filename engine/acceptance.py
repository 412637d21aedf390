"""How likely drafts are to be returned and to be kept, by depth. Knows no cost and no clock.

A sequence's own record is short, so it is shrunk toward the record of its proposer over all sequences. Both fade with
the steps: text that turns predictable, or stops being so, is followed.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np
import numpy.typing as npt

from engine.types import MAX_NUM_DRAFT, Sequence

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

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

    def trials(self, proposer: str) -> float:
        """How many, at the first depth, as far as they have not faded."""
        return float(self._common[proposer][1, 0]) if proposer in self._common else 0.0

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


class Acceptance:
    """What is known of every live sequence's drafts."""

    def __init__(self) -> None:
        self._returned, self._kept = Tally(prior=0.95), Tally(prior=0.7)
        self._idle: dict[str, int] = {}  # steps since drafts of a proposer were last judged
        self._places: dict[Sequence, int] = {}
        self._free: list[int] = []

    def places(self, sequences: Seq[Sequence]) -> Ints:
        """Where each is kept; new ones get a place."""
        return np.array([self._place(sequence) for sequence in sequences], np.int64)

    def _place(self, sequence: Sequence) -> int:
        place = self._places.get(sequence)
        if place is None:
            place = self._places[sequence] = self._free.pop() if self._free else len(self._places)
            for tally in (self._returned, self._kept):
                tally.make_room(place + 1)
                tally.clear(place)
        return place

    def forget(self, sequence: Sequence) -> None:
        """The sequence is over."""
        place = self._places.pop(sequence, None)
        if place is not None:
            self._free.append(place)

    def chances(self, sequences: Seq[Sequence], proposer: str, depth: int) -> tuple[Floats, Floats]:
        """That draft 1, 2, ... `depth` is returned if asked for, and that it is kept; `[sequences, depth]` each."""
        places = self.places(sequences)
        returned = np.minimum.accumulate(self._returned.chances(places, proposer)[:, :depth], 1)
        kept = np.cumprod(self._kept.chances(places, proposer)[:, :depth], 1)
        return returned, returned * kept

    def trials(self, proposer: str) -> float:
        """Rounds that the server's average rests on."""
        return self._kept.trials(proposer)

    def learn(self, sequences: Seq[Sequence], proposer: str, asked: Ints, drafted: Ints, accepted: Ints) -> None:
        """A round of the sequences of one proposer, those that it was not asked for too."""
        if not asked.any():
            self._idle[proposer] = self._idle.get(proposer, 0) + 1
            return
        places, idle = self.places(sequences), self._idle.pop(proposer, 0)
        self._returned.add(places, proposer, drafted, asked, idle)
        self._kept.add(places, proposer, accepted, np.minimum(accepted + 1, drafted), idle)
