"""Answers of Anthropic's Messages API: a list of blocks (thinking, text, calls)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from engine.types import FinishedOutput, FinishReason
from server.formats.json_text import object_in
from server.http.agents import AgentAnswer, AnswerPart
from server.http.calls import Json
from server.http.errors import HttpError
from server.http.requests import ParsedBody
from server.model import ServedModel
from server.streams.stream import OutputStream

SIGNATURE = "unsigned"  # of reasoning, which clients drop from the conversation if it has none


class MessagesAnswer(AgentAnswer):
    """An answer of `/v1/messages`."""

    def __init__(self, read: ParsedBody[Any], streams: Sequence[OutputStream], model: ServedModel) -> None:
        super().__init__(read, streams, model)
        self._message: Json = {
            "id": f"msg_{self._request_id}",
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _usage(len(streams[0].request.token_ids)),
        }

    def _begin(self) -> list[Json]:
        return [{"type": "message_start", "message": dict(self._message)}, {"type": "ping"}]

    def _opened(self, part: AnswerPart) -> list[Json]:
        return [{"type": "content_block_start", "index": part.index, "content_block": _block(part)}]

    def _grown(self, part: AnswerPart, text: str) -> list[Json]:
        match part.kind:
            case "reasoning":
                return [_delta(part, {"type": "thinking_delta", "thinking": text})]
            case "call":
                return [_delta(part, {"type": "input_json_delta", "partial_json": text})]
        return [_delta(part, {"type": "text_delta", "text": text})]

    def _closed(self, part: AnswerPart) -> list[Json]:
        signed = [_delta(part, {"type": "signature_delta", "signature": SIGNATURE})] * (part.kind == "reasoning")
        return [*signed, {"type": "content_block_stop", "index": part.index}]

    def _end(self, finished: FinishedOutput, reasoning_tokens: int) -> list[Json]:
        stopped = {"stop_reason": self._stop_reason(finished), "stop_sequence": finished.stop_string}
        usage = _usage(finished.prompt_tokens, finished.cached_prompt_tokens, finished.completion_tokens)
        usage |= {"output_tokens_details": {"thinking_tokens": reasoning_tokens}}
        self._message |= stopped | {"usage": usage}
        last: list[Json] = [{"type": "message_delta", "delta": stopped, "usage": usage}, {"type": "message_stop"}]
        return [*self._close("completed"), *last]

    def failure(self, error: HttpError) -> list[Json]:
        return [replace(error, is_of_messages=True).body()]

    def _whole(self) -> Json:
        return self._message | {"content": [*map(_block, self._parts)]}

    def _stop_reason(self, finished: FinishedOutput) -> str:
        if finished.reason is FinishReason.LENGTH:
            return "max_tokens"
        if finished.stop_string is not None:
            return "stop_sequence"
        return "tool_use" if any(part.kind == "call" for part in self._parts) else "end_turn"


def _delta(part: AnswerPart, delta: Json) -> Json:
    return {"type": "content_block_delta", "index": part.index, "delta": delta}


def _block(part: AnswerPart) -> Json:
    match part.kind:
        case "reasoning":
            return {"type": "thinking", "thinking": part.text, "signature": SIGNATURE if part.texts else ""}
        case "call":
            return {"type": "tool_use", "id": part.call_id, "name": part.name, "input": object_in(part.text) or {}}
    return {"type": "text", "text": part.text}


def _usage(prompt_tokens: int, cached: int = 0, completion_tokens: int = 0) -> Json:
    """Return the usage. What was cached does not count as input here."""
    return {
        "input_tokens": prompt_tokens - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": completion_tokens,
    }
