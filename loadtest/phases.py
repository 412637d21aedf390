"""One stretch of load on one server: what the callers saw beside what the server says. Knows no report."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from random import Random

from client import AsyncClient
from loadtest.arrivals import Arrivals
from loadtest.driver import Run
from loadtest.metrics import ScrapedMetrics
from loadtest.process import ProcessUsage, ServerProcess
from loadtest.samples import Objective, Sample, Summary
from loadtest.workload import Workload

SEED = 1
WATCH_SECONDS = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """What the server added to its own counters during a stretch."""

    ended: float  # requests that were queued and are over, whatever their end
    rejected: float  # requests that were not
    tokens: float
    batch_size: float  # mean sequences of a verifying pass
    batch_sizes: dict[float, float]  # passes by upper bound of the size
    acceptance_rate: float
    acceptance_length: float
    gain: float  # tokens per second over plain decoding's, by the server's last estimate
    queue_seconds: float  # mean

    @classmethod
    def between(cls, before: ScrapedMetrics, after: ScrapedMetrics) -> Account:
        """Two readings."""
        added = after.since(before)
        drafted, rounds = added.value("spec_draft_tokens_total"), added.value("spec_drafts_total")
        accepted = added.value("spec_accepted_tokens_total")
        return cls(
            ended=added.total("requests_total"),
            rejected=added.total("admission_rejected_total"),
            tokens=added.value("generated_tokens_total"),
            batch_size=added.mean("batch_size", kind="verify"),
            batch_sizes=added.histogram("batch_size", kind="verify"),
            acceptance_rate=accepted / drafted if drafted else math.nan,
            acceptance_length=1 + accepted / rounds if rounds else math.nan,
            gain=after.value("spec_gain_ratio"),
            queue_seconds=added.mean("queue_time_seconds"),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """A stretch of load, measured from both sides."""

    name: str
    rate: float | None  # requests per second that were sent, in an open loop
    concurrency: int | None  # callers, in a closed one
    summary: Summary
    account: Account
    usages: tuple[ProcessUsage, ...]  # of the server's process, once per second

    @property
    def adds_up(self) -> bool:
        """Whether callers and server count the same: nobody is lost, nobody is served unasked."""
        return self.summary.adds_up and self.account.ended + self.account.rejected == self.summary.sent

    @property
    def resident(self) -> tuple[float, float]:
        """Mean bytes that the server held in the first and in the last quarter."""
        found = [usage.resident for usage in self.usages]
        quarter = max(1, len(found) // 4)
        return sum(found[:quarter]) / quarter, sum(found[-quarter:]) / quarter


@dataclass(slots=True)
class Site:
    """A server, who loads it, and everything that was sent."""

    server: ServerProcess
    workload: Workload
    objective: Objective = field(default_factory=Objective)
    samples: dict[str, list[Sample]] = field(default_factory=dict)  # by phase

    async def open(self, name: str, arrivals: Arrivals, seconds: float, *, burst: int = 0, since: float = 0.0) -> Phase:
        """Callers who come at a rate; `burst` come at once before; only what is sent from `since` on is timed."""
        random = Random(SEED)
        moments = [0.0] * burst + list(arrivals.times(seconds, random))
        return await self._measure(
            name,
            lambda run: run.open_loop(moments, self.workload, random),
            rate=arrivals.rate,
            seconds=seconds,
            since=since,
        )

    async def places(self) -> int:
        """How many requests the server runs at once."""
        async with AsyncClient(self.server.address) as client:
            return (await client.model_info()).max_batch_size

    async def closed(self, name: str, concurrency: int, seconds: float) -> Phase:
        """So many callers with one request at a time, for so long and until more have run than there are places."""
        random, least = Random(SEED), min(concurrency, 1 + await self.places())
        return await self._measure(
            name,
            lambda run: run.closed_loop(concurrency, seconds, self.workload, random, least),
            concurrency=concurrency,
            seconds=seconds,
        )

    async def _measure(
        self,
        name: str,
        load: Callable[[Run], Awaitable[None]],
        *,
        seconds: float,
        rate: float | None = None,
        concurrency: int | None = None,
        since: float = 0.0,
    ) -> Phase:
        before, usages = await asyncio.to_thread(self.server.metrics), list[ProcessUsage]()
        async with AsyncClient(self.server.address, retry=None) as client, _watching(self.server, usages):
            await client.health()  # connected before the clock starts
            run = Run(client)
            await load(run)
            seconds = max(seconds, run.now())
        self.samples[name] = run.samples
        return Phase(
            name=name,
            rate=rate,
            concurrency=concurrency,
            summary=Summary.of(run.samples, seconds, self.objective, since),
            account=await self._account(before, len(run.samples)),
            usages=tuple(usages),
        )

    async def _account(self, before: ScrapedMetrics, sent: int, patience: float = 10.0) -> Account:
        """The server's, as soon as it knows of all ends: a caller may hear of one a moment earlier."""
        end = asyncio.get_running_loop().time() + patience
        while True:
            account = Account.between(before, await asyncio.to_thread(self.server.metrics))
            if account.ended + account.rejected >= sent or asyncio.get_running_loop().time() > end:
                return account
            await asyncio.sleep(0.1)


@contextlib.asynccontextmanager
async def _watching(server: ServerProcess, usages: list[ProcessUsage]) -> AsyncIterator[None]:
    """Note what the server holds, once per second."""

    async def watch() -> None:
        while True:
            usages.append(server.usage())
            await asyncio.sleep(WATCH_SECONDS)

    task = asyncio.create_task(watch())
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
