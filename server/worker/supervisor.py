"""Restarts of an engine that failed: first at once, then after longer and longer pauses; and the standby engine.

After too many failures the server ends with an exit code, so that Kubernetes or systemd can restart it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable

from engine.errors import ModelError
from engine.stats import Clock
from server.errors import EngineGone
from server.lifecycle import Lifecycle, State
from server.telemetry.metrics import Metrics
from server.worker import wire
from server.worker.worker import Worker

logger = logging.getLogger(__name__)

FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.5, 30.0


class Crashes:
    """The times of recent failures of the engine, and the pause before the next restart."""

    def __init__(self, most: int, window_seconds: float, clock: Clock = time.monotonic) -> None:
        self._most, self._window_seconds, self._clock = most, window_seconds, clock
        self._times: deque[float] = deque()
        self._in_a_row = 0  # without a step between them

    def record(self) -> None:
        self._times.append(self._clock())
        self._in_a_row += 1

    def record_step(self) -> None:
        """Record that the engine has taken a step, so that the next restart is again at once."""
        self._in_a_row = 0

    def discount(self, count: int) -> None:
        """Do not count the latest `count` failures: a request caused them, which has ended."""
        for _ in range(min(count, len(self._times))):
            self._times.pop()

    def pause(self) -> float | None:
        """Return the seconds before a restart: 0 after one failure in a row, then doubling; None after too many."""
        while self._times and self._times[0] < self._clock() - self._window_seconds:
            self._times.popleft()
        if len(self._times) > self._most:
            return None
        before = min(self._in_a_row, len(self._times)) - 1
        return min(LONGEST_PAUSE_SECONDS, FIRST_PAUSE_SECONDS * 2 ** (before - 1)) if before > 0 else 0.0


class Supervisor:
    """Restarts the engine of a host and reports each change of state."""

    def __init__(
        self, restart: Callable[[], Awaitable[None]], lifecycle: Lifecycle, metrics: Metrics, crashes: Crashes
    ) -> None:
        self._restart, self._lifecycle, self._metrics, self.crashes = restart, lifecycle, metrics, crashes

    async def lost(self) -> None:
        """Count a failure of the engine, and accept no requests."""
        self.crashes.record()
        self._metrics.engine_up.set(0)
        await self._lifecycle.move(State.RECOVERING)

    async def revive(self, stopping: asyncio.Event) -> bool:
        """Restart until the engine runs; False if the server has failed or is `stopping`.

        A server that drains needs an engine, too: its live streams go on.
        """
        while self._lifecycle.state is not State.FAILED and not stopping.is_set():
            pause = self.crashes.pause()
            if pause is None:
                logger.error("the engine has failed too often; giving up")
                break
            await first_of(asyncio.sleep(pause), stopping.wait())
            if await self._restarted(stopping):
                self._metrics.engine_up.set(1)
                self._metrics.restarts.inc()
                await self._lifecycle.move(State.READY)
                return True
            self.crashes.record()
        if not stopping.is_set():
            await self._lifecycle.move(State.FAILED)
        return False

    async def _restarted(self, stopping: asyncio.Event) -> bool:
        """Try once; raises nothing."""
        restart = asyncio.ensure_future(self._restart())
        await first_of(restart, stopping.wait())
        if restart.cancelled() or not restart.done():
            return False
        error = restart.exception()
        if error is not None:
            logger.error("the engine did not begin again", exc_info=error)
        if isinstance(error, EngineGone):
            await self._lifecycle.move(State.FAILED)
        return error is None


async def first_of(*waits: Awaitable[object], timeout: float | None = None) -> None:  # noqa: ASYNC109  # the end of the time is not an error
    """Return when the first of these is done, or after `timeout` seconds; the others are cancelled."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        await asyncio.wait(tasks, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()


Loaded = tuple[Worker, wire.Ready]


class Standby:
    """Loads an engine, and after longer and longer pauses another one when it is lost, until it is taken or closed.

    An engine that is refused is not loaded again.
    """

    def __init__(
        self, load: Callable[[], Awaitable[Loaded]], pause: Callable[[float], Awaitable[None]] = asyncio.sleep
    ) -> None:
        self._load, self._pause = load, pause
        self._loading: asyncio.Future[Loaded] | None = None  # loads, or has loaded, the engine that can be taken
        self._keeper = asyncio.ensure_future(self._keep())

    @property
    def worker(self) -> Worker | None:
        """The engine that can be taken at once, if there is one."""
        loading = self._loading
        if loading is None or not loading.done() or loading.cancelled() or loading.exception() is not None:
            return None
        worker, _ = loading.result()
        return worker if worker.loss is None else None

    async def take(self) -> Loaded | None:
        """Return the engine as soon as it is loaded, and keep none from now on; None if there is none."""
        await self._end_keeper()
        if self._loading is None:
            return None
        try:
            worker, facts = await asyncio.shield(self._loading)
        except Exception:
            logger.exception("the standby could not be loaded")
            self._loading = None
            return None
        self._loading = None
        worker.wake = lambda: None
        if worker.loss is None:
            return worker, facts
        await worker.close()
        return None

    async def close(self) -> None:
        """Kill the process of the engine, if there is one, and wait until it is gone."""
        await self._end_keeper()
        loading, self._loading = self._loading, None
        if loading is None:
            return
        loading.cancel()
        await asyncio.wait([loading])
        if not loading.cancelled() and loading.exception() is None:
            await loading.result()[0].close()

    async def _keep(self) -> None:
        seconds = FIRST_PAUSE_SECONDS
        while True:
            self._loading = asyncio.ensure_future(self._load())
            try:
                worker, _ = await asyncio.shield(self._loading)
            except ModelError as error:  # it would be refused again, and on a GPU its weights take what passes need
                logger.error("no standby is kept: %s", error)  # noqa: TRY400  # a traceback is of no use
                self._loading = None
                return
            except Exception:
                logger.exception("the standby could not be loaded")
                self._loading = None
            else:
                await _lost(worker)
                logger.warning("the standby was lost: %s", worker.loss)
                self._loading = None
                await _to_its_end(worker.close())
            await self._pause(seconds)
            seconds = min(2 * seconds, LONGEST_PAUSE_SECONDS)

    async def _end_keeper(self) -> None:
        self._keeper.cancel()
        await asyncio.wait([self._keeper])


async def _lost(worker: Worker) -> None:
    lost = asyncio.Event()
    worker.wake = lost.set
    if worker.loss is None:
        await lost.wait()


async def _to_its_end(work: Awaitable[None]) -> None:
    """Await `work` to its end, also if this task is cancelled meanwhile."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await task
        raise
