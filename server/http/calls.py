"""One call over HTTP: an answer or an event stream, until the caller disconnects. Independent of the format of answers.

Long lists of an answer are built and encoded in parts, so that other tasks can run.
"""

from __future__ import annotations

import asyncio
import logging
import math
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Any, TypeVar

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from pilotfish.engine.errors import PilotfishError
from pilotfish.engine.types import TokenEvent
from pilotfish.server.admission.admission import Admission, Remaining
from pilotfish.server.admission.security import Caller
from pilotfish.server.admission.stalls import Writes, stall_limit
from pilotfish.server.errors import Aborted, DeadlinePassed
from pilotfish.server.http.bodies import ParsedBody
from pilotfish.server.http.errors import INTERNAL, HttpError, http_error
from pilotfish.server.http.event_ids import EventIds
from pilotfish.server.http.gateway import STALLED
from pilotfish.server.model import ServedModel
from pilotfish.server.streams.stream import OutputStream

logger = logging.getLogger(__name__)

T = TypeVar("T")
Json = dict[str, Any]
Events = AsyncIterator[TokenEvent]

MAX_AT_ONCE = 100  # entries of a long list that are built before other tasks run


class Answers(ABC):
    """Converts a stream's events to the JSON of one format, as a whole answer and as server-sent events.

    One instance per call, built from the body and the streams admitted for its prompts.
    """

    last = b"data: [DONE]\n\n"  # of a stream
    are_named = False  # whether an event has the name of its type

    def __init__(self, read: ParsedBody[Any], streams: Sequence[OutputStream], model: ServedModel) -> None:
        self._request_id, self._model = streams[0].own_id, streams[0].request.model

    @abstractmethod
    async def answer(self, outputs: Sequence[TokenEvent]) -> Json:
        """Return the whole answer; `outputs`: each as one event, ordered by index."""

    @abstractmethod
    def events(self, events: Events) -> AsyncIterator[list[Json]]:
        """Yield the server-sent events of each event."""

    def failure(self, error: HttpError) -> list[Json]:
        """Return the last events of a stream that fails."""
        return [error.body()]


class CallerGone(Exception):  # an event, so its name has no suffix `Error`
    """Expected: the caller has disconnected."""


async def unless_gone(work: Coroutine[Any, Any, T], receive: Receive) -> T:
    """Return the result of `work`. If the caller disconnects first, cancel `work` and raise CallerGone."""
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise CallerGone
        return working.result()
    finally:
        await _cancelled([working, leaving])


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


@asynccontextmanager
async def in_time(remaining: Remaining) -> AsyncIterator[None]:
    """Cancel the body of the `with` statement and raise DeadlinePassed when the caller's deadline passes."""
    seconds = remaining()
    limit = asyncio.timeout(None if seconds == math.inf else seconds)
    try:
        async with limit:
            yield
    except TimeoutError:
        if limit.expired():
            raise DeadlinePassed("the deadline passed before the end") from None
        raise  # another timeout inside


class Calls:
    """The streams of one body, one for each of its prompts. Their outputs are numbered in the order of the prompts."""

    def __init__(self, admission: Admission, streams: list[OutputStream], remaining: Remaining) -> None:
        self.admission, self.streams, self.remaining = admission, streams, remaining

    @classmethod
    async def admit(
        cls, admission: Admission, read: ParsedBody[Any], caller: Caller, remaining: Remaining,
        headers: Mapping[str, str],
    ) -> Calls:  # fmt: skip
        """Admit a request for each prompt, or none. The caller of this function must release the calls."""
        calls, n = cls(admission, [], remaining), read.request.sampling.n
        try:
            async with in_time(remaining):
                for i, reader in enumerate(read.readers):
                    with read.naming(i):
                        calls.streams.append(await admission.admit(reader, caller, remaining, headers, n))
        except BaseException:
            admission.abort(calls.streams, Aborted("another prompt of the same request was refused"))
            calls.release()
            raise
        return calls

    async def outputs(self) -> list[TokenEvent]:
        """Wait for all outputs and return each as one event. The first error ends the wait."""
        tasks = [asyncio.ensure_future(stream.read_all()) for stream in self.streams]
        try:
            return [
                self._numbered(i, event) for i, events in enumerate(await asyncio.gather(*tasks)) for event in events
            ]
        finally:
            await _cancelled(tasks)

    async def events(self) -> AsyncGenerator[TokenEvent, None]:
        """Yield the events of all streams."""
        if len(self.streams) == 1:
            async for event in self.streams[0].events():
                yield event
            return
        async with aclosing(merged([stream.events() for stream in self.streams])) as numbered:
            async for i, event in numbered:
                yield self._numbered(i, event)

    def _numbered(self, prompt: int, event: TokenEvent) -> TokenEvent:
        return event if not prompt else event._replace(index=event.index + prompt * self.streams[0].request.sampling.n)

    def release(self) -> None:
        """End the calls after their reader is gone; see `OutputStream.release`."""
        late = self.remaining() <= 0
        for stream in self.streams:
            stream.release(late=late)


