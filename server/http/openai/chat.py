"""Answers of `/v1/chat/completions`: content, reasoning and calls of functions. Knows no engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from engine.types import FinishedOutput, FinishReason, TokenEvent
from server.chat import Conversation
from server.formats.base import CallArguments, CallStart, Content, Piece, Reasoning
from server.http.agents import AgentBody
from server.http.calls import Json, LongList, list_of
from server.http.openai.answers import IMPOSSIBLE, AnswerFormat
from server.http.openai.bodies import ChatBody
from server.http.pieces import CallReader, call_id
from server.http.requests import ParsedBody
from server.model import ServedModel
from server.streams.stream import OutputStream


class ChatAnswers(AnswerFormat[list[Piece]]):
    """Answers of `/v1/chat/completions`."""

    prefix, whole, chunk = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, read: ParsedBody[Any], streams: Sequence[OutputStream], model: ServedModel) -> None:
        super().__init__(read, streams, model)
        asked = read.conversation
        self._is_parsed = is_parsed(asked, model)  # what is read of a text may differ from the text
        # If the caller named the function to call, a call is what was asked for, and no reason to stop.
        self._is_forced = asked.tool_name is not None
        self._reader = CallReader(asked, streams[0], model.format if self._is_parsed else None)
        self._num_calls: dict[int, int] = {}  # of each output

    async def _read(self, outputs: Sequence[TokenEvent]) -> list[list[Piece]]:
        found = [await self._reader.read(output) for output in outputs]
        self._num_calls = {i: sum(isinstance(piece, CallStart) for piece in read) for i, read in enumerate(found)}
        return found

    def _choice(self, output: TokenEvent, read: list[Piece]) -> Json:
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

    async def _pieces(self, event: TokenEvent) -> list[Json]:
        logprobs = self._logprobs(event)
        if not self._is_parsed:
            is_text = event.texts or event.tail
            return [{"delta": {"content": event.text}, "logprobs": logprobs}] if is_text else []
        deltas = [self._delta(event.index, piece) for piece in await self._reader.read(event)]
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

    def _reason(self, finished: FinishedOutput, index: int) -> str:
        has_called = self._num_calls[index] and not self._is_forced and not self._reader.is_in_call(index)
        is_own_end = finished.reason is FinishReason.STOP
        return "tool_calls" if has_called and is_own_end else super()._reason(finished, index)

    def _reasoning_tokens(self) -> int:
        return sum(map(self._reader.reasoning_tokens, self._num_calls))

    def _logprobs(self, output: TokenEvent) -> Json | None:
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


def is_parsed(asked: Conversation, model: ServedModel) -> bool:
    """Whether reasoning or calls are read from the text."""
    return bool(asked.callable_tools) or model.format.reasoning is not None


def fit(read: ParsedBody[Any], model: ServedModel, *, is_continued: bool) -> bool:
    """Adapt a conversation to the way in which its text is read; return whether its stream can be continued.

    `is_continued`: the request does so. What is read of a text depends on all of it from its beginning, and a continued
    stream has only its end.
    """
    body, prompt = read.body, read.prompts[0]
    if isinstance(body, AgentBody):
        if model.format.reasoning is None and isinstance(prompt, Conversation):
            read.prompts[0] = replace(prompt, thinking_budget=None)
    elif not isinstance(body, ChatBody):
        return True
    elif not isinstance(prompt, Conversation) or not is_parsed(prompt, model):
        if body.skip_special_tokens is None:  # nothing reads them
            read.request = replace(read.request, output=replace(read.request.output, skip_special_tokens=True))
        return True
    for field in ["Last-Event-ID"] * is_continued + ["event_ids"] * body.event_ids:
        read.refuse(field, "is not supported where reasoning or calls are parsed: such a stream cannot be resumed")
    return False
