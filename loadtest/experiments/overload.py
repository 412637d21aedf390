"""Load far beyond the server's capacity: every request must be served in time or refused with a retry delay."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from loadtest.arrivals import Arrivals
from loadtest.phases import LoadTarget, Phase
from loadtest.samples import Outcome, Sample

CALLERS = 96  # enough to keep the server's batch full and its queue non-empty while capacity is measured
WARMING = 1 / 3  # of that time is not counted
SETTLING = 0.1  # of the time at capacity is not timed, because at its start many requests begin at once
MOST_WAITING = 2.0  # maximum time to first token, relative to that at capacity
MOST_GROWTH = 0.02  # of resident memory


@dataclass(frozen=True, slots=True)
class Overload:
    """The three phases of the experiment."""

    capacity: Phase
    at_capacity: Phase
    overload: Phase

    @property
    def phases(self) -> tuple[Phase, ...]:
        """Return the phases in the order in which they ran."""
        return self.capacity, self.at_capacity, self.overload

    @property
    def waiting(self) -> float:
        """Return p99 of the time to first token of served requests, relative to that at capacity."""
        first, second = (p.summary.time_to_first_token["p99"] for p in (self.at_capacity, self.overload))
        return second / first

    @property
    def growth(self) -> float:
        """Return the relative growth of the server's memory during overload."""
        before, after = self.overload.resident
        return after / before - 1

    @property
    def kept(self) -> float:
        """Return requests served per second, relative to those at capacity."""
        served, before = (p.summary.served / p.summary.seconds for p in (self.overload, self.at_capacity))
        return served / before

    def problems(self, *, timed: bool = True) -> Iterator[str]:
        """Yield each violated expectation; without `timed`, skip those that depend on the speed of this machine."""
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
    """Return requests served per second while all callers were active: after a warm-up, until the last was sent.

    No request can end during the first moments. A caller that gets a response sends its next request at once, as long
    as all callers are active.

    Raises:
        RuntimeError: No request was served.
    """
    until = max(sample.sent for sample in samples)
    ends = [sample.ended for sample in samples if sample.outcome is Outcome.SERVED]
    rate = sum(WARMING * until < end <= until for end in ends) / ((1 - WARMING) * until) if until else 0.0
    if not rate:
        outcomes = dict(Counter(sample.outcome.value for sample in samples))
        raise RuntimeError(f"capacity cannot be measured: nobody was served while all callers were there: {outcomes}")
    return rate


async def overload(site: LoadTarget, times: float, seconds: float, tell: Callable[[str], None]) -> Overload:
    """Measure capacity, then the server at capacity, then at `times` that rate.

    A warm-up comes first, in which a new server learns the benefit of drafts with a full batch; until then it is
    slower. The phase at capacity starts with a burst that fills the batch. Requests arrive as fast as others end, so
    without the burst chance would decide whether the queue is used at all.
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
