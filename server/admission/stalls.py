"""How long a reader may take nothing: one timer for all writes of a stream. Knows no protocol.

A timeout around each write would cost a tenth of what the write costs (docs/benchmarks/frontend.md).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import TracebackType


class Writes:
    """Entered around each write; what takes too long is cancelled."""

    def __init__(self, limit: asyncio.Timeout, seconds: float) -> None:
        self._limit, self._seconds = limit, seconds
        self._loop = asyncio.get_running_loop()
        self._begun: float | None = None  # the write that is under way
        self._timer: asyncio.TimerHandle | None = None  # at the earliest time at which it could be too late

    def __enter__(self) -> None:
        self._begun = self._loop.time()
        if self._timer is None:
            self._timer = self._loop.call_at(self._begun + self._seconds, self._look)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._begun = None

    def stop(self) -> None:
        """Look no more."""
        if self._timer is not None:
            self._timer.cancel()

    def _look(self) -> None:
        """Cut the write under way if it began long ago; if it is a later one, look again when it would be."""
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
    """TimeoutError once one of the writes inside takes more than `seconds`, however long there is none."""
    async with asyncio.timeout(None) as limit:
        writes = Writes(limit, seconds)
        try:
            yield writes
        finally:
            writes.stop()
