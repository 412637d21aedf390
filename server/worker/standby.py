"""A second engine that is loaded and computes nothing, so that it can take over at once. Knows no request."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from engine.errors import ModelError
from server.worker import wire
from server.worker.supervisor import FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS
from server.worker.worker import Worker

logger = logging.getLogger(__name__)

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
