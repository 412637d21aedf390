"""How much of the machine each caller has had, so that all get equal shares. Knows numbers only.

Virtual token counters (Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024): a caller is charged the
tokens of its prompts and outputs as the target is fed them, and whoever has had least comes first. A caller that asked
for nothing is owed nothing: it comes back on a level with those that wait.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

TURN = 32  # tokens that a place in the batch counts for, as they are soon had
_MANY = 8  # times as many places as another one, whose first token is then not to wait for long steps
_RECENT = 8_192  # tokens of all callers after which one that had none is not expected back at any moment


class Shares:
    """Tokens that callers have had, and the places that they hold in the batch."""

    def __init__(self) -> None:
        self._had: dict[str, int] = {}
        self._places: dict[str, int] = {}
        self._total = 0
        self._latest: dict[str, int] = {}  # total when a caller was last charged

    def join(self, caller: str, waiting: Collection[str], present: Collection[str]) -> None:
        """A caller of whom nothing waited asks for something; of the others some are `waiting`, all `present`."""
        mine = self._had.get(caller, 0)
        # Where nobody is there, what all have had is past, and owed by nobody.
        others = waiting or present or self._had
        level = (min if waiting else max)((self._had[other] for other in others), default=0)
        # Who has left and is not ahead of the others would come back on their level anyway.
        self._had = {c: had for c, had in self._had.items() if c in present or had > level}
        self._had[caller] = max(mine, level)
        self._latest = {c: then for c, then in self._latest.items() if self._total - then < _RECENT}

    def charge(self, caller: str, tokens: int) -> None:
        """The target is fed so many tokens of a caller's."""
        self._had[caller] += tokens
        self._total += tokens
        self._latest[caller] = self._total

    def place(self, caller: str, change: int) -> None:
        """A caller has one place more or less."""
        self._places[caller] = self.places(caller) + change
        if not self._places[caller]:
            del self._places[caller]

    def places(self, caller: str) -> int:
        """Places that a caller holds."""
        return self._places.get(caller, 0)

    def rank(self, caller: str, tokens: int = 0) -> int:
        """What a caller has had, with what its places count for, and these tokens. The lowest comes first."""
        return self._had[caller] + TURN * self.places(caller) + tokens

    @property
    def holders(self) -> tuple[str, ...]:
        """Callers that hold places."""
        return tuple(self._places)

    @property
    def largest(self) -> str:
        """Of the callers that hold places, the one with the largest share."""
        return max(self._places, key=self.rank)

    @property
    def is_uneven(self) -> bool:
        """Whether a caller that had tokens of late holds few places and another one many."""
        recent = (caller for caller, then in self._latest.items() if self._total - then < _RECENT)
        most = max(self._places.values(), default=0)
        return any(_MANY * max(1, self.places(caller)) <= most for caller in recent)

    def may_displace(self, caller: str, other: str) -> bool:
        """Whether both are nearer to equal shares if `caller` has a place of `other`."""
        return self.rank(caller, TURN) <= self.rank(other, -TURN)

    def goes_alone(self, caller: str, other: str, tokens: int) -> bool:
        """Whether a step that feeds so many tokens of `caller` leaves out those of `other`, who holds much more."""
        return self.places(other) >= 2 * self.places(caller) and self.rank(caller, tokens) <= self.rank(other)


def equal_parts(wanted: Sequence[int], total: int) -> list[int]:
    """Divide `total` in equal parts; what one does not want goes to those after it: [3, 9, 90], 20 -> [3, 9, 8]."""
    parts = list[int]()
    for i, most in enumerate(wanted):
        parts.append(min(most, -(-total // (len(wanted) - i))))
        total -= parts[-1]
    return parts