async def merged(sources: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[tuple[int, T], None]:
    """Merge the sources: yield each item with the number of its source. One item per source is fetched in advance."""
    taking = {asyncio.ensure_future(anext(source)): number for number, source in enumerate(sources)}
    try:
        while taking:
            done, _ = await asyncio.wait(taking, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                number = taking.pop(task)
                try:
                    value = task.result()
                except StopAsyncIteration:
                    continue
                taking[asyncio.ensure_future(anext(sources[number]))] = number
                yield number, value
    finally:
        await _cancelled([*taking])
        for source in sources:
            await source.aclose()


async def _cancelled(tasks: Sequence[asyncio.Future[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


PIECE = 64 << 10  # bytes of an answer per write


class WholeAnswer(Response):
    """The JSON of a whole response. Its call is released when it is written, so an unread answer counts as live."""

    def __init__(self, calls: Calls, data: bytes) -> None:
        super().__init__(data, media_type="application/json")
        self._calls = calls

    @classmethod
    async def of(cls, calls: Calls, answers: Answers) -> WholeAnswer:
        """Wait for all outputs, and encode the answer."""
        try:
            async with in_time(calls.remaining):
                return cls(calls, encoded(await answers.answer(await calls.outputs())))
        except BaseException:
            calls.release()
            raise

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Write in pieces, with the connection's back-pressure; then release the call."""
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            for start in range(0, len(self.body), PIECE):
                piece, is_last = self.body[start : start + PIECE], start + PIECE >= len(self.body)
                await send({"type": "http.response.body", "body": piece, "more_body": not is_last})
        finally:
            self._calls.release()


class EventStream(Response):
    """Server-sent events: the streams' events as converted by `answers`, then its last one.

    With `has_ids`, the last SSE event of each stream event has an id from which the stream can be resumed. Events that
    the caller received before an interruption are not sent again; without `ids` there are none.
    """

    def __init__(
        self, calls: Calls, answers: Answers, stall_seconds: float, ids: EventIds | None, *, has_ids: bool
    ) -> None:
        super().__init__(media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        del self.headers["content-length"]  # the length is not known yet
        self._calls, self._answers, self._stall_seconds = calls, answers, stall_seconds
        self._ids, self._has_ids, self._is_known = ids, has_ids, False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Write until the end or a disconnect, a stall or the deadline; then release the call."""
        try:
            await unless_gone(self._write(send), receive)
        except (CallerGone, TimeoutError) as error:
            if isinstance(error, TimeoutError) or scope.get("state", {}).get(STALLED):
                problem = f"the client read nothing for {self._stall_seconds:g} seconds"
                self._calls.admission.stalled(self._calls.streams, problem)
            else:
                logger.info("request %s: the caller has disconnected", self._calls.streams[0].request_id)
        finally:
            self._calls.release()

    async def _write(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async with aclosing(self._calls.events()) as events, stall_limit(self._stall_seconds) as writes:
            try:
                async with in_time(self._calls.remaining):
                    observed = events if self._ids is None else self._observed(events, self._ids)
                    async for made in self._answers.events(observed):
                        event_id = self._ids.newest if self._ids is not None and self._has_ids else ""
                        if not self._is_known:
                            await _write_pieces(send, writes, self._encoded(made, event_id))
                last = self._answers.last
            except PilotfishError as error:  # the status line was already sent, so an event must report the error
                last = self._encoded(self._answers.failure(http_error(error)))
            except Exception:
                logger.exception("an event could not be encoded")
                last = self._encoded(self._answers.failure(INTERNAL))
            await _write_pieces(send, writes, last)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _encoded(self, events: Sequence[Json], event_id: str = "") -> bytes:
        """Encode events; the last one has the id, if any."""
        data = b""
        for event in events:
            identity = f"id: {event_id}\n" if event_id and event is events[-1] else ""
            name = f"event: {event['type']}\n" if self._answers.are_named else ""
            data += f"{identity}{name}data: ".encode() + encoded(event) + b"\n\n"
        return data

    async def _observed(self, events: Events, ids: EventIds) -> Events:
        """Yield the events. Before each is written, record its id and whether the caller has already received it."""
        async for event in events:
            self._is_known = ids.observe(event)
            yield event
        self._is_known = False  # later data, such as the usage, belongs to no event


async def _write_pieces(send: Send, writes: Writes, data: bytes) -> None:
    """Write data in pieces, each with its own time limit."""
    for start in range(0, len(data), PIECE):
        with writes:
            await send({"type": "http.response.body", "body": data[start : start + PIECE], "more_body": True})


encoded = msgspec.json.Encoder().encode


async def list_of(length: int, make: Callable[[int], Any]) -> list[Any] | msgspec.Raw:
    """Return the list of `make(i)` for each i below `length`.

    A long list is built and encoded in parts: other tasks run after each, and not all entries are in memory at once.
    """
    if length <= MAX_AT_ONCE:
        return [*map(make, range(length))]
    parts = []
    for start in range(0, length, MAX_AT_ONCE):
        parts.append(encoded([*map(make, range(start, min(start + MAX_AT_ONCE, length)))])[1:-1])
        await asyncio.sleep(0)
    return msgspec.Raw(b"[%b]" % b",".join(parts))
