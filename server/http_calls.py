"""One call over HTTP: an answer or an event stream, for as long as its caller is there. Knows no shape of either."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from engine.errors import PilotfishError
from engine.types import FinishReason
from pilotfish.v1 import generation_pb2 as pb
from server.admission import Admission, Call, Origin
from server.errors import Aborted
from server.http_errors import INTERNAL, HttpError, http_error

logger = logging.getLogger(__name__)

T = TypeVar("T")
Render = Callable[[AsyncIterator[pb.GenerateStreamResponse]], AsyncIterator[dict[str, Any]]]


class CallerGone(Exception):  # named by what happened
    """Expected: nobody waits for the answer any more."""


async def unless_gone(work: Coroutine[Any, Any, T], receive: Receive) -> T:
    """What `work` returns; if the caller leaves before, `work` is cancelled and CallerGone raised."""
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


async def answer(admission: Admission, message: pb.GenerateRequest, origin: Origin) -> pb.GenerateResponse:
    """The whole answer."""
    call = await admission.admit(message, origin)
    try:
        return await call.response()
    finally:
        call.release()


class EventStream(Response):
    """Server-sent events, one per object that `render` makes of the call's messages, and `[DONE]` after the last."""

    def __init__(self, call: Call, render: Render, stall_seconds: float) -> None:
        super().__init__(media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        del self.headers["content-length"]  # nobody knows it yet
        self._call, self._render, self._stall_seconds = call, render, stall_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Write until the end, or until the caller leaves or stalls; in each case nothing stays behind."""
        try:
            await unless_gone(self._write(send), receive)
        except CallerGone:
            logger.info("request %s: its caller left", self._call.stream.request_id)
        except TimeoutError:
            self._call.metrics.requests.stalls.inc()
            error = Aborted(f"the reader took no event for {self._stall_seconds:g} seconds")
            self._call.driver.end(self._call.stream, FinishReason.ABORTED, error)
        finally:
            self._call.release()

    async def _write(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async with aclosing(self._call.messages()) as messages:
            try:
                async for event in self._render(messages):
                    await self._event(send, json.dumps(event, ensure_ascii=False))
                await self._event(send, "[DONE]")
            except TimeoutError:
                raise
            except Exception as error:  # noqa: BLE001  # the status is out: whatever it is, an event must say so
                await self._event(send, json.dumps(_told(error).body()))
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _event(self, send: Send, data: str) -> None:
        async with asyncio.timeout(self._stall_seconds):
            await send({"type": "http.response.body", "body": f"data: {data}\n\n".encode(), "more_body": True})


def _told(error: Exception) -> HttpError:
    if isinstance(error, PilotfishError):
        return http_error(error)
    logger.error("an event could not be made", exc_info=error)
    return INTERNAL
