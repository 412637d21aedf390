"""Answers of `/v1/chat/completions`: content, reasoning and calls of functions. Knows no engine."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from engine.errors import Violation
from engine.text.codec import Codec
from pilotfish.v1 import generation_pb2 as pb
from server.admission.conversation import callable_tools
from server.formats.base import CallStart, Content, Piece, Reasoning
from server.http.agents import AgentBody
from server.http.calls import LongList
from server.http.openai.answers import (
    IMPOSSIBLE,
    PLAIN,
    AnswerFormat,
    Json,
    per_token,
    silent_tokens,
)
from server.http.pieces import CallReader, ReadOutput, call_id
from server.http.requests import ParsedBody
from server.http.types import ChatBody, GenerationFields, OpenAiBody
from server.model import ServedModel


class ChatAnswers(AnswerFormat[ReadOutput]):
    """Answers of `/v1/chat/completions`, which tell besides the outputs what `body` asks for.

    `silent` tokens have no text. `is_parsed`: what is read of a text may differ from the text. `is_forced`: the caller
    named the function to call. Then a call is what was asked for, and no reason to stop.
    """

    prefix, whole, chunk = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(
        self, model: str, codec: Codec | None, reader: CallReader, body: OpenAiBody = PLAIN,
        *, silent: Collection[int] = (), is_parsed: bool = False, is_forced: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(model, codec, body, silent)
        self._reader, self._is_parsed, self._is_forced = reader, is_parsed, is_forced
        self._num_calls: dict[int, int] = {}  # of each output

    @classmethod
    def of(cls, body: ChatBody, message: pb.GenerateRequest, model: ServedModel) -> ChatAnswers:
        asked, is_read = message.messages, is_parsed(message, model)
        skips = not (is_read and model.format.special) if body.skip_special_tokens is None else body.skip_special_tokens
        return cls(
            model.name,
            model.codec,
            CallReader.of(asked, model.format if is_read else None),
            body,
            silent=silent_tokens(model, skips_special=skips, ignores_end=body.ignore_eos),
            is_parsed=is_read,
            is_forced=asked.tool_choice.HasField("name"),
        )

    async def _read(self, responses: Sequence[pb.GenerateResponse]) -> list[ReadOutput]:
        (response,) = responses
        found = await self._reader.whole(response)
        self._num_calls = {i: len(read.calls) for i, read in enumerate(found)}
        return found

    def _choice(self, output: pb.Output, read: ReadOutput) -> Json:
        content = None if read.calls and not read.content else read.content
        message: Json = {"role": "assistant", "content": content, "refusal": None}
        if read.reasoning:
            message["reasoning_content"] = read.reasoning
        if read.calls:
            message["tool_calls"] = [
                self._call(output.index, n, call.name, call.arguments) for n, call in enumerate(read.calls)
            ]
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
                return {"tool_calls": [{"index": piece.index} | self._call(index, piece.index, piece.name, "")]}
        return {"tool_calls": [{"index": piece.index, "function": {"arguments": piece.text}}]}

    def _call(self, index: int, number: int, name: str, arguments: str) -> Json:
        identity = call_id(self._request_id, index, number)
        return {"id": identity, "type": "function", "function": {"name": name, "arguments": arguments}}

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

        content: list[Json] | LongList = per_token(len(output.logprobs), made)
        return {"content": content, "refusal": None}

    def _entry(self, token: int, logprob: float, *, leads: bool) -> Json:
        name, data = self._names.spelt(token, leads=leads)
        return {"token": name, "logprob": max(logprob, IMPOSSIBLE), "bytes": data}


def is_parsed(message: pb.GenerateRequest, model: ServedModel) -> bool:
    """Whether reasoning or calls are read from the text."""
    return bool(callable_tools(message.messages)) or model.format.reasoning is not None


def fitted(read: ParsedBody, body: GenerationFields, model: ServedModel, *, continues: bool) -> ParsedBody:
    """Adapt a conversation to the way in which its text is read. `continues`: it continues a stream.

    What is read of a text depends on all of it from its beginning, and a continued stream has only its end.
    """
    if isinstance(body, AgentBody):
        if model.format.reasoning is None:
            read.message.messages.ClearField("thinking_budget")
        wrong = [Violation("Last-Event-ID", "is set; a stream of this route cannot be continued")] * continues
        return replace(read, wrong=(*read.wrong, *wrong))
    if not isinstance(body, ChatBody):
        return read
    if is_parsed(read.message, model):
        problem = "is not served where reasoning or calls are read from the text: such a stream cannot be continued"
        fields = ["Last-Event-ID"] * continues + ["event_ids"] * body.event_ids
        return replace(read, wrong=(*read.wrong, *(Violation(field, problem) for field in fields)))
    if body.skip_special_tokens is None:
        read.message.output.skip_special_tokens = True  # nothing reads them
    return read
