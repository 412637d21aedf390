"""Sends requests and notes what became of them: at times that are fixed in advance, or as fast as the answers allow.

The open loop measures latency from the moment at which a request should have been sent. A driver that waits for answers
before it sends more requests would measure a slow server as one under low load (coordinated omission).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import aclosing
from dataclasses import dataclass
from random import Random

from client import AsyncClient, Delta, GenerateOptions, RequestFailedError

LONGEST = 120.0  # seconds; the deadline of each request, so that none waits for ever
SERVED, REFUSED = "OK", "RESOURCE_EXHAUSTED"
Ask = Callable[[Random], tuple[str, GenerateOptions]]


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
        """Send one request now, read its whole answer, and note how it ended."""
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
        """Send requests at these times, whatever becomes of the others; return when all have ended."""
        async with asyncio.TaskGroup() as tasks:
            for moment in moments:
                await asyncio.sleep(moment - self.now())
                tasks.create_task(self.send(moment))

    async def closed_loop(self, callers: int, seconds: float, least: int = 0) -> None:
        """Let each of the callers send one request after another for `seconds`, and until `least` were not refused.

        A refused caller waits as long as it was told.
        """

        async def ask() -> None:
            while self.now() < seconds or sum(call.status != REFUSED for call in self.calls) < least:
                call = await self.send()
                await asyncio.sleep(call.retry_seconds or 0)

        async with asyncio.TaskGroup() as tasks:
            for _ in range(callers):
                tasks.create_task(ask())
