"""Limits on the size of an HTTP request and on the time that it takes to arrive. Knows no route and no field."""

from __future__ import annotations

import asyncio
from typing import Any

import h11
import uvicorn
from fastapi import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from server.http.errors import HttpError, error_at

ANSWER_SECONDS = 1.0  # for an answer to a body that has not arrived, before the connection is closed
# Chunks of a body, besides one per so many bytes: each chunk takes the event loop as long as some kilobytes.
MAX_CHUNKS, MIN_CHUNK = 1024, 512
STALLED = "reader_stalled"  # in the state of a request's scope once its connection is aborted for its reader


class RequestLimits:
    """Refuses a head or body that is too large or arrives too slowly, before all of it is in memory.

    The limits in bytes are those of gRPC messages and metadata.
    """

    def __init__(self, app: ASGIApp, *, max_head: int, max_body: int, seconds: float) -> None:
        self._app, self._max_head, self._max_body, self._seconds = app, max_head, max_body, seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check the size of the head, and count the bytes of the body that the routes receive.

        Cookies are dropped. We have no use for them, and FastAPI parses them in a time that grows with the square.
        """
        headers = scope.get("headers", ())
        head = sum(len(name) + len(value) for name, value in headers) + len(scope.get("raw_path", b""))
        if head > self._max_head:
            problem = f"the headers have {head} bytes; the limit is {self._max_head}"
            error = HttpError(431, "invalid_request_error", "http", problem)
            await error_at(scope["path"], error).response()(scope, receive, send)
            return
        kept = [(name, value) for name, value in headers if name != b"cookie"]
        await self._app({**scope, "headers": kept}, _Counted(receive, self._max_body, self._seconds), send)


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


class _Connection(h11.Connection):
    """h11's side of a connection; it refuses a body of very many small chunks."""

    problem = ""  # why a request was refused
    _num_chunks = _num_bytes = 0

    def next_event(self) -> type[h11.NEED_DATA | h11.PAUSED] | h11.Event:
        """Return what h11 parsed, and count it."""
        event = super().next_event()
        if isinstance(event, h11.Request):
            self._num_chunks = self._num_bytes = 0
        elif isinstance(event, h11.Data):
            self._num_chunks, self._num_bytes = self._num_chunks + event.chunk_start, self._num_bytes + len(event.data)
            if self._num_chunks > MAX_CHUNKS + self._num_bytes // MIN_CHUNK:
                self.problem = f"the body has {self._num_chunks} chunks for {self._num_bytes} bytes"
                raise h11.RemoteProtocolError(self.problem)
        return event


class HttpProtocol(H11Protocol):
    """uvicorn's protocol with limits on the time in which the head and the body of a request arrive and answers leave.

    uvicorn itself has none. `RequestLimits` answers a late body with 408; this closes the connection a little later,
    also where the body is not read, because the answer does not depend on it.

    A connection that is closed still waits until what it has written is read. So one whose reader takes nothing is
    aborted: a little after `stall_seconds`, so that a stream which waits for its reader says so first. A stream that
    has nothing to write by then finds `STALLED` in its scope.
    """

    head_seconds = stall_seconds = 30.0

    def __init__(self, config: uvicorn.Config, *args: Any, **named: Any) -> None:
        super().__init__(config, *args, **named)
        assert config.h11_max_incomplete_event_size is not None, "HttpServer sets it"
        self.conn: _Connection = _Connection(h11.SERVER, config.h11_max_incomplete_event_size)
        self._timer: asyncio.TimerHandle | None = None
        self._awaited: float | None = None  # seconds of the timer
        self._unread: asyncio.TimerHandle | None = None  # set while the reader has to take what is written
        self._is_lost = False

    def connection_made(self, transport: Any) -> None:
        """Start the timer for the first head."""
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        """Parse, then start a timer if a head or the rest of a body is expected, or cancel it if neither is."""
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        """Expect the next request. If the body has not arrived yet, it has a little time left."""
        super().on_response_complete()
        self._watch()
        self._watch_closing()

    def pause_writing(self) -> None:
        """Start the time of the reader."""
        super().pause_writing()
        self._watch_reader()

    def resume_writing(self) -> None:
        """Cancel the time of the reader, unless it has to take the rest before the connection closes."""
        super().resume_writing()
        self._cancel_reader()
        self._watch_closing()

    def shutdown(self) -> None:
        """Close the connection when it has written its answer; the reader has its time to take it."""
        super().shutdown()
        self._watch_closing()

    def timeout_keep_alive_handler(self) -> None:
        """Close a connection that asks nothing more; the reader has its time to take the last answer."""
        super().timeout_keep_alive_handler()
        self._watch_closing()

    def send_400_response(self, msg: str) -> None:
        """Say what is wrong with the request, unless it is answered already; then close the connection."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(self.conn.problem or msg)
            self._watch_closing()
        else:
            self._close()

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the timers."""
        self._is_lost = True
        self._cancel()
        super().connection_lost(exc)
        self._cancel_reader()

    def _watch(self) -> None:
        seconds = self._seconds()
        if seconds != self._awaited:
            self._cancel()
            if seconds is not None:
                self._awaited, self._timer = seconds, self.loop.call_later(seconds, self._close)

    def _seconds(self) -> float | None:
        """Return the time for what the other side has to send: a head, a body, or the rest of one that is answered."""
        state = self.conn.their_state
        if state is h11.IDLE:
            return self.head_seconds
        if state is not h11.SEND_BODY:
            return None
        return ANSWER_SECONDS if self.conn.our_state is h11.DONE else self.head_seconds + ANSWER_SECONDS

    def _close(self) -> None:
        self.transport.close()
        self._watch_closing()

    def _watch_closing(self) -> None:
        """Start the time of the reader if only it delays the end; where nothing is unread, that comes at once.

        The size of the transport's buffer does not tell: with TLS there is another one below.
        """
        if self.transport.is_closing() and not self._is_lost:
            self._watch_reader()

    def _watch_reader(self) -> None:
        if self._unread is None:
            self._unread = self.loop.call_later(self.stall_seconds + ANSWER_SECONDS, self._abort)

    def _abort(self) -> None:
        if self.scope is not None:
            self.scope["state"][STALLED] = True
        self.transport.abort()

    def _cancel_reader(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
        self._unread = None

    def _cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._awaited = self._timer = None
