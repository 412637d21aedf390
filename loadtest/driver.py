"""Sends requests and notes what comes back: at moments settled beforehand, or as fast as answers allow.

The open loop measures from the moment a request should have been sent. A driver that waits for answers before it sends
more measures a server that is slow as one that is little used (coordinated omission).
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

LONGEST = 120.0  # seconds that a caller waits who set no deadline: nobody waits for ever
_OUTCOMES: dict[type[RequestFailedError], Outcome] = {
    QueueFullError: Outcome.REFUSED,
    DeadlineExceededError: Outcome.LATE,
}


@dataclass(slots=True)
class _StreamReading:
    """One stream as it comes."""

    first: float | None = None
    last: float | None = None
    tokens: int = 0
    gaps: list[float] = field(default_factory=list)
    speculation: SpeculationStats | None = None

    def take(self, tokens: int, now: float) -> None:
        """A message that brought so many tokens."""
        if not tokens:
            return
        if self.last is None:
            self.first = now
        else:
            self.gaps.append(now - self.last)
        self.last, self.tokens = now, self.tokens + tokens


class Run:
    """One run against one server: its clock starts with it, its samples gather in it."""

    def __init__(self, client: AsyncClient) -> None:
        self.samples: list[Sample] = []
        self._client, self._start = client, time.perf_counter()

    def now(self) -> float:
        """Seconds since it began."""
        return time.perf_counter() - self._start

    async def send(self, ask: Ask, intended: float | None = None) -> Sample:
        """Send one request now and read all of it."""
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
        """Send at these moments, whatever comes back; return when every answer is there."""
        async with asyncio.TaskGroup() as tasks:
            for moment in moments:
                ask = workload(random)
                await asyncio.sleep(moment - self.now())
                tasks.create_task(self.send(ask, moment))

    async def closed_loop(
        self, concurrency: int, seconds: float, workload: Workload, random: Random, least: int = 0
    ) -> None:
        """So many callers, each with one request at a time, for this long; what has begun may end.

        On a machine so slow that fewer than `least` requests have run by then, until as many have: a rate needs ends.
        Who is refused comes again when the server says so, as another request.
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
