"""The routes that generate: `/generate` and OpenAI's two. They convert bodies to messages and messages to JSON."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from functools import cache
from typing import Any, Protocol, TypeAlias, TypeVar

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from engine.errors import InvalidRequest, PilotfishError
from pilotfish.v1 import generation_pb2 as pb
from server.admission.resume import EventIds
from server.http import native_answers
from server.http.bodies import WrongBody, read_body
from server.http.calls import CallerGone, Calls, EventStream, Services, WholeAnswer, origin_of, unless_gone
from server.http.errors import INTERNAL, HttpError, error_at
from server.http.openai.chat import ChatAnswers, fitted
from server.http.openai.text import TextAnswers
from server.http.requests import ParsedBody, continued
from server.http.types import ChatBody, CompletionBody, GenerateBody, GenerationFields
from server.model import ServedModel

BodyT = TypeVar("BodyT", bound=GenerationFields)


class Answers(Protocol):
    """Conversion of messages to JSON, as a whole answer and as a stream."""

    async def answer(self, responses: list[pb.GenerateResponse], /) -> dict[str, Any]:
        """Return the whole answer, made of a response for each prompt."""
        ...

    def events(self, messages: AsyncIterator[pb.GenerateStreamResponse], /) -> AsyncIterator[list[dict[str, Any]]]:
        """Yield the events of each message of a stream."""
        ...


AnswersTo: TypeAlias = Callable[[BodyT, pb.GenerateRequest, ServedModel], Answers]


def add_generation(app: FastAPI, services: Services) -> None:
    """Add the routes, and handlers that return errors in OpenAI's format."""
    router, routes = APIRouter(), _Routes(services)

    @router.post("/generate", response_model=None, openapi_extra=_schema(GenerateBody, "/generate"))
    async def generate(request: Request) -> Response:
        """Continue one prompt: return the text and its speed, or stream the tokens."""
        return await routes.respond(GenerateBody, lambda *_: native_answers, request)

    @router.post("/v1/completions", response_model=None, openapi_extra=_schema(CompletionBody, "/v1/completions"))
    async def completions(request: Request) -> Response:
        """Continue a prompt, in the format of OpenAI's completions."""
        return await routes.respond(CompletionBody, TextAnswers.of, request)

    @router.post("/v1/chat/completions", response_model=None, openapi_extra=_schema(ChatBody, "/v1/chat/completions"))
    async def chat_completions(request: Request) -> Response:
        """Continue a conversation, in the format of OpenAI's chat completions."""
        return await routes.respond(ChatBody, ChatAnswers.of, request)

    app.include_router(router)
    _add_errors(app)


class _Routes:
    """The common part of all routes."""

    def __init__(self, services: Services) -> None:
        self._admission, self._driver, self._slow, self._stall_seconds = services

    async def respond(self, kind: type[BodyT], answers_to: AnswersTo[BodyT], request: Request) -> Response:
        """Return one answer or a stream of events. If the request is refused, raise before anything is sent."""
        data = await request.body()
        async with self._slow.turn(len(data)):
            body, read = await self._read(kind, data, request)
            with read.naming():
                return await self._respond(body, read, answers_to, request)

    async def _respond(self, body: BodyT, read: ParsedBody, answers_to: AnswersTo[BodyT], request: Request) -> Response:
        model = self._driver().model
        answers, origin = answers_to(body, read.message, model.named(body.model)), origin_of(request, body.timeout)
        after = request.headers.get("last-event-id")
        if after is not None:
            if not body.stream:
                raise InvalidRequest.of("Last-Event-ID", "continues a stream; it needs stream: true")
            read = continued(read, after, model.engine.config.max_n)
        if isinstance(body, ChatBody):
            read = fitted(read, body, model, continues=after is not None)
        if not body.stream:
            whole = WholeAnswer.of(self._admission, read, origin, lambda _, responses: answers.answer(responses))
            return await unless_gone(whole, request.receive)
        calls = await unless_gone(Calls.admit(self._admission, read, origin), request.receive)
        ids, stall_seconds = EventIds(read.resume), self._stall_seconds
        return EventStream(calls, answers.events, origin, stall_seconds, ids, has_ids=body.event_ids)

    async def _read(self, kind: type[BodyT], data: bytes, request: Request) -> tuple[BodyT, ParsedBody]:
        """Read the body. Raises the error that the request gets if fields of it are invalid."""
        about = request.headers.get("content-type", "")
        try:
            return await self._slow.run(read_body, kind, data, about)
        except WrongBody as error:
            read = error.read
        with read.naming():
            await self._admission.admit(read.message, origin_of(request, read.timeout), read.wrong)
        raise AssertionError("a request with known violations was admitted")


@cache  # always the same, and dearer than all else with which a server starts
def _schema(kind: type[GenerationFields], path: str) -> dict[str, Any]:
    """Describe the body of a path for `/openapi.json`; the parts that it refers to stand beside it."""
    route = path.replace("/", "~1")
    parts = f"#/paths/{route}/post/requestBody/content/application~1json/schema/$defs/{{model}}"
    schema = kind.model_json_schema(ref_template=parts)
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def _add_errors(app: FastAPI) -> None:
    @app.exception_handler(PilotfishError)
    async def refused(request: Request, error: PilotfishError) -> JSONResponse:
        return error_at(request.url.path, error).response()

    @app.exception_handler(HTTPException)
    async def unknown(request: Request, error: HTTPException) -> JSONResponse:
        told = HttpError(error.status_code, "invalid_request_error", "http", str(error.detail))
        response = error_at(request.url.path, told).response()
        allowed = (error.headers or {}).get("Allow")
        if allowed is not None:  # the route of GET answers HEAD, whether it says so or not
            response.headers["Allow"] = allowed if "HEAD" in allowed else allowed.replace("GET", "GET, HEAD")
        return response

    @app.exception_handler(CallerGone)
    @app.exception_handler(ClientDisconnect)
    async def gone(_: Request, __: Exception) -> Response:
        return Response(status_code=499)  # the caller has disconnected

    @app.exception_handler(Exception)
    async def failed(request: Request, _: Exception) -> JSONResponse:
        return error_at(request.url.path, INTERNAL).response()  # uvicorn logs the exception with its traceback
