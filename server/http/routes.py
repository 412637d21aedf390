"""The routes that generate: `/generate` and OpenAI's two. They convert bodies to messages and messages to JSON."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, TypeAlias, TypeVar

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from engine.errors import InvalidRequest, PilotfishError
from pilotfish.v1 import generation_pb2 as pb
from server.admission.admission import Call
from server.admission.resume import EventIds
from server.http.agents import AgentBody
from server.http.bodies import WrongBody, read_body
from server.http.calls import (
    Answers,
    CallerGone,
    Calls,
    EventStream,
    Services,
    WholeAnswer,
    origin_of,
    unless_gone,
)
from server.http.errors import INTERNAL, HttpError, error_at
from server.http.native_answers import NativeAnswers
from server.http.openai.chat import ChatAnswers, fitted
from server.http.openai.text import TextAnswers
from server.http.requests import ParsedBody, continued
from server.http.types import ChatBody, CompletionBody, GenerateBody, GenerationFields

BodyT = TypeVar("BodyT", bound=GenerationFields)


AnswersTo: TypeAlias = Callable[[BodyT, pb.GenerateRequest, Call], Answers]  # to an admitted call


def add_generation(app: FastAPI, services: Services) -> None:
    """Add the routes, and handlers that return errors in OpenAI's format."""
    router, routes = APIRouter(), GeneratingRoutes(services)

    @router.post("/generate", response_model=None, openapi_extra=_schema(GenerateBody, "/generate"))
    async def generate(request: Request) -> Response:
        """Continue one prompt: return the text and its speed, or stream the tokens."""
        return await routes.respond(GenerateBody, lambda *_: NativeAnswers(), request)

    @router.post("/v1/completions", response_model=None, openapi_extra=_schema(CompletionBody, "/v1/completions"))
    async def completions(request: Request) -> Response:
        """Continue a prompt, in the format of OpenAI's completions."""
        return await routes.respond(CompletionBody, _texts, request)

    @router.post("/v1/chat/completions", response_model=None, openapi_extra=_schema(ChatBody, "/v1/chat/completions"))
    async def chat_completions(request: Request) -> Response:
        """Continue a conversation, in the format of OpenAI's chat completions."""
        return await routes.respond(ChatBody, _turns, request)

    app.include_router(router)
    _add_errors(app)


def _texts(body: CompletionBody, _: pb.GenerateRequest, call: Call) -> Answers:
    return TextAnswers.of(body, call.driver.model.named(body.model))


def _turns(body: ChatBody, message: pb.GenerateRequest, call: Call) -> Answers:
    return ChatAnswers.of(body, message, call.driver.model.named(body.model))


class GeneratingRoutes:
    """From the bytes of a body to one answer or a stream of events, in any format."""

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
        model, origin = self._driver().model, origin_of(request, body.timeout)
        after = request.headers.get("last-event-id")
        if after is not None and not isinstance(body, AgentBody):
            if not body.stream:
                raise InvalidRequest.of("Last-Event-ID", "continues a stream; it needs stream: true")
            read = continued(read, after, model.engine.config.max_n)
        read = fitted(read, body, model, continues=after is not None)

        def begun(calls: Calls) -> Answers:
            return answers_to(body, read.message, calls.calls[0])

        if not body.stream:
            return await unless_gone(WholeAnswer.of(self._admission, read, origin, begun), request.receive)
        calls = await unless_gone(Calls.admit(self._admission, read, origin), request.receive)
        ids, stall_seconds = EventIds(read.resume), self._stall_seconds
        return EventStream(calls, begun(calls), origin, stall_seconds, ids, has_ids=body.event_ids)

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
