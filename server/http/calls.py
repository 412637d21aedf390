"""One call over HTTP: an answer or an event stream, until the caller disconnects. Knows no format of answers."""

from __future__ import annotations

import asyncio
import json
import logging
import math
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import aclosing, asynccontextmanager
from itertools import chain
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from engine.errors import PilotfishError
from engine.types import FinishReason
from pilotfish.v1 import generation_pb2 as pb
from server.admission.admission import Admission, Call, Origin
from server.admission.resume import EventIds
from server.admission.stalls import Writes, stall_limit
from server.errors import Aborted, DeadlinePassed
from server.http.errors import INTERNAL, HttpError, http_error
from server.http.long_json import Encoder, HasLongList, in_turns, refuse
from server.http.requests import ParsedBody

logger = logging.getLogger(__name__)

_COMPACT, _SPACED = Encoder(",", ":"), Encoder()  # whole answers and events
T = TypeVar("T")
Messages = AsyncIterator[pb.GenerateStreamResponse]
Render = Callable[[Messages], AsyncIterator[list[dict[str, Any]]]]  # the events of one message after the other


class CallerGone(Exception):  # an event, so its name has no suffix `Error`
    """Expected: the caller has disconnected."""


async def unless_gone(work: Coroutine[Any, Any, T], receive: Receive) -> T:
    """Return the result of `work`. If the caller disconnects before, cancel `work` and raise CallerGone."""
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise CallerGone
        return working.result()
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


@asynccontextmanager
async def in_time(origin: Origin) -> AsyncIterator[None]:
    """Cancel the body of the `with` statement and raise DeadlinePassed when the caller's deadline passes."""
    remaining = origin.remaining()
    limit = asyncio.timeout(None if remaining == math.inf else remaining)
    try:
        async with limit:
            yield
    except TimeoutError:
        if limit.expired():
            raise DeadlinePassed("the timeout passed before the end") from None
        raise  # another timeout inside


async def admit(admission: Admission, asked: ParsedBody, origin: Origin) -> Call:
    """Admit the request. The function that gets the call has to release it."""
    async with in_time(origin):
        return await admission.admit(asked.message, origin, asked.wrong)


class WholeAnswer(Response):
    """The JSON of a whole response. Its call is released when it is written, so an answer nobody reads still counts."""

    def __init__(self, call: Call, pieces: list[bytes]) -> None:
        length = str(sum(map(len, pieces)))
        super().__init__(media_type="application/json", headers={"content-length": length})
        self._call, self._pieces = call, pieces

    @classmethod
    async def of(
        cls,
        admission: Admission,
        asked: ParsedBody,
        origin: Origin,
        shape: Callable[[pb.GenerateResponse], dict[str, Any]],
    ) -> WholeAnswer:
        """Admit the request, wait for its whole response, and encode what `shape` makes of it."""
        call = await admit(admission, asked, origin)
        try:
            async with in_time(origin):
                response = await call.response()
            return cls(call, [piece async for piece in in_turns(_COMPACT.parts(shape(response)))])
        except BaseException:
            call.release(late=origin.remaining() <= 0)
            raise

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Write the pieces, each when the connection has taken those before; then release the call."""
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            for i, piece in enumerate(self._pieces, 1):
                await send({"type": "http.response.body", "body": piece, "more_body": i < len(self._pieces)})
        finally:
            self._call.release()


class EventStream(Response):
    """Server-sent events: one per object that `render` makes of the call's messages, then `[DONE]`.

    With `has_ids`, the last event of each message has an id, with which the stream can be continued after it. Events
    that the caller received of an interrupted stream are not sent again.
    """

    def __init__(
        self, call: Call, render: Render, origin: Origin, stall_seconds: float, ids: EventIds, has_ids: bool
    ) -> None:
        super().__init__(media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        del self.headers["content-length"]  # the length is not known yet
        self._call, self._render, self._origin, self._stall_seconds = call, render, origin, stall_seconds
        self._ids, self._has_ids, self._is_known = ids, has_ids, False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Write to the end, or until the caller disconnects, stalls or passes the deadline; then release the call."""
        try:
            await unless_gone(self._write(send), receive)
        except CallerGone:
            logger.info("request %s: its caller left", self._call.stream.request_id)
        except TimeoutError:
            self._call.metrics.requests.stalls.inc()
            error = Aborted(f"the reader took no event for {self._stall_seconds:g} seconds")
            self._call.driver.end(self._call.stream, FinishReason.ABORTED, error)
        finally:
            self._call.release(late=self._origin.remaining() <= 0)

    async def _write(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async with aclosing(self._call.messages()) as messages, stall_limit(self._stall_seconds) as writes:
            try:
                async with in_time(self._origin):
                    async for events in self._render(self._observed(messages)):
                        for i, event in enumerate(events if not self._is_known else (), 1):
                            event_id = self._ids.newest if self._has_ids and i == len(events) else ""
                            await _write_event(send, event, event_id, writes)
                with writes:
                    await _event(send, "[DONE]")
            except Exception as error:  # noqa: BLE001  # the status is sent already, so an event must report the error
                with writes:
                    await _event(send, json.dumps(_told(error).body()))
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _observed(self, messages: Messages) -> Messages:
        """Yield the messages; note of each, before its events are made, their id and whether the caller knows them."""
        async for message in messages:
            self._is_known = self._ids.observe(message)
            yield message
        self._is_known = False  # what follows, such as the usage, is of no message


async def _write_event(send: Send, event: dict[str, Any], event_id: str, writes: Writes) -> None:
    """Write an event in one piece, or, if it has a long list, in pieces, each with its own limit of time."""
    try:
        data = json.dumps(event, ensure_ascii=False, default=refuse)
    except HasLongList:
        parts = chain((_head(event_id),), _SPACED.parts(event), ("\n\n",))
        async with aclosing(in_turns(parts)) as pieces:
            async for piece in pieces:
                with writes:
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
    else:
        with writes:
            await _event(send, data, event_id)


async def _event(send: Send, data: str, event_id: str = "") -> None:
    body = f"{_head(event_id)}{data}\n\n".encode()
    await send({"type": "http.response.body", "body": body, "more_body": True})


def _head(event_id: str) -> str:
    return f"id: {event_id}\ndata: " if event_id else "data: "


def _told(error: Exception) -> HttpError:
    if isinstance(error, PilotfishError):
        return http_error(error)
    logger.error("an event could not be made", exc_info=error)
    return INTERNAL
