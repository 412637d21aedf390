"""One request of an agent: from the bytes of its body to one answer or a stream of events."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Generic, TypeVar

from fastapi import Request
from fastapi.responses import Response
from pydantic import BaseModel, ValidationError
from starlette.types import Send

from engine.errors import InvalidRequest, Violation, shown
from pilotfish.v1 import generation_pb2 as pb
from server.admission.admission import Call, Origin
from server.admission.resume import EventIds
from server.admission.stalls import Writes
from server.http.agents.answers import AgentAnswer, events_of, whole_of
from server.http.agents.fields import AgentBody, Json, without_tags
from server.http.bodies import MAX_ERRORS, read_json
from server.http.calls import Calls, EventStream, Services, WholeAnswer, origin_of, unless_gone, write_text
from server.http.errors import HttpError, violations
from server.http.pieces import CallReader
from server.http.requests import ParsedBody
from server.model import ServedModel


class NamedEventStream(EventStream):
    """Server-sent events with names (`event: TYPE`), without ids. Nothing follows the answer's own last event."""

    last = ""

    def __init__(
        self, calls: Calls, answer: AgentAnswer, reader: CallReader, origin: Origin, stall_seconds: float
    ) -> None:
        render = partial(events_of, answer, reader)
        super().__init__(calls, render, origin, stall_seconds, EventIds(), has_ids=False)
        self._answer = answer

    async def _write_events(self, send: Send, events: list[Json], writes: Writes) -> None:
        with writes:
            await write_text(send, _text(events))

    def _failure(self, error: HttpError) -> str:
        return _text(self._answer.fail(error))


def _text(events: list[Json]) -> str:
    return "".join(f"event: {event['type']}\ndata: {json.dumps(event, ensure_ascii=False)}\n\n" for event in events)


BodyT = TypeVar("BodyT", bound=AgentBody)
FieldsT = TypeVar("FieldsT", bound=BaseModel)


class AgentRoutes(Generic[BodyT]):
    """Answers requests of one protocol.

    Args:
        kind: the body of its requests.
        convert: makes a message of a body.
        answer: makes the answer to an admitted body.
    """

    def __init__(
        self, kind: type[BodyT], convert: Callable[[BodyT, ServedModel], pb.GenerateRequest],
        answer: Callable[[BodyT, Call], AgentAnswer], services: Services,
    ) -> None:  # fmt: skip
        self._kind, self._convert, self._answer = kind, convert, answer
        self._admission, self._driver, self._slow, self._stall_seconds = services

    async def respond(self, request: Request) -> Response:
        """Return one answer or a stream of events. If the request is refused, raise before anything is sent."""
        data = await request.body()
        async with self._slow.turn(len(data)):
            body, message = await self._read(data, request)
            return await self._respond(body, message, request)

    async def _respond(self, body: BodyT, message: pb.GenerateRequest, request: Request) -> Response:
        origin = origin_of(request, body.timeout)
        wrong, after = list(body.conflicts()), request.headers.get("last-event-id")
        if after is not None:
            wrong.append(Violation("Last-Event-ID", f"is {shown(after)}; a stream of this route cannot be continued"))
        read = ParsedBody(message, tuple(wrong), body.timeout, called=body.called)

        def begun(calls: Calls) -> tuple[AgentAnswer, CallReader]:
            (call,) = calls.calls
            return self._answer(body, call), CallReader.of(message.messages, call.driver.model.format)

        async def whole(calls: Calls, responses: list[pb.GenerateResponse]) -> Json:
            return await whole_of(*begun(calls), *responses)

        with read.naming():
            if not body.stream:
                return await unless_gone(WholeAnswer.of(self._admission, read, origin, whole), request.receive)
            calls = await unless_gone(Calls.admit(self._admission, read, origin), request.receive)
        return NamedEventStream(calls, *begun(calls), origin, self._stall_seconds)

    async def _read(self, data: bytes, request: Request) -> tuple[BodyT, pb.GenerateRequest]:
        """Read the body. A refusal is counted like those of admission."""
        model = self._driver().model
        try:
            return await self._slow.run(self.read, data, request.headers.get("content-type", ""), model)
        except InvalidRequest as invalid:
            await self._admission.admit(pb.GenerateRequest(), origin_of(request, None), invalid.violations)
        raise AssertionError("a request with known violations was admitted")

    def read(self, data: bytes, content_type: str, model: ServedModel) -> tuple[BodyT, pb.GenerateRequest]:
        """Return the fields of a body, and the message that they make."""
        body = fields_of(self._kind, data, content_type)
        return body, self._convert(body, model)


def fields_of(kind: type[FieldsT], data: bytes, content_type: str) -> FieldsT:
    """Return the fields of a body; InvalidRequest with all that is wrong with them."""
    try:
        return kind.model_validate(read_json(data, content_type))
    except ValidationError as error:
        wrong: tuple[Violation, ...] = violations(
            [
                {**about, "loc": ("body", *without_tags(about["loc"]))}
                for about in error.errors(include_url=False)[:MAX_ERRORS]
            ]
        )
    raise InvalidRequest(wrong)
