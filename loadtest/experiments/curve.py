"""A server's load curve: increasing numbers of callers, then increasing rates, up to beyond its capacity."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from loadtest.arrivals import Arrivals
from loadtest.experiments.overload import CALLERS, full_rate
from loadtest.phases import LoadTarget, Phase

CONCURRENCIES = (1, 4, 16, 48)  # and in addition the number of callers that keeps the server full
SHARES = (0.25, 0.5, 0.75, 0.9, 1.0, 1.25, 1.5, 2.0)  # of capacity
KEPT = 0.9  # minimum goodput at the highest rate, relative to the best goodput
SERVED = 0.99  # minimum share of served requests, below saturation


@dataclass(frozen=True, slots=True)
class Curve:
    """The results of the experiment."""

    capacity: float  # requests per second
    phases: tuple[Phase, ...]

    @property
    def rates(self) -> list[Phase]:
        """Return the open-loop phases, in the order of their rates."""
        return [phase for phase in self.phases if phase.rate is not None]

    @property
    def saturation(self) -> float:
        """Return the highest rate up to which the server served (nearly) all requests; 0 if there is none."""
        found = 0.0
        for phase in self.rates:
            if phase.rate is None or phase.summary.served < SERVED * phase.summary.sent:
                break
            found = phase.rate
        return found

    @property
    def kept(self) -> float:
        """Return goodput at the highest rate, relative to the best goodput; NaN if no request met the objective."""
        best = max(phase.summary.goodput for phase in self.rates)
        return self.rates[-1].summary.goodput / best if best else math.nan

    def problems(self, *, timed: bool = True) -> Iterator[str]:
        """Yield each violated expectation; without `timed`, skip those that depend on the speed of this machine."""
        for phase in self.phases:
            if not phase.adds_up:
                yield f"{phase.name}: sums do not add up: {phase.summary.outcomes}, server {phase.account}"
            if phase.summary.unhinted:
                yield f"{phase.name}: {phase.summary.unhinted} refusals without a word of when to come again"
        if timed and not self.kept >= KEPT:
            yield f"goodput at the highest rate is {self.kept:.0%} of the best; at least {KEPT:.0%}"


async def curve(site: LoadTarget, seconds: float, shares: Sequence[float], tell: Callable[[str], None]) -> Curve:
    """Run all phases, each for `seconds`; `shares` are relative to the capacity, which is measured first."""
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
