"""The routes of Anthropic's Messages API."""

from __future__ import annotations

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import JSONResponse, Response

from engine.errors import InvalidRequest, Unsupported, Violation
from pilotfish.v1 import generation_pb2 as pb
from server.admission.admission import Call
from server.admission.slow_work import release_turn
from server.http.bodies import fields_of
from server.http.calls import Services, unless_gone
from server.http.messages.answers import MessagesAnswer
from server.http.messages.requests import conversation
from server.http.messages.types import ConversationBody, MessagesBody
from server.http.requests import ParsedBody
from server.http.routes import GeneratingRoutes


def add_messages(app: FastAPI, services: Services) -> None:
    """Add the routes."""
    router, routes, counter = APIRouter(), GeneratingRoutes(services), _Counter(services)

    @router.post("/v1/messages", response_model=None)
    async def messages(request: Request) -> Response:
        """Continue a conversation, in the format of Anthropic's messages."""
        return await routes.respond(MessagesBody, _answer, request)

    @router.post("/v1/messages/count_tokens", response_model=None)
    async def count_tokens(request: Request) -> Response:
        """Return how many tokens the prompt of the same conversation has."""
        return await unless_gone(counter.count(request), request.receive)

    app.include_router(router)


class _Counter:
    """Renders and encodes conversations, as admission does, to count their tokens."""

    def __init__(self, services: Services) -> None:
        self._admission, self._driver, self._slow, _ = services

    async def count(self, request: Request) -> Response:
        """Return the number of tokens, or raise what the same conversation would be refused with."""
        data = await request.body()
        with self._admission.conversion(request.scope["caller"]):
            async with self._slow.turn(len(data)):
                return JSONResponse({"input_tokens": await self._count(data, request.headers.get("content-type", ""))})

    async def _count(self, data: bytes, content_type: str) -> int:
        model, found = self._driver().model, list[Violation]()
        if model.codec is None or model.chat is None:
            raise Unsupported(f"{model.name} has no tokenizer or no chat template, so it reads no conversations")
        read = await self._slow.run(_read, data, content_type)
        text = await self._admission.text_of(read.message, model, found)
        if text is None:
            with read.naming():
                raise InvalidRequest(found)
        release_turn()
        return len(await self._admission.encoded(text, model.codec, read.message))


def _read(data: bytes, content_type: str) -> ParsedBody:
    body = fields_of(ConversationBody, data, content_type)
    message = pb.GenerateRequest(model=body.model, messages=conversation(body))
    return ParsedBody(message, called=body.called)


def _answer(_: MessagesBody, message: pb.GenerateRequest, call: Call) -> MessagesAnswer:
    return MessagesAnswer(call, message.messages)
