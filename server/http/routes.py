"""The routes for generation in each format, for tokenization, and for adapters."""

from __future__ import annotations

import json
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeAlias

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from pilotfish.engine.errors import InvalidRequest, PilotfishError, Unsupported, Violation, shown
from pilotfish.engine.types import FinishedOutput, TokenEvent
from pilotfish.server.admission.admission import Admission
from pilotfish.server.admission.security import AdapterCalls
from pilotfish.server.admission.slow_work import release_turn
from pilotfish.server.driver import Driver
from pilotfish.server.http.bodies import GenerateBody, GenerationFields, ParsedBody, fields_of, read_body
from pilotfish.server.http.calls import (
    Answers,
    CallerGone,
    Calls,
    Events,
    EventStream,
    Json,
    WholeAnswer,
    unless_gone,
)
from pilotfish.server.http.errors import INTERNAL, HttpError, http_error
from pilotfish.server.http.event_ids import EventIds
from pilotfish.server.http.fields import Body, Text
from pilotfish.server.http.messages import ConversationBody, MessagesAnswer, MessagesBody
from pilotfish.server.http.openai.answers import FINISH_REASONS, ChatAnswers, TextAnswers, fit
from pilotfish.server.http.openai.bodies import ChatBody, CompletionBody
from pilotfish.server.http.responses import ResponsesAnswer, ResponsesBody

Endpoint: TypeAlias = Callable[[Request], Awaitable[Response]]


def add_generation(app: FastAPI, admission: Admission, stall_seconds: float) -> None:
    """Add the routes with prompts, and handlers that return errors in each route's format."""

    def add(path: str, endpoint: Endpoint, about: str, extra: dict[str, Any] | None = None) -> None:
        name = path.removeprefix("/v1/").replace("/", "_")
        app.add_api_route(
            path, endpoint, methods=["POST"], name=name, description=about, response_model=None, openapi_extra=extra
        )

    generating = partial(_generating, admission, stall_seconds)
    about = "Continue one prompt: return the text and its speed, or stream the tokens."
    add("/generate", generating(GenerateBody, NativeAnswers), about, _schema(GenerateBody, "/generate"))
    for path, kind, answers in (
        ("/v1/completions", CompletionBody, TextAnswers),
        ("/v1/chat/completions", ChatBody, ChatAnswers),
    ):
        about = "Continue a prompt or a conversation, in OpenAI's format."
        add(path, generating(kind, answers), about, _schema(kind, path))
        about = "Return the tokens of each prompt, or of the rendered conversation."
        body = {"requestBody": {"$ref": f"#/paths/{path.replace('/', '~1')}/post/requestBody"}}
        add(f"{path}/render", _converting(admission, kind, _rendered), about, body)
    about = "Continue a conversation, in the format of OpenAI's Responses API."
    add("/v1/responses", generating(ResponsesBody, ResponsesAnswer), about)
    about = "Continue a conversation, in the format of Anthropic's Messages API."
    add("/v1/messages", generating(MessagesBody, MessagesAnswer), about)
    about = "Return the number of prompt tokens of a conversation."
    add("/v1/messages/count_tokens", _converting(admission, ConversationBody, _counted), about)

    @app.api_route("/v1/responses/{response_id}", methods=["GET", "DELETE"], include_in_schema=False)
    async def stored(response_id: str) -> Response:
        """Answer 404: nothing is stored."""
        raise HTTPException(404, f"no response has the id {shown(response_id)}: this server stores none")

    _add_errors(app)


