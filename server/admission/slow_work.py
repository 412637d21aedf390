"""Work on inputs by their size: small ones on the event loop, others on threads beside it.

Parsing and checking hold the lock of the interpreter. Each thread does one piece at a time, so the event loop waits for
a few pieces at most, however many callers send large inputs at once. Large inputs have a thread of their own: others
do not wait for seconds behind them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from typing import TypeVar, TypeVarTuple

Args = TypeVarTuple("Args")
T = TypeVar("T")

MAX_BYTES_ON_LOOP = 2 << 10  # work on so many bytes takes less than a millisecond
MAX_MIDDLE_BYTES = 256 << 10  # and on so many some tens of milliseconds

request_bytes: ContextVar[int] = ContextVar("request_bytes", default=0)  # size of the message that a task serves


class SlowWork:
    """Two threads, for middle and for large inputs."""

    def __init__(self) -> None:
        self._middle = ThreadPoolExecutor(max_workers=1, thread_name_prefix="middle-inputs")
        self._large = ThreadPoolExecutor(max_workers=1, thread_name_prefix="large-inputs")

    async def run(self, size: int, work: Callable[[*Args], T], /, *args: *Args) -> T:
        """Return `work(*args)`, which is done where an input of `size` bytes belongs."""
        if size <= MAX_BYTES_ON_LOOP:
            return work(*args)
        thread = self._middle if size <= MAX_MIDDLE_BYTES else self._large
        return await asyncio.get_running_loop().run_in_executor(thread, work, *args)

    def close(self) -> None:
        """Start no further work."""
        for thread in (self._middle, self._large):
            thread.shutdown(wait=False, cancel_futures=True)
