"""When requests are to be sent, settled before the first is. Knows no requests."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random


@dataclass(frozen=True, slots=True)
class Arrivals:
    """A stream of callers who do not know of each other and wait for nobody.

    Pauses between them follow a gamma law with mean 1 / `rate` (per second) and `variation` as the ratio of standard
    deviation to mean: 1 is Poisson, 0 a metronome, more comes in bursts.
    """

    rate: float
    variation: float = 1.0

    def times(self, seconds: float, random: Random) -> Iterator[float]:
        """Moments from 0 up to `seconds`, in order."""
        now = self._pause(random)
        while now < seconds:
            yield now
            now += self._pause(random)

    def _pause(self, random: Random) -> float:
        """Shape 1 / v^2 and scale v^2 / rate have the wanted mean and deviation."""
        if self.variation == 0:
            return 1 / self.rate
        square = self.variation**2
        return random.gammavariate(1 / square, square / self.rate)