def _generating(
    admission: Admission, stall_seconds: float, kind: type[GenerationFields], made: type[Answers]
) -> Endpoint:
    """Return an endpoint that answers or streams events. Refusals are raised before anything is sent."""

    async def endpoint(request: Request) -> Response:
        data = await request.body()
        async with admission.slow.turn(len(data)):
            read = await admission.slow.run(read_body, kind, data, request.headers.get("content-type", ""))
            ends = time.monotonic() + (math.inf if read.body.timeout is None else read.body.timeout)
            caller, headers = request.scope["caller"], dict(request.headers)
            model = admission.driver().model
            after = request.headers.get("last-event-id")
            if fit(read, model, is_continued=after is not None) and after is not None:
                read.resume_after(after, model.engine.config.max_n)
            calls = await unless_gone(
                Calls.admit(admission, read, caller, lambda: ends - time.monotonic(), headers), request.receive
            )
            answers = made(read, calls.streams, model)
            if read.body.stream:
                admitted, has_ids = calls.streams[0].request, read.body.event_ids
                fingerprint = model.fingerprint_with(admitted.adapter)
                is_observed = has_ids or admitted.resume is not None
                ids = EventIds(fingerprint, admitted.sampling.seed or 0, admitted.resume) if is_observed else None
                return EventStream(calls, answers, stall_seconds, ids, has_ids=has_ids)
            return await unless_gone(WholeAnswer.of(calls, answers), request.receive)

    return endpoint


def _converting(
    admission: Admission,
    kind: type[GenerationFields],
    converted: Callable[[Admission, ParsedBody[Any]], Awaitable[Any]],
) -> Endpoint:
    """Return an endpoint that generates nothing and raises the errors of the same generation request."""

    async def work(request: Request) -> Response:
        data = await request.body()
        with admission.conversion(request.scope["caller"]):
            async with admission.slow.turn(len(data)):
                read = await admission.slow.run(read_body, kind, data, request.headers.get("content-type", ""))
                found = await converted(admission, read)
        text = await admission.slow.run(json.dumps, found, is_slow=True)
        return Response(text, media_type="application/json")

    async def endpoint(request: Request) -> Response:
        return await unless_gone(work(request), request.receive)

    return endpoint


async def _rendered(admission: Admission, read: ParsedBody[CompletionBody | ChatBody]) -> Any:
    found, is_chat = [], isinstance(read.body, ChatBody)
    for i, reader in enumerate(read.readers):
        with read.naming(i):
            request, _ = await admission.checked(reader, admission.driver().model)
        found.append(
            {
                "request_id": f"{(ChatAnswers if is_chat else TextAnswers).prefix}-{request.request_id}",
                "model": request.model,
                "token_ids": request.token_ids,
                "features": None,  # of images, which are not supported
                "cache_salt": request.cache_salt,
                "priority": request.priority,
            }
        )
    return found[0] if is_chat else found


async def _counted(admission: Admission, read: ParsedBody[ConversationBody]) -> Any:
    model = admission.driver().model
    if model.codec is None or model.chat is None:
        raise Unsupported(f"{model.name} does not support conversations: it has no tokenizer or no chat template")
    found = list[Violation]()
    request, prompt, _ = read.readers[0](model, found)
    text = await admission.text_of(prompt, request, model, found)
    if text is None or found:
        with read.naming():
            raise InvalidRequest(found)
    release_turn()
    return {"input_tokens": len(await admission.encoded(text, model.codec, bare=True))}


@cache  # constant, and the most expensive step of the start
def _schema(kind: type[GenerationFields], path: str) -> dict[str, Any]:
    """Describe the body of a path for `/openapi.json`, with the schemas that it references."""
    route = path.replace("/", "~1")
    parts = f"#/paths/{route}/post/requestBody/content/application~1json/schema/$defs/{{model}}"
    schema = kind.model_json_schema(ref_template=parts)
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def _add_errors(app: FastAPI) -> None:
    @app.exception_handler(PilotfishError)
    async def refused(request: Request, error: PilotfishError) -> JSONResponse:
        return http_error(error, request.url.path).response(request.url.path)

    @app.exception_handler(HTTPException)
    async def unknown(request: Request, error: HTTPException) -> JSONResponse:
        response = HttpError(error.status_code, "http", str(error.detail)).response(request.url.path)
        allowed = (error.headers or {}).get("Allow")
        if allowed is not None:  # the route of GET also answers HEAD
            response.headers["Allow"] = allowed if "HEAD" in allowed else allowed.replace("GET", "GET, HEAD")
        return response

    @app.exception_handler(CallerGone)
    @app.exception_handler(ClientDisconnect)
    async def gone(_: Request, __: Exception) -> Response:
        return Response(status_code=499)  # the caller has disconnected

    @app.exception_handler(Exception)
    async def failed(request: Request, _: Exception) -> JSONResponse:
        return INTERNAL.response(request.url.path)  # uvicorn logs the exception with its traceback


