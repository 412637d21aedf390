"""Work on large inputs, on one thread beside the event loop: parsing, encoding, checking.

Most of this work holds the interpreter's lock. One thread does one piece at a time, so the event loop waits for at most
one piece, however many callers send large inputs at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

# Larger inputs are given to the thread. Work on smaller ones takes less than a millisecond.
MAX_BYTES_ON_LOOP = 16 << 10


class SlowWork:
    """A thread for work that takes milliseconds or more."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="slow-work")

    async def run(self, work: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Return the result of `work`, run on the thread after the work that came before."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, lambda: work(*args, **kwargs))

    def close(self) -> None:
        """Start no further work."""
        self._thread.shutdown(wait=False, cancel_futures=True)
