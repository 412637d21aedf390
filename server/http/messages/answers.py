"""Answers of `/v1/messages`: a list of blocks (thinking, text, calls), and the events that tell how it grows."""

from __future__ import annotations

from pilotfish.v1 import generation_pb2 as pb
from server.formats.base import CallArguments, CallStart, Content, Piece, Reasoning
from server.formats.json_text import object_in
from server.http.agents.answers import AgentAnswer
from server.http.agents.fields import Json
from server.http.errors import HttpError, MessagesError
from server.http.pieces import call_id

SIGNATURE = "unsigned"  # of reasoning, which clients drop from the conversation if it has none


class _BlockTexts:
    """A block that grows."""

    def __init__(self, kind: str, fields: Json) -> None:
        self.kind, self._fields = kind, fields
        self._texts: list[str] = []

    def add(self, text: str) -> Json:
        """Add text; return the delta that tells of it."""
        self._texts.append(text)
        match self.kind:
            case "thinking":
                return {"type": "thinking_delta", "thinking": text}
            case "tool_use":
                return {"type": "input_json_delta", "partial_json": text}
        return {"type": "text_delta", "text": text}

    def block(self) -> Json:
        """Return the block as it is now."""
        text = "".join(self._texts)
        match self.kind:
            case "thinking":
                return {"type": "thinking", "thinking": text, "signature": SIGNATURE if text else ""}
            case "tool_use":
                return {"type": "tool_use", **self._fields, "input": object_in(text) or {}}
        return {"type": "text", "text": text}


class MessagesAnswer(AgentAnswer):
    """An answer.

    Args:
        request_id: what ids of the answer and its calls are made of.
        model: the name of the model.
        prompt_tokens: tokens of the prompt.
    """

    def __init__(self, request_id: str, model: str, prompt_tokens: int) -> None:
        self._request_id = request_id
        self._blocks: list[_BlockTexts] = []
        self._is_open = False  # the newest block
        self._message: Json = {
            "id": f"msg_{request_id}",
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _usage(pb.Usage(prompt_tokens=prompt_tokens)),
        }

    def begin(self) -> list[Json]:
        return [{"type": "message_start", "message": dict(self._message)}, {"type": "ping"}]

    def add(self, piece: Piece) -> list[Json]:
        match piece:
            case Reasoning(text):
                return [*self._into("thinking"), self._delta(self._blocks[-1].add(text))]
            case Content(text):
                return [*self._into("text"), self._delta(self._blocks[-1].add(text))]
            case CallStart(index, name):
                return self._open("tool_use", {"id": call_id(self._request_id, 0, index), "name": name})
            case CallArguments(text=text):
                return [self._delta(self._blocks[-1].add(text))]

    def end(self, finished: pb.Finished, reasoning_tokens: int) -> list[Json]:
        stopped = {
            "stop_reason": self._stop_reason(finished),
            "stop_sequence": finished.stop_string if finished.HasField("stop_string") else None,
        }
        usage = _usage(finished.usage) | {"output_tokens_details": {"thinking_tokens": reasoning_tokens}}
        self._message |= stopped | {"usage": usage}
        return [
            *self._close(),
            {"type": "message_delta", "delta": stopped, "usage": usage},
            {"type": "message_stop"},
        ]

    def fail(self, error: HttpError) -> list[Json]:
        return [MessagesError.of(error).body()]

    def whole(self) -> Json:
        return self._message | {"content": [block.block() for block in self._blocks]}

    def _stop_reason(self, finished: pb.Finished) -> str:
        if finished.finish_reason == pb.FINISH_REASON_LENGTH:
            return "max_tokens"
        if finished.HasField("stop_string"):
            return "stop_sequence"
        return "tool_use" if any(block.kind == "tool_use" for block in self._blocks) else "end_turn"

    def _into(self, kind: str) -> list[Json]:
        """Begin a block, unless the newest is of this kind."""
        return [] if self._is_open and self._blocks[-1].kind == kind else self._open(kind, {})

    def _open(self, kind: str, fields: Json) -> list[Json]:
        """End the newest block, and begin one."""
        events = self._close()
        self._blocks.append(_BlockTexts(kind, fields))
        self._is_open = True
        block = self._blocks[-1].block()
        return [*events, {"type": "content_block_start", "index": len(self._blocks) - 1, "content_block": block}]

    def _close(self) -> list[Json]:
        """End the newest block, if it has not ended."""
        if not self._is_open:
            return []
        self._is_open = False
        events = [{"type": "content_block_stop", "index": len(self._blocks) - 1}]
        if self._blocks[-1].kind == "thinking":
            events.insert(0, self._delta({"type": "signature_delta", "signature": SIGNATURE}))
        return events

    def _delta(self, delta: Json) -> Json:
        return {"type": "content_block_delta", "index": len(self._blocks) - 1, "delta": delta}


def _usage(usage: pb.Usage) -> Json:
    """Return the usage. What was cached does not count as input here."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_prompt_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_prompt_tokens,
        "output_tokens": usage.completion_tokens,
    }
