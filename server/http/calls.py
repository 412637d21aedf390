"""One call over HTTP: an answer or an event stream, until the caller disconnects. Knows no format of answers.

Long lists of an answer are made and encoded in parts, so that others have their turns.
"""

from __future__ import annotations

import asyncio
import logging
import math
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Any, NamedTuple, NoReturn, TypeVar

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from engine.errors import PilotfishError
from engine.types import TokenEvent
from server.admission.admission import Admission, Origin
from server.admission.slow_work import SlowWork
from server.admission.stalls import Writes, stall_limit
from server.driver import Driver
from server.errors import Aborted, DeadlinePassed
from server.http.errors import INTERNAL, HttpError, http_error
from server.http.event_ids import EventIds
from server.http.gateway import STALLED
from server.http.requests import ParsedBody
from server.model import ServedModel
from server.streams.stream import OutputStream

logger = logging.getLogger(__name__)

T = TypeVar("T")
Json = dict[str, Any]
Events = AsyncIterator[TokenEvent]

MAX_AT_ONCE = 100  # entries of a long list that are made before others have a turn


class Services(NamedTuple):
    """What the routes work with that take prompts."""

    admission: Admission
    driver: Callable[[], Driver]  # raises until the model is loaded
    slow: SlowWork
    stall_seconds: float


class Answers(ABC):
    """Conversion of a stream's events to the JSON of one format, as a whole answer and as server-sent events.

    One instance per call, made of the body and the streams that were admitted for its prompts.
    """

    last = b"data: [DONE]\n\n"  # of a stream
    are_named = False  # whether an event has the name of its type

    def __init__(self, read: ParsedBody[Any], streams: Sequence[OutputStream], model: ServedModel) -> None:
        self._request_id, self._model = streams[0].own_id, streams[0].request.model

    @abstractmethod
    async def answer(self, outputs: Sequence[TokenEvent]) -> Json:
        """Return the whole answer, made of all outputs in the order of their indices, each as one event."""

    @abstractmethod
    def events(self, events: Events) -> AsyncIterator[list[Json]]:
        """Yield the server-sent events of each event."""

    def failure(self, error: HttpError) -> list[Json]:
        """Return the last events of a stream that fails."""
        return [error.body()]


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
        await _cancelled([working, leaving])


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


async def each(outputs: Iterable[TokenEvent]) -> Events:
    """Yield whole outputs as the events of a stream."""
    for output in outputs:
        yield output


class Calls:
    """The streams of one body, one for each of its prompts. Their outputs are numbered in the order of the prompts."""

    def __init__(self, admission: Admission, streams: Sequence[OutputStream]) -> None:
        self.admission, self.streams = admission, tuple(streams)

    @classmethod
    async def admit(cls, admission: Admission, read: ParsedBody[Any], origin: Origin) -> Calls:
        """Admit a request for each prompt, or none. The function that gets the calls has to release them."""
        admitted = list[OutputStream]()
        try:
            async with in_time(origin):
                for i, reader in enumerate(read.readers):
                    with read.naming(i):
                        admitted.append(await admission.admit(reader, origin, read.request.sampling.n))
        except BaseException:
            cls(admission, admitted).end(Aborted("another prompt of the same request was refused"))
            cls(admission, admitted).release()
            raise
        return cls(admission, admitted)

    async def outputs(self) -> list[TokenEvent]:
        """Wait for the ends and return all outputs, each as one event. The first error ends the wait."""
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

    def end(self, error: PilotfishError) -> None:
        """End all streams that have not ended yet."""
        self.admission.abort(self.streams, error)

    def release(self, *, late: bool = False) -> None:
        """End the calls after their reader has gone; see `OutputStream.release`."""
        for stream in self.streams:
            stream.release(late=late)


