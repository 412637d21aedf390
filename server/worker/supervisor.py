"""Restarts of a failed engine: the first immediately, later ones with exponential back-off.

After too many failures the server ends with an exit code, so that Kubernetes or systemd can restart it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque

from pilotfish.engine.stats import Clock
from pilotfish.server.lifecycle import Lifecycle, State
from pilotfish.server.telemetry.metrics import Metrics
from pilotfish.server.worker.remote import RemoteEngine
from pilotfish.server.worker.worker import FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS, first_of

logger = logging.getLogger(__name__)


class Supervisor:
    """Restarts the engine and reports each change of state. Stores the times of recent failures."""

    def __init__(
        self, host: RemoteEngine, lifecycle: Lifecycle, metrics: Metrics, max_crashes: int,
        window_seconds: float = 300.0, clock: Clock = time.monotonic,
    ) -> None:  # fmt: skip
        self.host, self.lifecycle, self.metrics = host, lifecycle, metrics
        self._max_crashes, self._window_seconds, self._clock = max_crashes, window_seconds, clock
        self._times: deque[float] = deque()
        self._in_a_row = 0  # without a step between them

    def record(self) -> None:
        """Record a failure of the engine."""
        self._times.append(self._clock())
        self._in_a_row += 1

    def record_step(self) -> None:
        """Record that the engine has run a step, so that the next restart is immediate again."""
        self._in_a_row = 0

    def discount(self, count: int) -> None:
        """Remove the latest `count` failures: they were caused by a request that has ended."""
        for _ in range(min(count, len(self._times))):
            self._times.pop()

    def pause(self) -> float | None:
        """Return the seconds before a restart: 0 after one failure in a row, then doubling; None after too many."""
        while self._times and self._times[0] < self._clock() - self._window_seconds:
            self._times.popleft()
        if len(self._times) > self._max_crashes:
            return None
        before = min(self._in_a_row, len(self._times)) - 1
        return min(LONGEST_PAUSE_SECONDS, FIRST_PAUSE_SECONDS * 2 ** (before - 1)) if before > 0 else 0.0

    async def lost(self) -> None:
        """Count a failure of the engine, and accept no requests."""
        self.record()
        self.metrics.engine_up.set(0)
        await self.lifecycle.move(State.RECOVERING)

    async def revive(self, stopping: asyncio.Event) -> bool:
        """Restart until the engine runs; False if the server has failed or is `stopping`.

        A draining server needs an engine, too, for its live streams.
        """
        while self.lifecycle.state is not State.FAILED and not stopping.is_set():
            pause = self.pause()
            if pause is None:
                logger.error("the engine has failed too often; giving up")
                break
            await first_of(asyncio.sleep(pause), stopping.wait())
            if await self._restarted(stopping):
                self.metrics.engine_up.set(1)
                self.metrics.restarts.inc()
                await self.lifecycle.move(State.READY)
                return True
            self.record()
        if not stopping.is_set():
            await self.lifecycle.move(State.FAILED)
        return False

    async def _restarted(self, stopping: asyncio.Event) -> bool:
        """Try once; return whether the engine runs. Raises nothing."""
        restart = asyncio.ensure_future(self.host.restart())
        await first_of(restart, stopping.wait())
        if restart.cancelled() or not restart.done():
            return False
        error = restart.exception()
        if error is not None:
            logger.error("the engine could not be restarted", exc_info=error)
        return error is None
