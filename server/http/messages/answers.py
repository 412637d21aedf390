"""Answers of Anthropic's Messages API: a list of blocks (thinking, text, calls)."""

from __future__ import annotations

from dataclasses import replace

from pilotfish.v1 import generation_pb2 as pb
from server.admission.admission import Call
from server.formats.json_text import object_in
from server.http.agents import AgentAnswer, AnswerPart
from server.http.calls import Json
from server.http.errors import HttpError
from server.http.messages.bodies import MessagesBody

SIGNATURE = "unsigned"  # of reasoning, which clients drop from the conversation if it has none


class MessagesAnswer(AgentAnswer):
    """An answer of `/v1/messages`."""

    def __init__(self, body: MessagesBody, message: pb.GenerateRequest, call: Call) -> None:
        super().__init__(body, message, call)
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

    def _end(self, finished: pb.Finished, reasoning_tokens: int) -> list[Json]:
        stopped = {
            "stop_reason": self._stop_reason(finished),
            "stop_sequence": finished.stop_string if finished.HasField("stop_string") else None,
        }
        usage = _usage(finished.usage) | {"output_tokens_details": {"thinking_tokens": reasoning_tokens}}
        self._message |= stopped | {"usage": usage}
        last: list[Json] = [{"type": "message_delta", "delta": stopped, "usage": usage}, {"type": "message_stop"}]
        return [*self._close("completed"), *last]

    def failure(self, error: HttpError) -> list[Json]:
        return [replace(error, is_of_messages=True).body()]

    def _whole(self) -> Json:
        return self._message | {"content": [*map(_block, self._parts)]}

    def _stop_reason(self, finished: pb.Finished) -> str:
        if finished.finish_reason == pb.FINISH_REASON_LENGTH:
            return "max_tokens"
        if finished.HasField("stop_string"):
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


def _usage(usage: pb.Usage) -> Json:
    """Return the usage. What was cached does not count as input here."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_prompt_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_prompt_tokens,
        "output_tokens": usage.completion_tokens,
    }
