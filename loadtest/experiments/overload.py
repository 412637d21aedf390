"""Load far beyond the server's capacity: every request must be served in time or refused with a retry delay."""

from __future__ import annotations

import asyncio
import contextlib
import statistics
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from random import Random

from client import AsyncClient
from loadtest.driver import REFUSED, SERVED, Ask, Run, Sample, poisson
from loadtest.process import ServerProcess

CALLERS = 96  # enough to keep the server's batch full and its queue non-empty while capacity is measured
WARMING = 1 / 3  # of that time is not counted
SETTLING = 0.1  # of the time at capacity is not timed, because at its start many requests begin at once
MOST_WAITING = 2.0  # maximum time to first token, relative to that at capacity
MOST_GROWTH = 0.02  # of resident memory
_SEED = 2  # of the arrivals


@dataclass(frozen=True, slots=True)
class Phase:
    """A stretch of load, seen by the callers and by the server."""

    name: str
    load: str
    seconds: float
    calls: Sequence[Sample]
    counted: float  # requests that the server says it ended or refused
    memory: Sequence[int]  # resident bytes of the server's process, once per second
    timed_from: float = 0.0  # seconds; requests before that have no time to first token

    @property
    def served(self) -> list[Sample]:
        return [call for call in self.calls if call.status == SERVED]

    @property
    def refused(self) -> list[Sample]:
        return [call for call in self.calls if call.status == REFUSED]

    @property
    def served_per_second(self) -> float:
        return len(self.served) / self.seconds

    @property
    def adds_up(self) -> bool:
        """Return whether callers and server count the same requests."""
        return self.counted == len(self.calls)

    @property
    def waits(self) -> tuple[float, float]:
        """Return p50 and p99 of the time to first token of served requests; 0 for less than two."""
        waits = [c.first - c.intended for c in self.served if c.first is not None and c.intended >= self.timed_from]
        cuts = statistics.quantiles(waits, n=100, method="inclusive") if len(waits) > 1 else [0.0] * 99
        return cuts[49], cuts[98]

    @property
    def growth(self) -> float:
        """Return the relative growth of memory between the first and the last quarter of the phase."""
        quarter = max(1, len(self.memory) // 4)
        return sum(self.memory[-quarter:]) / sum(self.memory[:quarter]) - 1

    def problems(self) -> Iterator[str]:
        """Yield each violated expectation, none of which depends on the machine's speed."""
        if not self.adds_up:
            yield f"{self.name}: {len(self.calls)} sent; the server ended or refused {self.counted:g}"
        if unhinted := sum(not call.retry_seconds for call in self.refused):
            yield f"{self.name}: {unhinted} refusals without a word of when to come again"
        if len(self.served) + len(self.refused) != len(self.calls):
            statuses = dict(Counter(call.status for call in self.calls))
            yield f"{self.name}: some were neither served nor refused: {statuses}"

    def row(self) -> str:
        """Return the phase as a row in Markdown."""
        served, refused, (half, most) = len(self.served), len(self.refused), self.waits
        other, tokens = len(self.calls) - served - refused, sum(call.tokens for call in self.calls)
        return (
            f"| {self.name}: {self.load} | {len(self.calls)} | {served} | {refused} | {other} "
            f"| {self.served_per_second:.1f} | {tokens / self.seconds:.0f} | {half:.3g} / {most:.3g} |"
        )


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
        first, second = self.at_capacity.waits[1], self.overload.waits[1]
        return second / first if first else 0.0

    def lines(self) -> list[str]:
        """Return the results as Markdown lines."""
        kept = self.overload.served_per_second / self.at_capacity.served_per_second
        verdict = (
            f"Time to first token p99 {self.waiting:.2f} times that at capacity; requests served per second "
            f"{kept:.0%} of those at capacity; memory {self.overload.growth:+.1%}."
        )
        head = "| load | sent | served | refused | other | requests/s | tokens/s | first token p50 / p99, s |"
        return [verdict, "", head, "|" + "---|" * 8, *(phase.row() for phase in self.phases)]

    def problems(self, *, timed: bool = True) -> Iterator[str]:
        """Yield each violated expectation; without `timed`, skip those that depend on the speed of this machine."""
        for phase in self.phases:
            yield from phase.problems()
        if not self.overload.refused:
            yield "overload: nobody was refused"
        if timed and self.waiting > MOST_WAITING:
            yield f"time to first token grew to {self.waiting:.2f} times that at capacity; at most {MOST_WAITING:g}"
        if timed and self.overload.growth > MOST_GROWTH:
            yield f"memory grew by {self.overload.growth:.1%}; at most {MOST_GROWTH:.0%}"


def full_rate(calls: Sequence[Sample]) -> float:
    """Return requests served per second while all callers were there: after a warm-up, until the last was sent.

    No request can end during the first moments. A caller that gets an answer sends its next request at once, as long
    as all callers are there.

    Raises:
        RuntimeError: No request was served.
    """
    until = max(call.sent for call in calls)
    served = sum(call.status == SERVED and WARMING * until < call.ended <= until for call in calls)
    if not served:
        statuses = dict(Counter(call.status for call in calls))
        raise RuntimeError(f"capacity cannot be measured: nobody was served while all callers were there: {statuses}")
    return served / ((1 - WARMING) * until)


async def overload(
    server: ServerProcess, ask: Ask, times: float, seconds: float, tell: Callable[[str], None]
) -> Overload:
    """Measure capacity, then the server at capacity, then at `times` that rate.

    A warm-up comes first, in which a new server learns the benefit of drafts with a full batch; until then it is
    slower. The phase at capacity starts with a burst that fills the batch. Requests arrive as fast as others end, so
    without the burst chance would decide whether the queue is used at all.
    """
    async with AsyncClient(server.address) as client:
        places = (await client.model_info()).max_batch_size
    random = Random(_SEED)

    async def closed(name: str) -> Phase:
        callers, half = f"{CALLERS} callers", seconds / 2
        tell(f"{name}: {callers} for {half:g} s")
        return await _measure(server, ask, name, callers, half, lambda run: run.closed_loop(CALLERS, half, places + 1))

    async def opened(name: str, rate: float, burst: int = 0, timed_from: float = 0.0) -> Phase:
        tell(f"{name}: {burst} requests at once, then {rate:.1f} per second for {seconds:g} s")
        moments = [0.0] * burst + list(poisson(rate, seconds, random))
        load = f"{rate:.1f}/s"
        return await _measure(server, ask, name, load, seconds, lambda run: run.open_loop(moments), timed_from)

    await closed("warming up")
    capacity = await closed("capacity")
    rate = full_rate(capacity.calls)
    at_capacity = await opened("at capacity", rate, places, SETTLING * seconds)
    return Overload(capacity, at_capacity, await opened("overload", times * rate))


async def _measure(
    server: ServerProcess, ask: Ask, name: str, load: str, seconds: float, go: Callable[[Run], Awaitable[None]],
    timed_from: float = 0.0,
) -> Phase:  # fmt: skip
    before = await _counted(server)
    async with AsyncClient(server.address, retry=None) as client, _watching(server) as memory:
        await client.health()  # connect before the clock starts
        run = Run(client, ask)
        await go(run)
        seconds = max(seconds, run.now())
    counted = await _counted(server, before + len(run.calls)) - before
    return Phase(name, load, seconds, run.calls, counted, memory, timed_from)


async def _counted(server: ServerProcess, least: float = 0.0, patience: int = 100) -> float:
    """Return how many requests the server says it ended or refused; it may count an end after the caller sees it."""
    metrics = await asyncio.to_thread(server.metrics)
    found = metrics.total("requests_total") + metrics.total("admission_rejected_total")
    if found >= least or not patience:
        return found
    await asyncio.sleep(0.1)
    return await _counted(server, least, patience - 1)


@contextlib.asynccontextmanager
async def _watching(server: ServerProcess) -> AsyncIterator[list[int]]:
    """Note the resident memory of the server once per second."""
    found = [server.usage().resident]

    async def watch() -> None:
        while True:
            await asyncio.sleep(1)
            found.append(server.usage().resident)

    task = asyncio.create_task(watch())
    try:
        yield found
    finally:
        task.cancel()
