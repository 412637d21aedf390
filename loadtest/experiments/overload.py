"""Load far beyond the server's capacity: every request must be served in time or refused with a retry delay.

The open loop measures latency from the time at which a request should have been sent. A driver that waits for answers
before it sends more requests would measure a slow server under a lower load (coordinated omission).
"""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from random import Random

from loadtest.process import ServerProcess
from pilotfish.client import AsyncClient, Delta, GenerateOptions, RequestFailedError

LONGEST = 120.0  # seconds; the deadline of each request, so that none waits for ever
SERVED, REFUSED = "OK", "RESOURCE_EXHAUSTED"
Ask = Callable[[Random], tuple[str, GenerateOptions]]
CALLERS = 96  # enough to keep the server's batch full and its queue non-empty while capacity is measured
WARMING = 1 / 3  # share of that time which is not counted
SETTLING = 0.1  # share of the time at capacity which is not measured, because many requests start at once
MOST_WAITING = 2.0  # maximum time to first token, relative to that at capacity
MOST_GROWTH = 0.02  # of resident memory
_SEED = 2  # of the arrivals


@dataclass(slots=True)
class Sample:
    """One request. Times are in seconds since the run began; `intended` is when it should have been sent."""

    intended: float
    sent: float
    ended: float = 0.0
    first: float | None = None  # when the first tokens arrived
    tokens: int = 0
    status: str = SERVED
    retry_seconds: float | None = None  # after which the server asks for a retry


def poisson(rate: float, seconds: float, random: Random) -> Iterator[float]:
    """Yield the arrivals of independent callers who do not wait for answers, `rate` per second, up to `seconds`."""
    now = random.expovariate(rate)
    while now < seconds:
        yield now
        now += random.expovariate(rate)


class Run:
    """Calls to one server. The clock starts when the run is created."""

    def __init__(self, client: AsyncClient, ask: Ask, seed: int = 1) -> None:
        self.calls: list[Sample] = []
        self._client, self._ask, self._random, self._start = client, ask, Random(seed), time.perf_counter()

    def now(self) -> float:
        """Return seconds since the run began."""
        return time.perf_counter() - self._start

    async def send(self, intended: float | None = None) -> Sample:
        """Send one request now, read its whole answer, and record how it ended."""
        (prompt, options), sent = self._ask(self._random), self.now()
        call = Sample(sent if intended is None else intended, sent)
        try:
            async with aclosing(self._client.stream(prompt, deadline=LONGEST, **options)) as events:
                async for event in events:
                    if isinstance(event, Delta) and event.token_ids:
                        call.first = call.first or self.now()
                        call.tokens += len(event.token_ids)
        except RequestFailedError as error:
            call.status, call.retry_seconds = error.code.name, error.retry_seconds
        call.ended = self.now()
        self.calls.append(call)
        return call

    async def open_loop(self, moments: Iterable[float]) -> None:
        """Send requests at these times, independent of the answers; return when all have ended."""
        async with asyncio.TaskGroup() as tasks:
            for moment in moments:
                await asyncio.sleep(moment - self.now())
                tasks.create_task(self.send(moment))

    async def closed_loop(self, callers: int, seconds: float, minimum: int = 0) -> None:
        """Let each of the callers send one request after another for `seconds`, and until `minimum` were not refused.

        A refused caller waits for the retry delay.
        """

        async def ask() -> None:
            while self.now() < seconds or sum(call.status != REFUSED for call in self.calls) < minimum:
                call = await self.send()
                await asyncio.sleep(call.retry_seconds or 0)

        async with asyncio.TaskGroup() as tasks:
            for _ in range(callers):
                tasks.create_task(ask())


@dataclass(frozen=True, slots=True)
class Phase:
    """A phase of load, as measured by the callers and by the server."""

    name: str
    load: str
    seconds: float
    calls: Sequence[Sample]
    counted: float  # requests that the server ended or refused, by its metrics
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
            yield f"{self.name}: {unhinted} refusals without a retry delay"
        if len(self.served) + len(self.refused) != len(self.calls):
            statuses = dict(Counter(call.status for call in self.calls))
            yield f"{self.name}: some requests were neither served nor refused: {statuses}"

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
            yield "overload: no request was refused"
        if timed and self.waiting > MOST_WAITING:
            yield f"time to first token grew to {self.waiting:.2f} times that at capacity; at most {MOST_WAITING:g}"
        if timed and self.overload.growth > MOST_GROWTH:
            yield f"memory grew by {self.overload.growth:.1%}; at most {MOST_GROWTH:.0%}"


def full_rate(calls: Sequence[Sample]) -> float:
    """Return requests served per second while all callers were active: after the warm-up, until the last was sent.

    Raises:
        RuntimeError: No request was served.
    """
    until = max(call.sent for call in calls)
    served = sum(call.status == SERVED and WARMING * until < call.ended <= until for call in calls)
    if not served:
        statuses = dict(Counter(call.status for call in calls))
        raise RuntimeError(f"capacity cannot be measured: no request was served while all callers sent: {statuses}")
    return served / ((1 - WARMING) * until)


async def overload(
    server: ServerProcess, ask: Ask, times: float, seconds: float, progress: Callable[[str], None]
) -> Overload:
    """Measure capacity, then the server at capacity, then at `times` that rate.

    In a warm-up the server first measures the benefit of drafts with a full batch; until then it is slower. The phase
    at capacity starts with a burst that fills the batch. Requests then arrive as fast as others end, so without the
    burst it would depend on chance whether the queue is used.
    """
    async with AsyncClient(server.address) as client:
        places = (await client.model_info()).max_batch_size
    random = Random(_SEED)

    async def closed(name: str) -> Phase:
        callers, half = f"{CALLERS} callers", seconds / 2
        progress(f"{name}: {callers} for {half:g} s")
        return await _measure(server, ask, name, callers, half, lambda run: run.closed_loop(CALLERS, half, places + 1))

    async def opened(name: str, rate: float, burst: int = 0, timed_from: float = 0.0) -> Phase:
        progress(f"{name}: {burst} requests at once, then {rate:.1f} per second for {seconds:g} s")
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
    """Return how many requests the server has ended or refused; it may count an end after the caller sees it."""
    metrics = await asyncio.to_thread(server.metrics)
    found = metrics.total("requests_total") + metrics.total("admission_rejected_total")
    if found >= least or not patience:
        return found
    await asyncio.sleep(0.1)
    return await _counted(server, least, patience - 1)


@contextlib.asynccontextmanager
async def _watching(server: ServerProcess) -> AsyncIterator[list[int]]:
    """Record the resident memory of the server once per second."""
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
