"""An engine's process and the connection to it, from its fork to its end; and the standby.

Knows no request.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any

from pilotfish.engine.errors import ModelError
from pilotfish.engine.stats import StepOutput
from pilotfish.server.errors import EngineCrashed, EngineHung
from pilotfish.server.model import Progress
from pilotfish.server.worker import wire
from pilotfish.server.worker.fork_server import Forked

logger = logging.getLogger(__name__)

FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.5, 30.0  # between failures of engines


class Worker(asyncio.Protocol):
    """A process with an engine. It is killed if it sends nothing for too long, or an invalid message."""

    def __init__(self, process: Forked, limit: int, progress: Progress) -> None:
        self.process, self._progress = process, progress
        self.outputs: deque[StepOutput] = deque()  # unread
        self.loss: Exception | None = None
        self.lost = asyncio.Event()
        self.wake: Callable[[], None] = lambda: None  # called when an output or the loss has arrived
        self._frames = wire.Frames(limit)
        self._transport: Any = None  # before it is connected
        self._watching: asyncio.TimerHandle | None = None
        self.num_orders = 0  # that were sent
        self._has_received = self._is_closed = False
        self._ready: asyncio.Future[wire.Ready] = asyncio.get_running_loop().create_future()
        self._ready.add_done_callback(lambda ready: ready.cancelled() or ready.exception())  # set when waiting is over
        self._asked: dict[int, asyncio.Future[str]] = {}  # pending answers (a fingerprint or ""), by message number

    # ------------------------------------------------------------------------------------------------ the connection

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Decode the bytes, which may contain parts of messages or several messages."""
        try:
            for payload in () if self._is_closed else self._frames.feed(data):
                self._take(wire.read(payload))
        except wire.WireError as error:
            logger.error("invalid message from the engine's process: %s", error)  # noqa: TRY400  # a traceback is of no use
            self._lose(error)
            self._disconnect()

    def connection_lost(self, exc: Exception | None) -> None:
        """Report the loss of the process, unless the connection was closed here."""
        if not self._is_closed:
            self._lose(EngineCrashed("the engine's process ended"))
        self._disconnect()

    def send(self, message: wire.ToEngine) -> None:
        """Send a message, unless the connection is closing. Raises wire.EncodeError if it cannot be encoded."""
        frame = wire.framed(message, wire.MOST_ORDER_BYTES)
        self.num_orders += isinstance(message, wire.Order)
        if not self._transport.is_closing():
            self._transport.write(frame)

    def _watch(self, seconds: float, quiet: int = 0) -> None:
        """From now on, report the engine as hung after about `seconds` without a message.

        Two checks in a row must find no message, because one may be delayed by a pause of this process itself.
        """

        def look() -> None:
            self._watch(seconds, 0 if self._has_received else quiet + 1)

        self._has_received = False
        if quiet >= 2:
            logger.error("the engine's process has sent nothing for %g seconds and is killed", seconds)
            self._lose(EngineHung(f"the engine has sent nothing for {seconds:g} seconds"))
        else:
            self._watching = asyncio.get_running_loop().call_later(seconds / 2, look)

    def _disconnect(self) -> None:
        """Close the connection; later bytes and events are ignored."""
        self._is_closed = True
        if self._watching is not None:
            self._watching.cancel()
        self._transport.abort()

    # --------------------------------------------------------------------------------------------------- the process

    async def ready(self, hang_seconds: float, load_seconds: float | None = None) -> None:
        """Wait for the engine's `facts` until it is loaded, for at most `load_seconds`, and watch it from then on.

        Raises EngineHung if it was not loaded in time, or ModelError, EngineCrashed or WireError.
        """
        try:
            async with asyncio.timeout(load_seconds):
                ready = await self._ready
        except TimeoutError:
            raise EngineHung(f"the engine was not loaded within {load_seconds:.3g} s") from None
        self.facts, self.adapters = ready.facts, ready.adapters
        self.newest = StepOutput((), None, ready.load)  # of its outputs, read or unread
        self._watch(hang_seconds)

    def ask(self, message: wire.LoadAdapter | wire.Compile) -> asyncio.Future[str]:
        """Send a message. The future holds the result or error in its answer, or the loss of the engine."""
        self.send(message)
        answer = self._asked[message.number] = asyncio.get_running_loop().create_future()
        return answer

    async def cause(self) -> Exception:
        """Wait until the lost process is gone; return why it was lost."""
        assert self.loss is not None, "not lost"
        status = await asyncio.to_thread(self.process.wait)
        if isinstance(self.loss, EngineCrashed):
            self.loss.status = status
        return self.loss

    async def close(self) -> None:
        """Kill the process and wait until it is gone."""
        if self._transport is None:
            self.process.socket.close()
        else:
            self._disconnect()
        status = await asyncio.to_thread(self.process.wait)
        how = f"exit status {status}" if status >= 0 else signal.strsignal(-status)
        logger.info("the engine's process %d has ended: %s", self.process.pid, how)

    def _take(self, message: wire.Message) -> None:
        # Answers do not count, because `Compile` is answered even while a step hangs.
        self._has_received |= not isinstance(message, wire.Answer)
        match message:
            case StepOutput():
                self.outputs.append(message)
                self.newest = message
                self.wake()
            case wire.Progress():
                self._progress(message.stage)
            case wire.Ready():
                self._ready.set_result(message)
            case wire.Refused():
                self._lose(ModelError(message.problem))
            case wire.Answer():
                answer = self._asked.pop(message.number, None)
                if answer is None or answer.done():  # its caller no longer waits
                    return
                if (error := message.error) is None:
                    answer.set_result(message.fingerprint)
                else:
                    answer.set_exception(error)
            case wire.Heartbeat():
                pass
            case _:
                raise wire.WireError(f"a {type(message).__name__} from the engine")

    def _lose(self, error: Exception) -> None:
        """Record that the engine is lost, and kill its process."""
        if self.loss is None:
            self.loss = error
            waiting: list[asyncio.Future[Any]] = [self._ready, *self._asked.values()]
            for answer in waiting:
                if not answer.done():
                    answer.set_exception(error)
            self.process.kill()
            self.lost.set()
            self.wake()


