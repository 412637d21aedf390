"""Sends requests and records the responses: at times that are fixed in advance, or as fast as the responses allow.

The open loop measures latency from the moment a request should have been sent. A driver that waits for responses before
it sends more requests would measure a slow server as one under low load (coordinated omission).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from contextlib import aclosing
from dataclasses import dataclass, field
from random import Random

from client import AsyncClient, CancelledError, DeadlineExceededError, Delta, QueueFullError, RequestFailedError
from client.results import SpeculationStats
from loadtest.samples import Outcome, Sample
from loadtest.workload import Ask, Workload

LONGEST = 120.0  # seconds; the deadline of requests without one, so that no request waits for ever
_OUTCOMES: dict[type[RequestFailedError], Outcome] = {
    QueueFullError: Outcome.REFUSED,
    DeadlineExceededError: Outcome.LATE,
}


@dataclass(slots=True)
class _StreamReading:
    """The progress of one stream while it is read."""

    first: float | None = None
    last: float | None = None
    tokens: int = 0
    gaps: list[float] = field(default_factory=list)
    speculation: SpeculationStats | None = None

    def take(self, tokens: int, now: float) -> None:
        """Record a message with this number of tokens."""
        if not tokens:
            return
        if self.last is None:
            self.first = now
        else:
            self.gaps.append(now - self.last)
        self.last, self.tokens = now, self.tokens + tokens


class Run:
    """One run against one server. Its clock starts when it is created, and it collects the samples."""

    def __init__(self, client: AsyncClient) -> None:
        self.samples: list[Sample] = []
        self._client, self._start = client, time.perf_counter()

    def now(self) -> float:
        """Return seconds since the run began."""
        return time.perf_counter() - self._start

    async def send(self, ask: Ask, intended: float | None = None) -> Sample:
        """Send one request now and read its whole response."""
        sent, reading = self.now(), _StreamReading()
        outcome, failure = Outcome.SERVED, None
        try:
            async with asyncio.timeout(ask.patience):
                await self._read(ask, reading)
        except TimeoutError:
            outcome = Outcome.LEFT
        except RequestFailedError as error:
            outcome, failure = _outcome(error, ask), error
        sample = _sample(sent if intended is None else intended, sent, self.now(), reading, outcome, failure)
        self.samples.append(sample)
        return sample

    async def _read(self, ask: Ask, reading: _StreamReading) -> None:
        deadline = LONGEST if ask.deadline is None else ask.deadline
        async with aclosing(self._client.stream(ask.prompt, deadline=deadline, **ask.options)) as events:
            async for event in events:
                if isinstance(event, Delta):
                    reading.take(len(event.token_ids), self.now())
                else:
                    reading.speculation = event.speculation_stats

    async def open_loop(self, moments: Iterable[float], workload: Workload, random: Random) -> None:
        """Send requests at these times, independently of the responses; return when all have ended."""
        async with asyncio.TaskGroup() as tasks:
            for moment in moments:
                ask = workload(random)
                await asyncio.sleep(moment - self.now())
                tasks.create_task(self.send(ask, moment))

    async def closed_loop(
        self, concurrency: int, seconds: float, workload: Workload, random: Random, least: int = 0
    ) -> None:
        """Run `concurrency` callers for `seconds`, each with one request at a time; active requests may finish.

        If fewer than `least` requests have ended by then, the run continues until that many have, because a rate needs
        completed requests. A refused caller waits for the retry delay and then sends another request.
        """

        async def call() -> None:
            while self.now() < seconds or sum(s.outcome is not Outcome.REFUSED for s in self.samples) < least:
                sample = await self.send(workload(random))
                await asyncio.sleep(sample.retry_seconds or 0)

        async with asyncio.TaskGroup() as tasks:
            for _ in range(concurrency):
                tasks.create_task(call())


def _outcome(error: RequestFailedError, ask: Ask) -> Outcome:
    if isinstance(error, CancelledError) and ask.patience is not None:
        return Outcome.LEFT
    return _OUTCOMES.get(type(error), Outcome.FAILED)


def _sample(
    intended: float,
    sent: float,
    ended: float,
    reading: _StreamReading,
    outcome: Outcome,
    failure: RequestFailedError | None,
) -> Sample:
    stats = reading.speculation
    return Sample(
        intended=intended,
        sent=sent,
        ended=ended,
        outcome=outcome,
        status="OK" if failure is None else failure.code.name,
        first=reading.first,
        last=reading.last,
        tokens=reading.tokens,
        gaps=tuple(reading.gaps),
        retry_seconds=None if failure is None else failure.retry_seconds,
        drafted=0 if stats is None else stats.drafted,
        accepted=0 if stats is None else stats.accepted,
        rounds=0 if stats is None else stats.rounds,
        message="" if failure is None else failure.message,
    )
