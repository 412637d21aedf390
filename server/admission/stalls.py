"""Limits the time of each write to a reader, with one timer for all writes of a stream. Independent of the protocol.

A separate timeout around each write would cost a tenth of the write itself (docs/benchmarks/frontend.md).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import TracebackType


class Writes:
    """A context manager that is entered around each write; it cancels a write that takes too long."""

    def __init__(self, limit: asyncio.Timeout, seconds: float) -> None:
        self._limit, self._seconds = limit, seconds
        self._loop = asyncio.get_running_loop()
        self._begun: float | None = None  # start of the current write; None between writes
        self._timer: asyncio.TimerHandle | None = None  # set to the earliest time at which a write can be too long

    def __enter__(self) -> None:
        self._begun = self._loop.time()
        if self._timer is None:
            self._timer = self._loop.call_at(self._begun + self._seconds, self._look)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._begun = None

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _look(self) -> None:
        """Cancel the current write if it takes too long; if it has time left, set the timer to its limit."""
        self._timer = None
        if self._begun is None:
            return
        due = self._begun + self._seconds
        if due <= self._loop.time():
            self._limit.reschedule(due)
        else:
            self._timer = self._loop.call_at(due, self._look)


@asynccontextmanager
async def stall_limit(seconds: float) -> AsyncIterator[Writes]:
    """Raise TimeoutError if one write inside takes more than `seconds`; time between writes does not count."""
    async with asyncio.timeout(None) as limit:
        writes = Writes(limit, seconds)
        try:
            yield writes
        finally:
            writes.stop()
