"""Many times more than a server can do: everybody is served in time or told when to come again. Knows no report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from loadtest.arrivals import Arrivals
from loadtest.phases import Phase, Site
from loadtest.samples import Outcome, Sample

CALLERS = 96  # who keep every place of the server taken, and some waiting, while its capacity is measured
WARMING = 1 / 3  # of that time does not count
SETTLING = 0.1  # of the time at capacity is not timed: all places are taken at once, as they never are later
MOST_WAITING = 2.0  # times the time to first token at capacity
MOST_GROWTH = 0.02  # of resident memory


@dataclass(frozen=True, slots=True)
class Overload:
    """The three stretches of it."""

    capacity: Phase
    at_capacity: Phase
    overload: Phase

    @property
    def phases(self) -> tuple[Phase, ...]:
        """In the order they were run."""
        return self.capacity, self.at_capacity, self.overload

    @property
    def waiting(self) -> float:
        """Time to first token of whom it took, 99 in a hundred: times that at capacity."""
        first, second = (p.summary.time_to_first_token["p99"] for p in (self.at_capacity, self.overload))
        return second / first

    @property
    def growth(self) -> float:
        """Of the server's memory while overloaded."""
        before, after = self.overload.resident
        return after / before - 1

    @property
    def kept(self) -> float:
        """Requests served per second, of those at capacity."""
        served, before = (p.summary.served / p.summary.seconds for p in (self.overload, self.at_capacity))
        return served / before

    def problems(self, *, timed: bool = True) -> Iterator[str]:
        """What is not as it should be; without `timed` nothing that depends on how fast this machine is."""
        for phase in self.phases:
            yield from _problems(phase)
        if not self.overload.summary.refused:
            yield "overload: nobody was refused"
        if timed and not self.waiting <= MOST_WAITING:
            yield f"time to first token grew to {self.waiting:.2f} times that at capacity; at most {MOST_WAITING:g}"
        if timed and self.growth > MOST_GROWTH:
            yield f"memory grew by {self.growth:.1%}; at most {MOST_GROWTH:.0%}"


def _problems(phase: Phase) -> Iterator[str]:
    summary, account = phase.summary, phase.account
    if not phase.adds_up:
        heard = f"{summary.sent} sent, {summary.outcomes} heard of"
        yield f"{phase.name}: {heard}; the server ended {account.ended:g} and refused {account.rejected:g}"
    if summary.unhinted:
        yield f"{phase.name}: {summary.unhinted} refusals without a word of when to come again"
    if others := sum(summary.outcomes[o] for o in (Outcome.FAILED, Outcome.LATE, Outcome.LEFT)):
        yield f"{phase.name}: {others} neither served nor refused: {summary.statuses}"


def full_rate(samples: Sequence[Sample]) -> float:
    """Requests that were served per second while all callers were there: until the last was sent, and not at first.

    Nobody can have ended at first. A caller who has an answer asks again at once, as long as all of them do.

    Raises:
        RuntimeError: nobody was served.
    """
    until = max(sample.sent for sample in samples)
    ends = [sample.ended for sample in samples if sample.outcome is Outcome.SERVED]
    rate = sum(WARMING * until < end <= until for end in ends) / ((1 - WARMING) * until) if until else 0.0
    if not rate:
        outcomes = dict(Counter(sample.outcome.value for sample in samples))
        raise RuntimeError(f"capacity cannot be measured: nobody was served while all callers were there: {outcomes}")
    return rate


async def overload(site: Site, times: float, seconds: float, tell: Callable[[str], None]) -> Overload:
    """Measure capacity, then what it is like at capacity, then at so many times that.

    Before that a while in which a new server finds out what drafts bring with all places taken: it is slower till then.
    At capacity all places are taken and requests come as fast as others end: without the first, chance would decide
    whether the queue is ever used.
    """
    tell(f"capacity: {CALLERS} callers for {seconds / 2:g} s, twice; the first does not count")
    await site.closed("warming up", CALLERS, seconds / 2)
    capacity = await site.closed("capacity", CALLERS, seconds / 2)
    rate = full_rate(site.samples["capacity"])
    places = await site.places()
    tell(f"at capacity: {places} requests to take all places, then {rate:.1f} per second for {seconds:g} s")
    at_capacity = await site.open("at capacity", Arrivals(rate), seconds, burst=places, since=SETTLING * seconds)
    tell(f"overload: {times * rate:.1f} requests/s for {seconds:g} s")
    return Overload(capacity, at_capacity, await site.open("overload", Arrivals(times * rate), seconds))
