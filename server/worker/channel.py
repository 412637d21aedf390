"""The front-end process's end of the sockets to the engine's process. It does not interpret messages."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from server.errors import EngineCrashed, EngineHung
from server.worker import wire

logger = logging.getLogger(__name__)


class Channel(asyncio.Protocol):
    """The protocol of the front ends' socket: it decodes messages, writes bytes, and detects silence.

    It calls `take` with each message, and `lose` with the error when the engine's process is lost.
    """

    def __init__(self, limit: int, take: Callable[[wire.ToFrontEnd], None], lose: Callable[[Exception], None]) -> None:
        self._frames, self._take, self._lose = wire.Frames(limit), take, lose
        self._transport: Any = None
        self._watching: asyncio.TimerHandle | None = None
        self._heard = self._is_closed = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Store the transport."""
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Decode the bytes, which may contain parts of messages or several messages."""
        self._heard = True
        try:
            for payload in () if self._is_closed else self._frames.feed(data):
                self._take(wire.read_to_front_end(payload))
        except wire.WireError as error:
            logger.error("the engine's process is not understood: %s", error)  # noqa: TRY400  # a traceback is of no use
            self._lose(error)
            self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Report the loss of the process, unless `close` was called before."""
        if not self._is_closed:
            self._lose(EngineCrashed("the engine's process ended"))
        self.close()

    def send(self, frame: bytes) -> None:
        """Send a message; discard it if the connection is closing."""
        if not self._transport.is_closing():
            self._transport.write(frame)

    def watch(self, seconds: float) -> None:
        """From now on, report the engine as hung after about `seconds` without a message.

        Two checks in a row must find no message, because one may be delayed by a pause of this process itself.
        """
        loop, half = asyncio.get_running_loop(), seconds / 2
        quiet = 0

        def look() -> None:
            nonlocal quiet
            quiet, self._heard = 0 if self._heard else quiet + 1, False
            if quiet >= 2:
                logger.error("the engine's process has said nothing for %g seconds; it is killed", seconds)
                self._lose(EngineHung(f"nothing was heard of the engine for {seconds:g} seconds"))
            else:
                self._watching = loop.call_later(half, look)

        self._watching = loop.call_later(half, look)

    def close(self) -> None:
        """Close the connection; later bytes and events are ignored."""
        self._is_closed = True
        if self._watching is not None:
            self._watching.cancel()
        self._transport.abort()