async def merged(sources: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[tuple[int, T], None]:
    """Yield what the sources yield, each with the number of its source. One is taken in advance from each."""
    taken: asyncio.Queue[tuple[int, T | Exception | None]] = asyncio.Queue(maxsize=1)

    async def take(number: int, source: AsyncGenerator[T, None]) -> None:
        try:
            async with aclosing(source):
                async for value in source:
                    await taken.put((number, value))
            await taken.put((number, None))
        except Exception as error:  # noqa: BLE001  # it is raised again where the values are read
            await taken.put((number, error))

    tasks = [asyncio.create_task(take(number, source)) for number, source in enumerate(sources)]
    try:
        unfinished = len(tasks)
        while unfinished:
            number, value = await taken.get()
            if isinstance(value, Exception):
                raise value
            if value is None:
                unfinished -= 1
            else:
                yield number, value
    finally:
        await _cancelled(tasks)


async def _cancelled(tasks: Sequence[asyncio.Future[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class WholeAnswer(Response):
    """The JSON of a whole response. Its call is released when it is written, so an answer nobody reads still counts."""

    def __init__(self, calls: Calls, pieces: list[bytes]) -> None:
        length = str(sum(map(len, pieces)))
        super().__init__(media_type="application/json", headers={"content-length": length})
        self._calls, self._pieces = calls, pieces

    @classmethod
    async def of(cls, calls: Calls, answers: Answers, origin: Origin) -> WholeAnswer:
        """Wait for the whole outputs, and encode the answer."""
        try:
            async with in_time(origin):
                answer = await answers.answer(await calls.outputs())
            return cls(calls, [piece async for piece in in_turns(json_parts(answer))])
        except BaseException:
            calls.release(late=origin.remaining() <= 0)
            raise

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Write the pieces, each when the connection has taken those before; then release the call."""
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            for i, piece in enumerate(self._pieces, 1):
                await send({"type": "http.response.body", "body": piece, "more_body": i < len(self._pieces)})
        finally:
            self._calls.release()


class EventStream(Response):
    """Server-sent events: those that `answers` makes of the streams' events, then its last one.

    With `has_ids`, the last one of each event has an id, with which the stream can be continued after it. Events that
    the caller received of an interrupted stream are not sent again; without `ids` there are none.
    """

    def __init__(
        self, calls: Calls, answers: Answers, origin: Origin, stall_seconds: float, ids: EventIds | None, *,
        has_ids: bool,
    ) -> None:  # fmt: skip
        super().__init__(media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        del self.headers["content-length"]  # the length is not known yet
        self._calls, self._answers, self._origin, self._stall_seconds = calls, answers, origin, stall_seconds
        self._ids, self._has_ids, self._is_known = ids, has_ids, False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Write to the end, or until the caller disconnects, stalls or passes the deadline; then release the call."""
        try:
            await unless_gone(self._write(send), receive)
        except CallerGone:
            if scope.get("state", {}).get(STALLED):
                self._end_as_stalled()
            else:
                logger.info("request %s: the caller has disconnected", self._calls.streams[0].request_id)
        except TimeoutError:
            self._end_as_stalled()
        finally:
            self._calls.release(late=self._origin.remaining() <= 0)

    def _end_as_stalled(self) -> None:
        problem = f"the reader took no event for {self._stall_seconds:g} seconds"
        self._calls.admission.stalled(self._calls.streams, problem)

    async def _write(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async with aclosing(self._calls.events()) as events, stall_limit(self._stall_seconds) as writes:
            try:
                async with in_time(self._origin):
                    observed = events if self._ids is None else self._observed(events, self._ids)
                    async for made in self._answers.events(observed):
                        await self._write_events(send, made, writes)
                last = self._answers.last
            except Exception as error:  # noqa: BLE001  # the status is sent already, so an event must report the error
                last = b"".join(self._parts(self._answers.failure(_reported(error))))
            with writes:
                await send({"type": "http.response.body", "body": last, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _write_events(self, send: Send, events: list[Json], writes: Writes) -> None:
        """Write events at once; those with a long list in pieces, each with its own limit of time."""
        event_id = self._ids.newest if self._ids is not None and self._has_ids else ""
        async with aclosing(in_turns(self._parts(() if self._is_known else events, event_id))) as pieces:
            async for piece in pieces:
                with writes:
                    await send({"type": "http.response.body", "body": piece, "more_body": True})

    def _parts(self, events: Sequence[Json], event_id: str = "") -> Iterator[bytes]:
        for event in events:
            name = event["type"] if self._answers.are_named else ""
            yield from event_parts(event, name, event_id if event is events[-1] else "")

    async def _observed(self, events: Events, ids: EventIds) -> Events:
        """Yield the events; note of each, before it is written, its id and whether the caller has received it."""
        async for event in events:
            self._is_known = ids.observe(event)
            yield event
        self._is_known = False  # what follows, such as the usage, is of no event


def _reported(error: Exception) -> HttpError:
    """Return the error as the reader of a stream gets it."""
    if isinstance(error, PilotfishError):
        return http_error(error)
    logger.error("an event could not be made", exc_info=error)
    return INTERNAL


MIN_PIECE = 64 << 10  # bytes; smaller parts are joined
LARGE_PART = 4 << 10  # bytes; after it others have a turn


class LongList:
    """A list that is made when it is encoded: `make(start, stop)` returns its entries of a half-open range.

    At most `part` entries are made at once. (Not a dataclass, which the encoder would encode by itself.)
    """

    def __init__(self, length: int, make: Callable[[int, int], list[Any]], part: int) -> None:
        self.length, self.make, self.part = length, make, part

    def parts(self) -> Iterator[list[Any]]:
        """Yield the entries in parts; the last may be smaller."""
        for start in range(0, self.length, self.part):
            yield self.make(start, min(start + self.part, self.length))


def list_of(length: int, make: Callable[[int, int], list[Any]], part: int = MAX_AT_ONCE) -> list[Any] | LongList:
    """Return a list, which is a long one if it has more than one part."""
    return make(0, length) if length <= part else LongList(length, make, part)


class HasLongList(Exception):  # an event, so its name has no suffix `Error`
    """Expected: a value cannot be encoded in one piece."""


def refuse(value: object) -> NoReturn:
    """`enc_hook` of an encoder: refuse long lists, and what is no JSON at all."""
    if isinstance(value, LongList):
        raise HasLongList
    raise TypeError(f"{type(value).__name__} is no JSON")


def json_parts(value: Any) -> Iterator[bytes]:
    """Yield the JSON of `value` in one part if it has no long list, else the parts of what it consists of."""
    try:
        yield _dumped(value)
        return
    except HasLongList:
        pass
    if isinstance(value, dict):
        yield b"{"
        for i, (name, entry) in enumerate(value.items()):
            yield b"%b%b:" % (b"," if i else b"", _dumped(name))
            yield from json_parts(entry)
        yield b"}"
        return
    yield b"["
    for i, some in enumerate(value.parts() if isinstance(value, LongList) else ([entry] for entry in value)):
        if i:
            yield b","
        yield from _entries(some)
    yield b"]"


def _entries(some: list[Any]) -> Iterator[bytes]:
    try:
        yield _dumped(some)[1:-1]
    except HasLongList:
        for i, entry in enumerate(some):
            if i:
                yield b","
            yield from json_parts(entry)


_dumped = msgspec.json.Encoder(enc_hook=refuse).encode


def event_parts(event: Json, name: str = "", event_id: str = "") -> Iterator[bytes]:
    """Yield the parts of a server-sent event."""
    head = f"id: {event_id}\n" if event_id else ""
    yield f"{head}event: {name}\ndata: ".encode() if name else f"{head}data: ".encode()
    yield from json_parts(event)
    yield b"\n\n"


async def in_turns(parts: Iterable[bytes]) -> AsyncGenerator[bytes, None]:
    """Yield the parts, small ones joined; others have their turns after each part of some size and after each piece."""
    joined, size = list[bytes](), 0
    for part in parts:
        joined.append(part)
        size += len(part)
        if size >= MIN_PIECE:
            yield b"".join(joined)
            joined, size = [], 0
        if not size or len(part) >= LARGE_PART:
            await asyncio.sleep(0)
    if joined:
        yield b"".join(joined)
