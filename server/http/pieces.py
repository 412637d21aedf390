"""Messages of one call read as the model's format has it: reasoning, content and calls. Knows no format of answers."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Iterable
from dataclasses import replace
from itertools import groupby

from pilotfish.v1 import generation_pb2 as pb
from server.admission.conversation import callable_tools, must_call
from server.formats.base import (
    CallStart,
    ChatFormat,
    Content,
    Piece,
    Reasoning,
)
from server.formats.reasoning import Parser

TOKENS_PER_TURN = 256  # that are read before others have a turn


def call_id(request_id: str, output: int, number: int) -> str:
    """Return the id of a call: the same in a whole answer and in a stream, and different from that of any other.

    Some chat templates refuse a conversation whose calls have ids other than nine letters and digits.
    """
    named = f"{request_id}/{output}/{number}".encode()
    return hashlib.blake2b(named, digest_size=5).hexdigest()[:9]


async def as_stream(response: pb.GenerateResponse) -> AsyncIterator[pb.GenerateStreamResponse]:
    """Yield a whole response as the messages of a stream: the text of each output, and its end."""
    for output in response.outputs:
        delta = pb.TokenDelta(index=output.index, text=output.text, text_lengths=output.text_lengths)
        yield pb.GenerateStreamResponse(delta=delta, starts_in_reasoning=response.starts_in_reasoning)
        yield pb.GenerateStreamResponse(finished=output.finished)


def _merged(pieces: Iterable[Piece]) -> list[Piece]:
    """Join neighbours of the same kind: a message has a piece for each token."""
    found: list[Piece] = []
    for _, group in groupby(pieces, lambda piece: (type(piece), getattr(piece, "index", 0))):
        some = list(group)
        if isinstance(some[0], CallStart):
            found += some
        else:
            text = "".join(piece.text for piece in some if not isinstance(piece, CallStart))
            found.append(replace(some[0], text=text))
    return found


class CallReader:
    """Reads the messages of one call, each output with a parser of its own.

    Without functions that the model may call, calls are content. `chat_format` is how the model writes; None: text is
    content as it is, and nothing of it is held back.
    """

    def __init__(self, asked: pb.ChatMessages, chat_format: ChatFormat | None) -> None:
        self._format, self._tools = chat_format, callable_tools(asked)
        self._has_structure = must_call(asked) or any(tool.strict for tool in self._tools)
        self._outputs: dict[int, _OutputReader] = {}
        self._starts_in_reasoning: bool | None = None

    async def whole(self, response: pb.GenerateResponse) -> list[list[Piece]]:
        """Read a whole response: what each output says, in the order of the response."""
        found: list[list[Piece]] = []
        async for message in as_stream(response):
            if message.HasField("delta"):
                found.append([])
            found[-1] += await self.read(message)
        return [*map(_merged, found)]

    async def read(self, message: pb.GenerateStreamResponse) -> list[Piece]:
        """Read the next message of a stream: neighbouring pieces, of the output that it is of, differ in kind."""
        if self._format is None:
            return [Content(message.delta.text)] if message.delta.text else []
        if self._starts_in_reasoning is None:  # only the first message of a stream tells
            self._starts_in_reasoning = message.starts_in_reasoning
        if message.HasField("finished"):
            is_cut = message.finished.finish_reason != pb.FINISH_REASON_STOP
            return _merged(self._reader(message.finished.index, self._format).parser.finish(is_cut=is_cut))
        return _merged([piece async for piece in self._reader(message.delta.index, self._format).read(message.delta)])

    def reasoning_tokens(self, index: int) -> int:
        """How many tokens of this output were reasoning so far."""
        return self._outputs[index].reasoning_tokens if index in self._outputs else 0

    def is_in_call(self, index: int) -> bool:
        return index in self._outputs and self._outputs[index].parser.is_in_call

    def _reader(self, index: int, chat_format: ChatFormat) -> _OutputReader:
        if index not in self._outputs:
            how = {"starts_in_reasoning": bool(self._starts_in_reasoning), "has_structure": self._has_structure}
            self._outputs[index] = _OutputReader(chat_format.parser(self._tools, **how))
        return self._outputs[index]


class _OutputReader:
    """Reads the text of one output token by token, so that those of the reasoning are counted, and its end mark."""

    def __init__(self, parser: Parser) -> None:
        self.parser = parser
        self.reasoning_tokens = 0

    async def read(self, part: pb.Output | pb.TokenDelta) -> AsyncIterator[Piece]:
        start = 0
        for i, length in enumerate(part.text_lengths, 1):
            is_reasoning = self.parser.is_reasoning
            pieces = self.parser.push(part.text[start : start + length])
            self.reasoning_tokens += is_reasoning or any(isinstance(piece, Reasoning) for piece in pieces[:1])
            for piece in pieces:
                yield piece
            start += length
            if i % TOKENS_PER_TURN == 0:
                await asyncio.sleep(0)
        for piece in self.parser.push(part.text[start:]):  # it was held back until the end, and belongs to no token
            yield piece
