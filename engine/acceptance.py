"""How likely drafts are to be returned and to be kept, by depth. Knows no cost and no clock."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from collections.abc import Sequence as Seq

import numpy as np
import numpy.typing as npt

from engine.beliefs import RATES, Beliefs, Floats, Ints
from engine.tally import Tally
from engine.types import Sequence

_KEEP = 0.995  # of what is known of a sequence, per step: texts change


class Acceptance:
    """What is known of every live sequence's drafts: whether they are returned if asked for, and kept if returned."""

    def __init__(self) -> None:
        self._returned = Tally(prior=0.95)
        self._kept = defaultdict[str, Beliefs](Beliefs)  # by proposer
        self._evidence = np.zeros((0, len(RATES)))  # for these, by place
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
            if place == len(self._evidence):
                self._evidence = np.concatenate([self._evidence, np.zeros((place + 1, len(RATES)))])
            self._evidence[place] = 0
            self._returned.make_room(place + 1)
            self._returned.clear(place)
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
        return returned, returned * self._kept[proposer].kept(self._evidence[places], depth)

    def doubts(self, sequences: Seq[Sequence], proposer: str, share: float) -> npt.NDArray[np.bool_]:
        """Whose drafts are known to be kept less often than this share of what is expected of a sequence unseen."""
        beliefs = self._kept[proposer]
        found: npt.NDArray[np.bool_] = (
            beliefs.weights(self._evidence[self.places(sequences)]) @ RATES < share * beliefs.prior @ RATES
        )
        return found

    def trials(self, proposer: str) -> float:
        """Rounds that what is known of a proposer rests on."""
        return self._kept[proposer].trials

    def wait(self, proposers: Iterable[str]) -> None:
        """A round without drafts of these."""
        for proposer in proposers:
            self._idle[proposer] = self._idle.get(proposer, 0) + 1

    def learn(self, sequences: Seq[Sequence], proposer: str, asked: Ints, drafted: Ints, accepted: Ints) -> None:
        """A round of the sequences of one proposer, those that it was not asked for too."""
        if not asked.any():
            self.wait({proposer})
            return
        places, idle = self.places(sequences), self._idle.pop(proposer, 0)
        self._evidence[places] *= _KEEP ** (1 + idle)
        self._returned.add(places, proposer, drafted, asked, idle)
        judged = np.minimum(accepted + 1, drafted)
        self._evidence[places] = self._kept[proposer].learn(self._evidence[places], accepted, judged)