class NativeAnswers(Answers):
    """Answers of `/generate`."""

    async def answer(self, outputs: Sequence[TokenEvent]) -> Json:
        (output,) = outputs
        assert output.finished is not None, "half an output"
        return {"generated_text": output.text} | _figures(output.finished)

    async def events(self, events: Events) -> AsyncIterator[list[Json]]:
        async for event in events:
            yield [_piece(event) if event.finished is None else _figures(event.finished)]


def _piece(event: TokenEvent) -> Json:
    """Return the tokens. Text held back until the end belongs to no token and is only in `text`."""
    tokens = [
        {"id": token, "text": text, "from_draft": drafted}
        for token, text, drafted in zip(event.token_ids, event.texts, event.from_draft, strict=True)
    ]
    return {"text": event.text, "tokens": tokens}


def _figures(end: FinishedOutput) -> Json:
    stats, timing = end.stats, end.timing
    assert timing is not None, "the stream adds it"
    seconds, first = timing.total - timing.queue, timing.first_token
    return {
        "finish_reason": FINISH_REASONS.get(end.reason, "abort"),
        "tokens_per_second": end.completion_tokens / seconds if seconds > 0 else 0.0,
        "avg_tokens_per_jump": stats.acceptance_length if stats.rounds else 1.0,  # one per round, without drafts
        "latency_ms": 1000 * timing.total,
        "time_to_first_token_ms": None if first is None else 1000 * first,
        "prompt_tokens": end.prompt_tokens,
        "completion_tokens": end.completion_tokens,
        "drafted": stats.drafted,
        "accepted": stats.accepted,
        "gain": end.spec_gain,
        "seed": end.seed,
    }


_FIELDS = {"name": "lora_name", "path": "lora_path"}  # gRPC's fields, as named in the bodies


class UnloadAdapterBody(Body):
    """The body of an unload."""

    lora_name: Text


class LoadAdapterBody(UnloadAdapterBody):
    """The body of a load."""

    lora_path: Text


def add_adapters(app: FastAPI, driver: Callable[[], Driver], root: Path | None) -> None:
    """Add the routes; `driver` raises until the model is loaded; `root` is the option `adapter_root`."""
    calls = AdapterCalls(driver, root)

    @app.post("/v1/load_lora_adapter", response_model=None)
    async def load(request: Request) -> Response:
        """Load an adapter from a folder on the server."""
        calls.require_allowed(request.scope["caller"])  # before anything is read
        body = fields_of(LoadAdapterBody, await request.body(), request.headers.get("content-type", ""))
        try:
            await calls.load(body.lora_name, body.lora_path, request.scope["caller"])
        except InvalidRequest as invalid:
            wrong = (replace(v, field=_FIELDS.get(v.field, v.field)) for v in invalid.violations)
            raise InvalidRequest(wrong) from None
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")

    @app.post("/v1/unload_lora_adapter", response_model=None)
    async def unload(request: Request) -> Response:
        """Unload an adapter as soon as no live request uses it."""
        calls.require_allowed(request.scope["caller"])
        body = fields_of(UnloadAdapterBody, await request.body(), request.headers.get("content-type", ""))
        calls.unload(body.lora_name, request.scope["caller"])
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")
