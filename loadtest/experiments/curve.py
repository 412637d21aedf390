"""A server's curve: callers in growing numbers, then growing rates, up to beyond what it can do. Knows no report."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from loadtest.arrivals import Arrivals
from loadtest.experiments.overload import CALLERS, full_rate
from loadtest.phases import Phase, Site

CONCURRENCIES = (1, 4, 16, 48)  # and as many as keep it full
SHARES = (0.25, 0.5, 0.75, 0.9, 1.0, 1.25, 1.5, 2.0)  # of capacity
KEPT = 0.9  # of the best goodput, at least, at the highest rate
SERVED = 0.99  # of what was sent, below saturation


@dataclass(frozen=True, slots=True)
class Curve:
    """What was found."""

    capacity: float  # requests per second
    phases: tuple[Phase, ...]

    @property
    def rates(self) -> list[Phase]:
        """The open loops, in the order of their rates."""
        return [phase for phase in self.phases if phase.rate is not None]

    @property
    def saturation(self) -> float:
        """The highest rate of those measured up to which (nearly) everybody was served; 0 if there is none."""
        found = 0.0
        for phase in self.rates:
            if phase.rate is None or phase.summary.served < SERVED * phase.summary.sent:
                break
            found = phase.rate
        return found

    @property
    def kept(self) -> float:
        """Goodput at the highest rate, of the best at any; NaN where no machine like this one serves anybody well."""
        best = max(phase.summary.goodput for phase in self.rates)
        return self.rates[-1].summary.goodput / best if best else math.nan

    def problems(self, *, timed: bool = True) -> Iterator[str]:
        """What is not as it should be; without `timed` nothing that depends on how fast this machine is."""
        for phase in self.phases:
            if not phase.adds_up:
                yield f"{phase.name}: sums do not add up: {phase.summary.outcomes}, server {phase.account}"
            if phase.summary.unhinted:
                yield f"{phase.name}: {phase.summary.unhinted} refusals without a word of when to come again"
        if timed and not self.kept >= KEPT:
            yield f"goodput at the highest rate is {self.kept:.0%} of the best; at least {KEPT:.0%}"


async def curve(site: Site, seconds: float, shares: Sequence[float], tell: Callable[[str], None]) -> Curve:
    """Each stretch takes `seconds`; `shares` are of the capacity that is measured first."""
    phases: list[Phase] = []
    for concurrency in (*CONCURRENCIES, CALLERS):
        tell(f"{concurrency} callers for {seconds:g} s")
        phases.append(await site.closed(f"{concurrency} callers", concurrency, seconds))
    capacity = full_rate(site.samples[f"{CALLERS} callers"])
    for share in shares:
        rate = share * capacity
        tell(f"{rate:.1f} requests/s, {share:g} times capacity, for {seconds:g} s")
        phases.append(await site.open(f"{share:g} x capacity", Arrivals(rate), seconds))
    return Curve(capacity, tuple(phases))
