"""The routes that generate: `/generate`, and OpenAI's two. Thin: a body becomes a message, and messages JSON."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException

from engine.errors import PilotfishError
from pilotfish.v1 import generation_pb2 as pb
from server import http_requests
from server.admission import Admission, Origin
from server.driver import Driver
from server.http_calls import CallerGone, EventStream, answer, unless_gone
from server.http_errors import INTERNAL, UNREADABLE, HttpError, http_error, invalid_body
from server.http_types import ChatBody, CompletionBody, GenerateBody, OpenAiBody
from server.openai_answers import ChatShape, Shape, TextShape


def add_generation(app: FastAPI, admission: Admission, driver: Callable[[], Driver], stall_seconds: float) -> None:
    """Add the routes, and errors in OpenAI's shape for all of them; `driver` raises until the model is loaded."""
    router, openai = APIRouter(), _OpenAi(admission, driver, stall_seconds)

    @router.post("/generate")
    async def generate(body: GenerateBody, request: Request) -> dict[str, Any]:
        """One prompt, one answer, and how fast it came."""
        work = answer(admission, http_requests.generate_request(body), _origin(request))
        return _figures(await unless_gone(work, request.receive))

    @router.post("/v1/completions", response_model=None)
    async def completions(body: CompletionBody, request: Request) -> Response:
        """As OpenAI's clients call it."""
        return await openai.respond(body, http_requests.completion_request(body), TextShape, request)

    @router.post("/v1/chat/completions", response_model=None)
    async def chat_completions(body: ChatBody, request: Request) -> Response:
        """As OpenAI's clients call it."""
        return await openai.respond(body, http_requests.chat_request(body), ChatShape, request)

    app.include_router(router)
    _add_errors(app)


class _OpenAi:
    """What both of OpenAI's routes do."""

    def __init__(self, admission: Admission, driver: Callable[[], Driver], stall_seconds: float) -> None:
        self._admission, self._driver, self._stall_seconds = admission, driver, stall_seconds

    async def respond(
        self, body: OpenAiBody, message: pb.GenerateRequest, kind: type[Shape], request: Request
    ) -> Response:
        """One answer, or a stream of events; a refusal is raised before anything is sent."""
        model, origin = self._driver().model, _origin(request)
        shape = kind(model.name, model.codec, include_usage=body.stream_options.include_usage)
        if not body.stream:
            return JSONResponse(
                shape.answer(await unless_gone(answer(self._admission, message, origin), request.receive))
            )
        call = await unless_gone(self._admission.admit(message, origin), request.receive)
        return EventStream(call, shape.events, self._stall_seconds)


def _origin(request: Request) -> Origin:
    return Origin(request.scope["caller"], headers=dict(request.headers))


def _figures(response: pb.GenerateResponse) -> dict[str, Any]:
    (output,) = response.outputs
    end = output.finished
    seconds = end.timing.total_seconds - end.timing.queue_seconds
    return {
        "generated_text": output.text,
        "tokens_per_second": end.usage.completion_tokens / seconds if seconds > 0 else 0.0,
        "avg_tokens_per_jump": end.speculation_stats.acceptance_length or 1.0,  # without drafts: one at a time
        "latency_ms": 1000 * end.timing.total_seconds,
    }


def _add_errors(app: FastAPI) -> None:
    @app.exception_handler(PilotfishError)
    async def refused(_: Request, error: PilotfishError) -> JSONResponse:
        return http_error(error).response()

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> JSONResponse:
        return invalid_body(error.errors()).response()

    @app.exception_handler(HTTPException)
    async def unknown(_: Request, error: HTTPException) -> JSONResponse:
        if error.status_code == 400:  # the framework's word for JSON that Python gave up on
            return UNREADABLE.response()
        return HttpError(error.status_code, "invalid_request_error", "http", str(error.detail)).response()

    @app.exception_handler(CallerGone)
    async def gone(_: Request, __: CallerGone) -> Response:
        return Response(status_code=499)  # nobody reads it

    @app.exception_handler(Exception)
    async def failed(_: Request, __: Exception) -> JSONResponse:
        return INTERNAL.response()  # the server logs it, with its trace
