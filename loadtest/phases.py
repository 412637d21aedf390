"""One phase of load on one server: the callers' measurements beside the server's own metrics."""

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
    """The increase of the server's own counters during a phase."""

    ended: float  # queued requests that have ended, with any outcome
    rejected: float  # requests that were not queued
    tokens: float
    batch_size: float  # mean number of sequences in a verification pass
    batch_sizes: dict[float, float]  # passes by upper bound of the size
    acceptance_rate: float
    acceptance_length: float
    gain: float  # tokens per second relative to plain decoding, the server's last estimate
    queue_seconds: float  # mean

    @classmethod
    def between(cls, before: ScrapedMetrics, after: ScrapedMetrics) -> Account:
        """Compute the increase between two readings."""
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
    """A phase of load, measured by the callers and by the server."""

    name: str
    rate: float | None  # requests sent per second, in an open loop
    concurrency: int | None  # number of callers, in a closed loop
    summary: Summary
    account: Account
    usages: tuple[ProcessUsage, ...]  # of the server's process, once per second

    @property
    def adds_up(self) -> bool:
        """Return whether callers and server count the same requests: none is missing, none is additional."""
        return self.summary.adds_up and self.account.ended + self.account.rejected == self.summary.sent

    @property
    def resident(self) -> tuple[float, float]:
        """Return mean resident bytes of the server in the first and in the last quarter of the phase."""
        found = [usage.resident for usage in self.usages]
        quarter = max(1, len(found) // 4)
        return sum(found[:quarter]) / quarter, sum(found[-quarter:]) / quarter


@dataclass(slots=True)
class LoadTarget:
    """A server, the workload that it gets, and all requests that were sent."""

    server: ServerProcess
    workload: Workload
    objective: Objective = field(default_factory=Objective)
    samples: dict[str, list[Sample]] = field(default_factory=dict)  # by phase

    async def open(self, name: str, arrivals: Arrivals, seconds: float, *, burst: int = 0, since: float = 0.0) -> Phase:
        """Send requests at a rate after `burst` requests at once; only requests sent at `since` or later are timed."""
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
        """Return how many requests the server runs at once."""
        async with AsyncClient(self.server.address) as client:
            return (await client.model_info()).max_batch_size

    async def closed(self, name: str, concurrency: int, seconds: float) -> Phase:
        """Run `concurrency` callers for `seconds`, and until more requests have ended than the server runs at once."""
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
            await client.health()  # connect before the clock starts
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
        """Wait until the server has counted the end of all requests; a caller may see an end slightly earlier."""
        end = asyncio.get_running_loop().time() + patience
        while True:
            account = Account.between(before, await asyncio.to_thread(self.server.metrics))
            if account.ended + account.rejected >= sent or asyncio.get_running_loop().time() > end:
                return account
            await asyncio.sleep(0.1)


@contextlib.asynccontextmanager
async def _watching(server: ServerProcess, usages: list[ProcessUsage]) -> AsyncIterator[None]:
    """Record the resources of the server once per second."""

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
