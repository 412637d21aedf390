"""The times at which requests are sent, chosen before the first one is sent. This module knows no requests."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random


@dataclass(frozen=True, slots=True)
class Arrivals:
    """Arrivals of independent callers that do not wait for responses.

    The pauses follow a gamma distribution with mean 1 / `rate` (per second). `variation` is the ratio of standard
    deviation to mean: 1 is a Poisson process, 0 is a fixed interval, larger values give bursts.
    """

    rate: float
    variation: float = 1.0

    def times(self, seconds: float, random: Random) -> Iterator[float]:
        """Yield arrival times from 0 up to `seconds`, in order."""
        now = self._pause(random)
        while now < seconds:
            yield now
            now += self._pause(random)

    def _pause(self, random: Random) -> float:
        """Draw a pause: shape 1 / v^2 and scale v^2 / rate give the required mean and deviation."""
        if self.variation == 0:
            return 1 / self.rate
        square = self.variation**2
        return random.gammavariate(1 / square, square / self.rate)
