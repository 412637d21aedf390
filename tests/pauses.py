"""For how long a thread or an event loop could not go on, whatever else this machine has to do."""

from __future__ import annotations

import asyncio
import threading
import time
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace


def own_time():
    """A clock that stands still while this thread waits for a processor, where the system tells that."""
    try:
        waited = int(Path("/proc/thread-self/schedstat").read_text().split()[1])
    except FileNotFoundError:
        waited = 0
    return time.perf_counter() - waited / 1e9


@asynccontextmanager
async def pauses():
    """The longest time for which the event loop did nothing else, in seconds."""
    seen = SimpleNamespace(longest=0.0)

    async def tick():
        last = own_time()
        while True:
            await asyncio.sleep(0.001)
            now = own_time()
            seen.longest, last = max(seen.longest, now - last), now

    task = asyncio.create_task(tick())
    await asyncio.sleep(0)
    try:
        yield seen
        await asyncio.sleep(0.002)
    finally:
        task.cancel()


def while_counting(work):
    """The seconds that work takes on another thread, and the longest time for which this thread could not go on."""
    thread = threading.Thread(target=work)
    began = last = own_time()
    longest = 0.0
    thread.start()
    while thread.is_alive():
        time.sleep(0.001)
        now = own_time()
        longest, last = max(longest, now - last), now
    return last - began, longest
