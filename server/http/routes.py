"""The routes that generate: `/generate` and OpenAI's two. They convert bodies to messages and messages to JSON."""

from __future__ import annotations

import math
import time
from collections.abc import AsyncIterator, Callable
from typing import Any, Protocol

from fastapi import APIRouter, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException

from engine.errors import InvalidRequest, PilotfishError
from pilotfish.v1 import generation_pb2 as pb
from server.admission.admission import Admission, Origin
from server.admission.resume import EventIds
from server.driver import Driver
from server.http import native_answers
from server.http.calls import CallerGone, EventStream, admit, answer, unless_gone
from server.http.errors import INTERNAL, UNREADABLE, HttpError, http_error, violations
from server.http.openai_answers import AnswerFormat, ChatAnswers, TextAnswers
from server.http.requests import asked, continued, rest
from server.http.types import ChatBody, CompletionBody, GenerateBody, GenerationFields, OpenAiBody

_BODIES: dict[str, type[GenerationFields]] = {
    "/generate": GenerateBody,
    "/v1/completions": CompletionBody,
    "/v1/chat/completions": ChatBody,
}


class Answers(Protocol):
    """Conversion of messages to JSON, as a whole answer and as a stream."""

    def answer(self, response: pb.GenerateResponse, /) -> dict[str, Any]:
        """Return the whole answer."""
        ...

    def events(self, messages: AsyncIterator[pb.GenerateStreamResponse], /) -> AsyncIterator[list[dict[str, Any]]]:
        """Yield the events of each message of a stream."""
        ...


def add_generation(app: FastAPI, admission: Admission, driver: Callable[[], Driver], stall_seconds: float) -> None:
    """Add the routes, and handlers that return errors in OpenAI's format; `driver` raises until the model is loaded."""
    router, door = APIRouter(), _Routes(admission, driver, stall_seconds)

    @router.post("/generate", response_model=None)
    async def generate(body: GenerateBody, request: Request) -> Response:
        """Continue one prompt: return the text and its speed, or stream the tokens."""
        return await door.respond(body, native_answers, request)

    @router.post("/v1/completions", response_model=None)
    async def completions(body: CompletionBody, request: Request) -> Response:
        """Continue a prompt, in the format of OpenAI's completions."""
        return await door.respond(body, door.shape(TextAnswers, body), request)

    @router.post("/v1/chat/completions", response_model=None)
    async def chat_completions(body: ChatBody, request: Request) -> Response:
        """Continue a conversation, in the format of OpenAI's chat completions."""
        return await door.respond(body, door.shape(ChatAnswers, body), request)

    app.include_router(router)
    _add_errors(app, door)


class _Routes:
    """The common part of all routes."""

    def __init__(self, admission: Admission, driver: Callable[[], Driver], stall_seconds: float) -> None:
        self._admission, self._driver, self._stall_seconds = admission, driver, stall_seconds

    def shape(self, kind: type[AnswerFormat], body: OpenAiBody) -> AnswerFormat:
        """Create the format of OpenAI's answers to `body`."""
        model = self._driver().model
        return kind(model.name, model.codec, include_usage=body.stream_options.include_usage)

    async def respond(self, body: GenerationFields, answers: Answers, request: Request) -> Response:
        """Return one answer or a stream of events. If the request is refused, raise before anything is sent."""
        read, origin = asked(body), _origin(request, body.timeout)
        after = request.headers.get("last-event-id")
        if after is not None:
            if not body.stream:
                raise InvalidRequest.of("Last-Event-ID", "continues a stream; it needs stream: true")
            read = continued(read, after)
        if not body.stream:
            work = answer(self._admission, read, origin)
            return JSONResponse(answers.answer(await unless_gone(work, request.receive)))
        call = await unless_gone(admit(self._admission, read, origin), request.receive)
        return EventStream(call, answers.events, origin, self._stall_seconds, EventIds(read.resume), body.event_ids)

    async def refuse(self, error: RequestValidationError, request: Request) -> PilotfishError:
        """Return the error for a body with wrong types; it also lists violations in the other fields."""
        wrong = violations(error.errors())
        faulty = {str(part) for found in error.errors() for part in found["loc"][1:2]}
        read = rest(_BODIES[request.scope["path"]], error.body, faulty)
        if read is None:
            return InvalidRequest(wrong)
        try:
            await self._admission.admit(read.message, _origin(request, read.timeout), (*wrong, *read.wrong))
        except PilotfishError as refusal:
            return refusal
        raise AssertionError("a request with known violations was admitted")


def _origin(request: Request, timeout: float | None) -> Origin:
    ends = math.inf if timeout is None else time.monotonic() + timeout
    return Origin(request.scope["caller"], lambda: ends - time.monotonic(), dict(request.headers))


def _add_errors(app: FastAPI, door: _Routes) -> None:
    @app.exception_handler(PilotfishError)
    async def refused(_: Request, error: PilotfishError) -> JSONResponse:
        return http_error(error).response()

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        return http_error(await door.refuse(error, request)).response()

    @app.exception_handler(HTTPException)
    async def unknown(_: Request, error: HTTPException) -> JSONResponse:
        if error.status_code == 400:  # the framework uses 400 for JSON that Python cannot parse
            return UNREADABLE.response()
        return HttpError(error.status_code, "invalid_request_error", "http", str(error.detail)).response()

    @app.exception_handler(CallerGone)
    async def gone(_: Request, __: CallerGone) -> Response:
        return Response(status_code=499)  # the caller has disconnected

    @app.exception_handler(Exception)
    async def failed(_: Request, __: Exception) -> JSONResponse:
        return INTERNAL.response()  # uvicorn logs the exception with its traceback