class Standby:
    """Keeps an engine loaded, with exponential back-off after losses, until it is taken or closed.

    An engine that fails with ModelError is not loaded again.
    """

    def __init__(
        self, load: Callable[[], Awaitable[Worker]], pause: Callable[[float], Awaitable[None]] = asyncio.sleep
    ) -> None:
        self._load, self._pause = load, pause
        self._is_wanted = asyncio.Event()
        self._worker: Worker | None = None  # loaded
        self._keeper = asyncio.ensure_future(self._keep())

    async def take(self) -> Worker | None:
        """Return the engine as soon as it is loaded, and load no other; None if there is none."""
        self._is_wanted.set()
        await asyncio.shield(self._keeper)
        worker, self._worker = self._worker, None
        return worker

    async def close(self) -> None:
        """Kill the process of the engine, if there is one, and wait until it is gone."""
        self._keeper.cancel()
        await asyncio.wait([self._keeper])
        if self._worker is not None:
            await self._worker.close()
            self._worker = None

    async def _keep(self) -> None:
        seconds = FIRST_PAUSE_SECONDS
        while True:
            try:
                self._worker = await self._load()
                await first_of(self._worker.lost.wait(), self._is_wanted.wait())
                if self._worker.loss is None:
                    return
                logger.warning("the standby was lost: %s", self._worker.loss)
                await self._worker.close()
                self._worker = None
            except ModelError as error:  # it would fail again, and on a GPU its weights take memory that passes need
                logger.error("running without a standby: %s", error)  # noqa: TRY400  # a traceback is of no use
                return
            except Exception:
                logger.exception("the standby could not be loaded")
            if not self._is_wanted.is_set():
                await first_of(self._pause(seconds), self._is_wanted.wait())
            if self._is_wanted.is_set():
                return
            seconds = min(2 * seconds, LONGEST_PAUSE_SECONDS)


async def first_of(*waits: Awaitable[object], timeout: float | None = None) -> None:  # noqa: ASYNC109  # no error
    """Return when the first of these is done, or after `timeout` seconds; the others are cancelled."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        await asyncio.wait(tasks, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
