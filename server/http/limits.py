"""Limits on the size of an HTTP request and on the time that it takes to arrive. Knows no route and no field."""

from __future__ import annotations

import asyncio
from typing import Any

import h11
from fastapi import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from server.http.errors import HttpError

ANSWER_SECONDS = 1.0  # for the answer 408, before the connection is closed


class RequestLimits:
    """Refuses a head or body that is too large or arrives too slowly, before all of it is in memory.

    The limits in bytes are those of gRPC messages and metadata.
    """

    def __init__(self, app: ASGIApp, *, max_head: int, max_body: int, seconds: float) -> None:
        self._app, self._max_head, self._max_body, self._seconds = app, max_head, max_body, seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check the size of the head, and count the bytes of the body that the routes receive."""
        head = sum(len(name) + len(value) for name, value in scope.get("headers", ())) + len(scope.get("raw_path", b""))
        if head > self._max_head:
            problem = f"the headers have {head} bytes; the limit is {self._max_head}"
            await HttpError(431, "invalid_request_error", "http", problem).response()(scope, receive, send)
            return
        await self._app(scope, _Counted(receive, self._max_body, self._seconds), send)


class _Counted:
    """A `receive` that limits the body's size and its time to arrive; after the body's end there is no deadline."""

    def __init__(self, receive: Receive, max_bytes: int, seconds: float) -> None:
        self._receive, self._max_bytes, self._seconds = receive, max_bytes, seconds
        self._left = max_bytes
        self._deadline: float | None = asyncio.get_running_loop().time() + seconds

    async def __call__(self) -> Message:
        try:
            async with asyncio.timeout_at(self._deadline):
                message = await self._receive()
        except TimeoutError:
            raise HTTPException(408, f"the body took more than {self._seconds:g} seconds to arrive") from None
        self._left -= len(message.get("body", b""))
        if self._left < 0:
            raise HTTPException(413, f"the body has more than {self._max_bytes} bytes")
        if not message.get("more_body", False):
            self._deadline = None
        return message


class HttpProtocol(H11Protocol):
    """uvicorn's protocol with a limit on the time in which the head of a request arrives, and then its body.

    uvicorn itself has none. `RequestLimits` answers a late body with 408; this closes the connection a little later,
    also where the body is not read, because the answer does not depend on it.
    """

    head_seconds = 30.0

    def connection_made(self, transport: Any) -> None:
        """Start the timer for the first head."""
        super().connection_made(transport)
        self._timer: asyncio.TimerHandle | None = None
        self._awaited: object = None  # what the timer is for: the state of the other side
        self._watch()

    def data_received(self, data: bytes) -> None:
        """Parse, then start a timer if a head or the rest of a body is expected, or cancel it if neither is."""
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the timer."""
        self._cancel()
        super().connection_lost(exc)

    def _watch(self) -> None:
        state = self.conn.their_state
        if state is not self._awaited:
            self._cancel()
        seconds = {h11.IDLE: self.head_seconds, h11.SEND_BODY: self.head_seconds + ANSWER_SECONDS}.get(state)
        if self._timer is None and seconds is not None:
            self._awaited, self._timer = state, self.loop.call_later(seconds, self._close)

    def _close(self) -> None:
        """Close the connection, whatever its answer is doing: an answer to a body that is late is an error."""
        self.transport.close()

    def _cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
