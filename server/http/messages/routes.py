"""The routes of Anthropic's Messages API, and their answers: a list of blocks (thinking, text, calls)."""

from __future__ import annotations

from dataclasses import replace

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import JSONResponse, Response

from engine.errors import InvalidRequest, Unsupported, Violation
from pilotfish.v1 import generation_pb2 as pb
from server.admission.admission import Call
from server.admission.slow_work import release_turn
from server.formats.json_text import object_in
from server.http.agents import AgentAnswer, AnswerPart, Json
from server.http.calls import Services, unless_gone
from server.http.errors import HttpError
from server.http.messages.bodies import ConversationBody, MessagesBody, conversation
from server.http.requests import ParsedBody, fields_of
from server.http.routes import GeneratingRoutes


def add_messages(app: FastAPI, services: Services) -> None:
    """Add the routes."""
    router, routes = APIRouter(), GeneratingRoutes(services)

    @router.post("/v1/messages", response_model=None)
    async def messages(request: Request) -> Response:
        """Continue a conversation, in the format of Anthropic's messages."""
        return await routes.respond(MessagesBody, _answer, request)

    @router.post("/v1/messages/count_tokens", response_model=None)
    async def count_tokens(request: Request) -> Response:
        """Return how many tokens the prompt of the same conversation has."""
        return await unless_gone(_counted(services, request), request.receive)

    app.include_router(router)


async def _counted(services: Services, request: Request) -> Response:
    """Return the number of tokens, or raise what the same conversation would be refused with."""
    data, found = await request.body(), list[Violation]()
    with services.admission.conversion(request.scope["caller"]):
        async with services.slow.turn(len(data)):
            model = services.driver().model
            if model.codec is None or model.chat is None:
                raise Unsupported(f"{model.name} has no tokenizer or no chat template, so it reads no conversations")
            read = await services.slow.run(_read, data, request.headers.get("content-type", ""))
            text = await services.admission.text_of(read.message, model, found)
            if text is None:
                with read.naming():
                    raise InvalidRequest(found)
            release_turn()
            tokens = await services.admission.encoded(text, model.codec, read.message)
            return JSONResponse({"input_tokens": len(tokens)})


def _read(data: bytes, content_type: str) -> ParsedBody:
    body = fields_of(ConversationBody, data, content_type)
    message = pb.GenerateRequest(model=body.model, messages=conversation(body))
    return ParsedBody(message, called=body.called)


def _answer(_: MessagesBody, message: pb.GenerateRequest, call: Call) -> MessagesAnswer:
    return MessagesAnswer(call, message.messages)


SIGNATURE = "unsigned"  # of reasoning, which clients drop from the conversation if it has none


class MessagesAnswer(AgentAnswer):
    """An answer to an admitted request with the conversation `asked`."""

    def __init__(self, call: Call, asked: pb.ChatMessages) -> None:
        super().__init__(call, asked)
        self._message: Json = {
            "id": f"msg_{self._request_id}",
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _usage(pb.Usage(prompt_tokens=len(call.wanted.request.token_ids))),
        }

    def _begin(self) -> list[Json]:
        return [{"type": "message_start", "message": dict(self._message)}, {"type": "ping"}]

    def _opened(self, part: AnswerPart) -> list[Json]:
        return [{"type": "content_block_start", "index": len(self._parts) - 1, "content_block": _block(part)}]

    def _grown(self, part: AnswerPart, text: str) -> list[Json]:
        match part.kind:
            case "reasoning":
                return [self._delta({"type": "thinking_delta", "thinking": text})]
            case "call":
                return [self._delta({"type": "input_json_delta", "partial_json": text})]
        return [self._delta({"type": "text_delta", "text": text})]

    def _closed(self, part: AnswerPart, status: str) -> list[Json]:
        signed = [self._delta({"type": "signature_delta", "signature": SIGNATURE})] * (part.kind == "reasoning")
        return [*signed, {"type": "content_block_stop", "index": len(self._parts) - 1}]

    def _end(self, finished: pb.Finished, reasoning_tokens: int) -> list[Json]:
        stopped = {
            "stop_reason": self._stop_reason(finished),
            "stop_sequence": finished.stop_string if finished.HasField("stop_string") else None,
        }
        usage = _usage(finished.usage) | {"output_tokens_details": {"thinking_tokens": reasoning_tokens}}
        self._message |= stopped | {"usage": usage}
        last: list[Json] = [{"type": "message_delta", "delta": stopped, "usage": usage}, {"type": "message_stop"}]
        return [*self._close("completed"), *last]

    def _fail(self, error: HttpError) -> list[Json]:
        return [replace(error, is_of_messages=True).body()]

    def _whole(self) -> Json:
        return self._message | {"content": [*map(_block, self._parts)]}

    def _stop_reason(self, finished: pb.Finished) -> str:
        if finished.finish_reason == pb.FINISH_REASON_LENGTH:
            return "max_tokens"
        if finished.HasField("stop_string"):
            return "stop_sequence"
        return "tool_use" if any(part.kind == "call" for part in self._parts) else "end_turn"

    def _delta(self, delta: Json) -> Json:
        return {"type": "content_block_delta", "index": len(self._parts) - 1, "delta": delta}


def _block(part: AnswerPart) -> Json:
    match part.kind:
        case "reasoning":
            return {"type": "thinking", "thinking": part.text, "signature": SIGNATURE if part.texts else ""}
        case "call":
            return {"type": "tool_use", "id": part.call_id, "name": part.name, "input": object_in(part.text) or {}}
    return {"type": "text", "text": part.text}


def _usage(usage: pb.Usage) -> Json:
    """Return the usage. What was cached does not count as input here."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_prompt_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_prompt_tokens,
        "output_tokens": usage.completion_tokens,
    }
