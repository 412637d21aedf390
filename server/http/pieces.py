"""Messages of one call read as the model's format has it: reasoning, content and calls. Knows no format of answers."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
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
    ReasoningMarks,
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
            is_reasoning = bool(self._starts_in_reasoning)
            parser = chat_format.parser(
                self._tools, starts_in_reasoning=is_reasoning, has_structure=self._has_structure
            )
            self._outputs[index] = _OutputReader(parser, chat_format.reasoning, is_reasoning=is_reasoning)
        return self._outputs[index]


class _OutputReader:
    """Reads the text of one output; where it may be reasoning, token by token, so that these are counted.

    The reasoning lasts from its first piece up to its end mark, which counts. A parser tells of what follows the mark
    only when it knows what that is, so the marks are looked for here, too.
    """

    def __init__(self, parser: Parser, marks: ReasoningMarks | None, *, is_reasoning: bool) -> None:
        self.parser, self._marks, self._is_reasoning = parser, marks, is_reasoning
        self._may_begin = False  # the begin mark has come
        self._newest = ""  # what may begin a mark
        self.reasoning_tokens = 0

    async def read(self, part: pb.Output | pb.TokenDelta) -> AsyncIterator[Piece]:
        start = 0
        for i in range(0, len(part.text_lengths), TOKENS_PER_TURN):
            lengths = part.text_lengths[i : i + TOKENS_PER_TURN]
            stop = start + sum(lengths)
            for piece in self._tokens(part.text[start:stop], lengths):
                yield piece
            start = stop
            if i + TOKENS_PER_TURN < len(part.text_lengths):
                await asyncio.sleep(0)
        for piece in self.parser.push(part.text[start:]):  # it was held back until the end, and belongs to no token
            yield piece

    def _tokens(self, text: str, lengths: Sequence[int]) -> Iterator[Piece]:
        if self._marks is None or not (self._is_reasoning or self._may_begin or self._saw(self._marks.begin, text)):
            yield from self.parser.push(text)
            self._note(text)
            return
        self._may_begin, start = True, 0
        for length in lengths:
            yield from self._token(text[start : start + length], self._marks)
            start += length

    def _token(self, text: str, marks: ReasoningMarks) -> list[Piece]:
        pieces = self.parser.push(text)
        self.reasoning_tokens += self._is_reasoning or any(isinstance(piece, Reasoning) for piece in pieces[:1])
        if pieces:
            self._is_reasoning = isinstance(pieces[-1], Reasoning)
            self._may_begin = self._is_reasoning
        if self._saw(marks.begin, text):
            self._may_begin = True
        if self._saw(marks.end, text):
            self._is_reasoning = False
        self._note(text)
        return pieces

    def _saw(self, mark: str, text: str) -> bool:
        """Whether `text` completes a mark."""
        return mark in self._newest[max(0, len(self._newest) - len(mark) + 1) :] + text

    def _note(self, text: str) -> None:
        if self._marks is not None:
            longest = max(len(self._marks.begin), len(self._marks.end)) - 1
            self._newest = (self._newest + text)[-longest:]
