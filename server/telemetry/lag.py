"""How late the event loop is. Knows no metrics and no server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from engine.stats import Clock

EVERY_SECONDS = 0.1


async def watch_lag(observe: Callable[[float], None], clock: Clock, every_seconds: float = EVERY_SECONDS) -> None:
    """Tell `observe` for ever how many seconds after its time a sleep ended: something else held the loop."""
    while True:
        due = clock() + every_seconds
        await asyncio.sleep(every_seconds)
        observe(max(0.0, clock() - due))
