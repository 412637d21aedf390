"""The routes that answer with the tokens of a prompt and generate nothing: a router tokenizes as this server does."""

from __future__ import annotations

import json
from typing import Any, TypeVar

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import Response

from engine.errors import Violation
from pilotfish.v1 import generation_pb2 as pb
from server.http.bodies import WrongBody, read_body
from server.http.calls import Services, unless_gone
from server.http.requests import ParsedBody
from server.http.types import ChatBody, CompletionBody, OpenAiBody

BodyT = TypeVar("BodyT", bound=OpenAiBody)


def add_render(app: FastAPI, services: Services) -> None:
    """Add the routes. Their bodies are those of the routes that generate."""
    router, renderer = APIRouter(), _Renderer(services)

    @router.post("/v1/completions/render", response_model=None, openapi_extra=_body_of("/v1/completions"))
    async def completions(request: Request) -> Response:
        """Return the tokens of each prompt, as a list of objects."""
        rendered = await unless_gone(renderer.render(CompletionBody, "cmpl", request), request.receive)
        return await renderer.response(rendered)

    @router.post("/v1/chat/completions/render", response_model=None, openapi_extra=_body_of("/v1/chat/completions"))
    async def chat_completions(request: Request) -> Response:
        """Return the tokens of the conversation as the chat template writes it."""
        [rendered] = await unless_gone(renderer.render(ChatBody, "chatcmpl", request), request.receive)
        return await renderer.response(rendered)

    app.include_router(router)


class _Renderer:
    """Checks a body as admission does, encodes its prompt, and stops there."""

    def __init__(self, services: Services) -> None:
        self._admission, self._driver, self._slow, _ = services

    async def render(self, kind: type[BodyT], prefix: str, request: Request) -> list[dict[str, Any]]:
        """Return what the answer says of each prompt. Raises the error that the same request would get."""
        data = await request.body()
        with self._admission.conversion(request.scope["caller"]):
            async with self._slow.turn(len(data)):
                read = await self._read(kind, data, request.headers.get("content-type", ""))
                messages = (read.message, *read.others)
                with read.naming():
                    return [await self._rendered(message, prefix, read.wrong) for message in messages]

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

    async def response(self, answer: Any) -> Response:
        """Return an answer, whose tokens can be many, as JSON."""
        text = await self._slow.run(json.dumps, answer, is_slow=True)
        return Response(text, media_type="application/json")

    async def _read(self, kind: type[BodyT], data: bytes, content_type: str) -> ParsedBody:
        """Read the body, or what is valid of it: then the message is refused with all that is wrong."""
        try:
            _, read = await self._slow.run(read_body, kind, data, content_type)
        except WrongBody as error:
            return error.read
        return read


def _body_of(path: str) -> dict[str, Any]:
    """Refer to the body of another route, for `/openapi.json`."""
    return {"requestBody": {"$ref": f"#/paths/{path.replace('/', '~1')}/post/requestBody"}}
