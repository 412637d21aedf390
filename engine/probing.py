"""How much time may go into drafts of which no gain is expected, so that it is noticed when they would pay again."""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from engine.types import Sequence

SHARE = 0.008, 0.016  # of the time: where it was in vain for long, and before
_PATIENCE = 4  # steps' worth of probing in vain, after which half as much is spent on it
_MOST = 8  # steps' worth of time that is saved up
_DEBT, _MOST_DEBT = 1, 4  # steps' worth spent ahead: then hits are followed no further; and all that is paid back
TRIES = 4  # probes that a hit, or having read what the draft model had to catch up with, is followed by


@dataclass(slots=True)
class Probing:
    """An allowance that grows with time and is spent; in seconds."""

    allowance: float = 0.0
    tried: Sequence | None = None  # whose probes are not over
    tries: int = 0  # that are left of them
    count: int = 0
    is_now: bool = False  # this step has a probe
    wanted: float = math.inf  # allowance for the next one, as far as that was known in the step that had none
    _plain: float = 0.0  # seconds of a plain step, of late
    _in_vain: float = 0.0  # plain steps' worth that drafts lost and have not earned since

    @property
    def share(self) -> float:
        """Whoever was refused often asks more seldom."""
        least, most = SHARE
        return max(least, most / (1 + self._in_vain / _PATIENCE))

    def rest(self, least: int, most: int) -> int:
        """So many plain steps more there will be no probe, as far as that is known."""
        missing = (self.wanted - self.allowance) / max(self.share * self._plain, 1e-9)
        return math.ceil(min(max(missing, least), most)) if math.isfinite(missing) else most

    def next_step(self, sequences: Seq[Sequence]) -> None:
        """A step of these, so far without a probe."""
        self.is_now = False
        if self.tries and self.tried not in sequences:  # it is over
            self.tries = 0

    def begin(self, sequence: Sequence) -> None:
        """This step has a probe."""
        self.is_now, self.tried = True, sequence

    def account(self, plain: float, seconds: float, gained: float, *, was_hit: bool, has_read: bool) -> None:
        """A step, what a plain one would have taken, and how many seconds of plain steps its drafts saved."""
        lost = seconds - plain - gained
        self._plain = plain
        self._in_vain = max(0.0, self._in_vain + lost / max(plain, 1e-9))
        if self.is_now:
            self.count += 1
            self.allowance -= lost
            # What was read is paid for: to stop there would waste it. Hits may go on for long.
            again = has_read or (was_hit and self.allowance > -_DEBT * plain)
            self.tries = TRIES if again else max(0, self.tries - 1)
        # What was lost beyond that was misjudged; if it had to be saved first, nothing would be noticed for long.
        self.allowance = min(max(self.allowance, -_MOST_DEBT * plain) + self.share * plain, _MOST * plain)
