"""Answers of `/v1/chat/completions`: content, reasoning and calls of functions. Knows no engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pilotfish.v1 import generation_pb2 as pb
from server.admission.admission import Call
from server.admission.conversation import callable_tools
from server.formats.base import CallArguments, CallStart, Content, Piece, Reasoning
from server.http.agents import AgentBody
from server.http.calls import Json, LongList, list_of
from server.http.openai.answers import IMPOSSIBLE, AnswerFormat
from server.http.openai.bodies import ChatBody
from server.http.pieces import CallReader, call_id
from server.http.requests import ParsedBody
from server.model import ServedModel


class ChatAnswers(AnswerFormat[list[Piece]]):
    """Answers of `/v1/chat/completions`."""

    prefix, whole, chunk = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, body: ChatBody, message: pb.GenerateRequest, call: Call) -> None:
        super().__init__(body, message, call)
        model = call.driver.model
        self._is_parsed = is_parsed(message, model)  # what is read of a text may differ from the text
        # If the caller named the function to call, a call is what was asked for, and no reason to stop.
        self._is_forced = message.messages.tool_choice.HasField("name")
        self._reader = CallReader(message.messages, model.format if self._is_parsed else None)
        self._num_calls: dict[int, int] = {}  # of each output

    async def _read(self, responses: Sequence[pb.GenerateResponse]) -> list[list[Piece]]:
        (response,) = responses
        found = await self._reader.whole(response)
        self._num_calls = {i: sum(isinstance(piece, CallStart) for piece in read) for i, read in enumerate(found)}
        return found

    def _choice(self, output: pb.Output, read: list[Piece]) -> Json:
        reasoning = "".join(piece.text for piece in read if isinstance(piece, Reasoning))
        content = "".join(piece.text for piece in read if isinstance(piece, Content))
        calls = [self._call(output.index, piece.index, piece.name) for piece in read if isinstance(piece, CallStart)]
        for piece in read:
            if isinstance(piece, CallArguments):
                calls[piece.index]["function"]["arguments"] += piece.text
        message: Json = {"role": "assistant", "content": content or None if calls else content, "refusal": None}
        if reasoning:
            message["reasoning_content"] = reasoning
        if calls:
            message["tool_calls"] = calls
        return {"message": message, "logprobs": self._logprobs(output)}

    async def _pieces(self, message: pb.GenerateStreamResponse) -> list[Json]:
        logprobs = self._logprobs(message.delta)
        if not self._is_parsed:
            is_text = message.HasField("delta")
            return [{"delta": {"content": message.delta.text}, "logprobs": logprobs}] if is_text else []
        index = message.delta.index if message.HasField("delta") else message.finished.index
        deltas = [self._delta(index, piece) for piece in await self._reader.read(message)]
        if not deltas and logprobs is not None:
            deltas = [{}]
        return [{"delta": delta, "logprobs": None if i else logprobs} for i, delta in enumerate(deltas)]

    def _delta(self, index: int, piece: Piece) -> Json:
        match piece:
            case Reasoning():
                return {"reasoning_content": piece.text}
            case Content():
                return {"content": piece.text}
            case CallStart():
                self._num_calls[index] += 1
                return {"tool_calls": [{"index": piece.index} | self._call(index, piece.index, piece.name)]}
        return {"tool_calls": [{"index": piece.index, "function": {"arguments": piece.text}}]}

    def _call(self, index: int, number: int, name: str) -> Json:
        identity = call_id(self._request_id, index, number)
        return {"id": identity, "type": "function", "function": {"name": name, "arguments": ""}}

    def _opening(self, index: int) -> list[Json]:
        self._num_calls[index] = 0
        return [{"delta": {"role": "assistant", "content": ""}, "logprobs": None}]

    def _closing(self) -> Json:
        return {"delta": {}, "logprobs": None}

    def _reason(self, finished: pb.Finished, index: int) -> str:
        has_called = self._num_calls[index] and not self._is_forced and not self._reader.is_in_call(index)
        is_own_end = finished.finish_reason == pb.FINISH_REASON_STOP
        return "tool_calls" if has_called and is_own_end else super()._reason(finished, index)

    def _reasoning_tokens(self) -> int:
        return sum(map(self._reader.reasoning_tokens, self._num_calls))

    def _logprobs(self, output: pb.Output | pb.TokenDelta) -> Json | None:
        if not output.logprobs:
            return None

        leading = self._leading(output)

        def made(start: int, stop: int) -> list[Json]:
            entries = []
            for i in range(start, stop):
                token, of = output.token_ids[i], output.logprobs[i]
                top = [self._entry(rival.token_id, rival.logprob, leads=i == leading) for rival in of.top]
                entries.append(self._entry(token, of.logprob, leads=i == leading) | {"top_logprobs": top})
            return entries

        content: list[Json] | LongList = list_of(len(output.logprobs), made)
        return {"content": content, "refusal": None}

    def _entry(self, token: int, logprob: float, *, leads: bool) -> Json:
        name, data = self._names.spelt(token, leads)
        return {"token": name, "logprob": max(logprob, IMPOSSIBLE), "bytes": data}


def is_parsed(message: pb.GenerateRequest, model: ServedModel) -> bool:
    """Whether reasoning or calls are read from the text."""
    return bool(callable_tools(message.messages)) or model.format.reasoning is not None


def fit(read: ParsedBody[Any], model: ServedModel, *, is_continued: bool) -> bool:
    """Adapt a conversation to the way in which its text is read; return whether its stream can be continued.

    `is_continued`: the request does so. What is read of a text depends on all of it from its beginning, and a continued
    stream has only its end.
    """
    body, message = read.body, read.messages[0]
    if isinstance(body, AgentBody):
        if model.format.reasoning is None and message.messages.HasField("thinking_budget"):
            message.messages.ClearField("thinking_budget")
    elif not isinstance(body, ChatBody):
        return True
    elif not is_parsed(message, model):
        if body.skip_special_tokens is None:
            message.output.skip_special_tokens = True  # nothing reads them
        return True
    for field in ["Last-Event-ID"] * is_continued + ["event_ids"] * body.event_ids:
        read.refuse(field, "is not served where reasoning or calls are read: such a stream cannot be continued")
    return False
