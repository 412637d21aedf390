"""Routes that generate, that answer with the tokens of a prompt, and that load adapters; and our own answers."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from functools import cache
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from pydantic import BaseModel, ConfigDict
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from engine.errors import InvalidRequest, PilotfishError, Violation
from pilotfish.v1 import generation_pb2 as pb
from server.admission.admission import Call
from server.admission.resume import EventIds
from server.admission.security import AdapterCalls
from server.driver import Driver
from server.http.agents import AgentBody
from server.http.calls import (
    Answers,
    CallerGone,
    Calls,
    EventStream,
    Messages,
    Services,
    WholeAnswer,
    origin_of,
    unless_gone,
)
from server.http.errors import INTERNAL, HttpError, error_at
from server.http.openai.chat import ChatAnswers, fitted
from server.http.openai.text import TextAnswers
from server.http.requests import ParsedBody, WrongBody, continued, fields_of, read_body
from server.http.types import ChatBody, CompletionBody, GenerateBody, GenerationFields, OpenAiBody

BodyT = TypeVar("BodyT", bound=GenerationFields)
RenderedT = TypeVar("RenderedT", bound=OpenAiBody)


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

    async def render(self, kind: type[RenderedT], prefix: str, request: Request) -> Response:
        """Return what a prompt becomes, of several each, or raise the error that the same request would get."""
        data, about = await request.body(), request.headers.get("content-type", "")
        with self._admission.conversion(request.scope["caller"]):
            async with self._slow.turn(len(data)):
                try:
                    _, read = await self._slow.run(read_body, kind, data, about)
                except WrongBody as error:
                    read = error.read
                with read.naming():
                    found = [
                        await self._rendered(message, prefix, read.wrong) for message in (read.message, *read.others)
                    ]
        text = await self._slow.run(json.dumps, found if kind is CompletionBody else found[0], is_slow=True)
        return Response(text, media_type="application/json")

    async def _rendered(self, message: pb.GenerateRequest, prefix: str, wrong: tuple[Violation, ...]) -> dict[str, Any]:
        wanted = await self._admission.wanted(message, wrong, self._driver().model)
        return {
            "request_id": f"{prefix}-{wanted.request_id}",
            "model": wanted.model,
            "token_ids": wanted.request.token_ids,
            "features": None,  # of images, which no model here sees
            "cache_salt": message.cache_salt if message.HasField("cache_salt") else None,
            "priority": message.priority,
        }


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


Json = dict[str, Any]

FINISH_REASONS = {
    pb.FINISH_REASON_STOP: "stop",
    pb.FINISH_REASON_LENGTH: "length",
    pb.FINISH_REASON_ABORTED: "abort",
}


class NativeAnswers(Answers):
    """Answers of `/generate`."""

    async def answer(self, responses: Sequence[pb.GenerateResponse]) -> Json:
        (response,) = responses
        (output,) = response.outputs
        return {"generated_text": output.text} | _figures(output.finished)

    async def events(self, messages: Messages) -> AsyncIterator[list[Json]]:
        async for message in messages:
            yield [_figures(message.finished) if message.HasField("finished") else _piece(message.delta)]


def _piece(delta: pb.TokenDelta) -> Json:
    """Return an event. Text that was held back until the end belongs to no single token and is only in `text`."""
    borders = accumulate(delta.text_lengths, initial=0)
    texts = [delta.text[start:stop] for start, stop in pairwise(borders)]
    tokens = [
        {"id": token, "text": text, "from_draft": drafted}
        for token, text, drafted in zip(delta.token_ids, texts, delta.from_draft, strict=True)
    ]
    return {"text": delta.text, "tokens": tokens}


def _figures(end: pb.Finished) -> Json:
    usage, stats, timing = end.usage, end.speculation_stats, end.timing
    seconds = timing.total_seconds - timing.queue_seconds
    first = timing.time_to_first_token_seconds if timing.HasField("time_to_first_token_seconds") else None
    return {
        "finish_reason": FINISH_REASONS.get(end.finish_reason, "abort"),
        "tokens_per_second": usage.completion_tokens / seconds if seconds > 0 else 0.0,
        "avg_tokens_per_jump": stats.acceptance_length or 1.0,  # without drafts each round gives one token
        "latency_ms": 1000 * timing.total_seconds,
        "time_to_first_token_ms": None if first is None else 1000 * first,
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "drafted": stats.drafted,
        "accepted": stats.accepted,
        "gain": stats.gain_ratio,
        "seed": end.seed,
    }


def add_render(app: FastAPI, services: Services) -> None:
    """Add the routes. Their bodies are those of the routes that generate."""
    router, routes = APIRouter(), GeneratingRoutes(services)

    @router.post("/v1/completions/render", response_model=None, openapi_extra=_body_of("/v1/completions"))
    async def completions(request: Request) -> Response:
        """Return the tokens of each prompt, as a list of objects."""
        return await unless_gone(routes.render(CompletionBody, "cmpl", request), request.receive)

    @router.post("/v1/chat/completions/render", response_model=None, openapi_extra=_body_of("/v1/chat/completions"))
    async def chat_completions(request: Request) -> Response:
        """Return the tokens of the conversation as the chat template writes it."""
        return await unless_gone(routes.render(ChatBody, "chatcmpl", request), request.receive)

    app.include_router(router)


def _body_of(path: str) -> dict[str, Any]:
    """Refer to the body of another route, for `/openapi.json`."""
    return {"requestBody": {"$ref": f"#/paths/{path.replace('/', '~1')}/post/requestBody"}}


_FIELDS = {"name": "lora_name", "path": "lora_path"}  # of the protocol, as the bodies call them


class UnloadAdapterBody(BaseModel):
    """The body of an unload."""

    model_config = ConfigDict(extra="forbid", strict=True)

    lora_name: str


class LoadAdapterBody(UnloadAdapterBody):
    """The body of a load."""

    lora_path: str


def add_adapters(app: FastAPI, driver: Callable[[], Driver], root: Path | None) -> None:
    """Add the routes; `driver` raises until the model is loaded, and `root` is the option `adapter_root`."""
    router, calls = APIRouter(), AdapterCalls(driver, root)

    @router.post("/v1/load_lora_adapter", response_model=None)
    async def load(request: Request) -> Response:
        """Load an adapter from a folder of the server's machine."""
        calls.require_allowed(request.scope["caller"])  # before anything is read
        body = fields_of(LoadAdapterBody, await request.body(), request.headers.get("content-type", ""))
        try:
            await calls.load(body.lora_name, body.lora_path, request.scope["caller"])
        except InvalidRequest as invalid:
            wrong = (replace(v, field=_FIELDS.get(v.field, v.field)) for v in invalid.violations)
            raise InvalidRequest(wrong) from None
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")

    @router.post("/v1/unload_lora_adapter", response_model=None)
    async def unload(request: Request) -> Response:
        """Unload an adapter as soon as no live request uses it."""
        calls.require_allowed(request.scope["caller"])
        body = fields_of(UnloadAdapterBody, await request.body(), request.headers.get("content-type", ""))
        calls.unload(body.lora_name, request.scope["caller"])
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")

    app.include_router(router)
