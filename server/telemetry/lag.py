"""Measurement of the event loop's lag. Knows no metrics and no server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from engine.stats import Clock

EVERY_SECONDS = 0.1


async def watch_lag(observe: Callable[[float], None], clock: Clock, every_seconds: float = EVERY_SECONDS) -> None:
    """Sleep again and again, and pass to `observe` how many seconds late each sleep ended.

    A sleep ends late if other work blocked the event loop.
    """
    while True:
        due = clock() + every_seconds
        await asyncio.sleep(every_seconds)
        observe(max(0.0, clock() - due))
