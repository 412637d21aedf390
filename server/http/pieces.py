"""Messages of one call read as the model's format has it: reasoning, content and calls. Knows no format of answers."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from pilotfish.v1 import generation_pb2 as pb
from server.admission.conversation import callable_tools, must_call
from server.formats.base import (
    CallArguments,
    CallStart,
    ChatFormat,
    Content,
    Parser,
    Piece,
    Reasoning,
    ReasoningMarks,
    Tool,
)

TOKENS_PER_TURN = 256  # that are read before others have a turn


@dataclass(frozen=True, slots=True)
class ReadCall:
    """A call of a function: its name, and the JSON text of its arguments."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class ReadOutput:
    """What a whole output says. `reasoning_tokens` are those whose text begins inside of the reasoning."""

    reasoning: str = ""
    content: str = ""
    calls: tuple[ReadCall, ...] = ()
    reasoning_tokens: int = 0


def call_id(request_id: str, output: int, number: int) -> str:
    """Return the id of a call: the same in a whole answer and in a stream, and different from that of any other.

    Some chat templates refuse a conversation whose calls have ids other than nine letters and digits.
    """
    named = f"{request_id}/{output}/{number}".encode()
    return hashlib.blake2b(named, digest_size=5).hexdigest()[:9]


def joined(pieces: Sequence[Piece], reasoning_tokens: int = 0) -> ReadOutput:
    """Join the pieces of one output."""
    names = [piece.name for piece in pieces if isinstance(piece, CallStart)]
    arguments: list[list[str]] = [[] for _ in names]
    for piece in pieces:
        if isinstance(piece, CallArguments):
            arguments[piece.index].append(piece.text)
    return ReadOutput(
        reasoning="".join(piece.text for piece in pieces if isinstance(piece, Reasoning)),
        content="".join(piece.text for piece in pieces if isinstance(piece, Content)),
        calls=tuple(ReadCall(name, "".join(texts)) for name, texts in zip(names, arguments, strict=True)),
        reasoning_tokens=reasoning_tokens,
    )


def _merged(pieces: Iterable[Piece]) -> list[Piece]:
    """Join neighbours of the same kind: a message has a piece for each token."""
    found: list[Piece] = []
    for _, group in groupby(pieces, lambda piece: (type(piece), getattr(piece, "index", 0))):
        some = list(group)
        text = "".join(piece.text for piece in some if not isinstance(piece, CallStart))
        match some[0]:
            case Reasoning():
                found.append(Reasoning(text))
            case Content():
                found.append(Content(text))
            case CallArguments(index):
                found.append(CallArguments(index, text))
            case CallStart():
                found += some
    return found


class CallReader:
    """Reads the messages of one call, each output with a parser of its own.

    Args:
        chat_format: how the model writes; None: text is content as it is, and nothing of it is held back.
        tools: the functions that it may call; without any, calls are content.
        must_call: a call is required, and so has a structure.
    """

    def __init__(self, chat_format: ChatFormat | None, tools: Sequence[Tool] = (), *, must_call: bool = False) -> None:
        self._format, self._tools = chat_format, tuple(tools)
        self._has_structure = must_call or any(tool.strict for tool in tools)  # as constrained decoding has it
        self._outputs: dict[int, _OutputReader] = {}
        self._starts_in_reasoning: bool | None = None

    @classmethod
    def of(cls, asked: pb.ChatMessages, chat_format: ChatFormat | None) -> CallReader:
        """Return a reader that knows the functions which the answer to a conversation may call."""
        return cls(chat_format, callable_tools(asked), must_call=must_call(asked))

    async def whole(self, response: pb.GenerateResponse) -> list[ReadOutput]:
        """Read a whole response: one entry per output, in the order of the response."""
        if self._format is None:
            return [ReadOutput(content=output.text) for output in response.outputs]
        self._starts_in_reasoning = response.starts_in_reasoning
        found = []
        for output in response.outputs:
            reader = self._reader(output.index, self._format)
            pieces = [piece async for piece in reader.read(output)]
            found.append(joined([*pieces, *reader.finish(output.finished)], reader.reasoning_tokens))
        return found

    async def read(self, message: pb.GenerateStreamResponse) -> list[Piece]:
        """Read the next message of a stream: neighbouring pieces, of the output that it is of, differ in kind."""
        if self._format is None:
            return [Content(message.delta.text)] if message.delta.text else []
        if self._starts_in_reasoning is None:  # only the first message of a stream tells
            self._starts_in_reasoning = message.starts_in_reasoning
        if message.HasField("finished"):
            return _merged(self._reader(message.finished.index, self._format).finish(message.finished))
        return _merged([piece async for piece in self._reader(message.delta.index, self._format).read(message.delta)])

    def reasoning_tokens(self, index: int) -> int:
        """How many tokens of this output were reasoning so far."""
        return self._outputs[index].reasoning_tokens if index in self._outputs else 0

    def is_in_call(self, index: int) -> bool:
        return index in self._outputs and self._outputs[index].is_in_call

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
        self._parser, self._marks, self._is_reasoning = parser, marks, is_reasoning
        self._may_begin = False  # the begin mark has come
        self._newest = ""  # what may begin a mark
        self.reasoning_tokens = 0

    @property
    def is_in_call(self) -> bool:
        return self._parser.is_in_call

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
        for piece in self._parser.push(part.text[start:]):  # it was held back until the end, and belongs to no token
            yield piece

    def finish(self, finished: pb.Finished) -> list[Piece]:
        return self._parser.finish(is_cut=finished.finish_reason != pb.FINISH_REASON_STOP)

    def _tokens(self, text: str, lengths: Sequence[int]) -> Iterator[Piece]:
        if self._marks is None or not (self._is_reasoning or self._may_begin or self._saw(self._marks.begin, text)):
            yield from self._parser.push(text)
            self._note(text)
            return
        self._may_begin, start = True, 0
        for length in lengths:
            yield from self._token(text[start : start + length], self._marks)
            start += length

    def _token(self, text: str, marks: ReasoningMarks) -> list[Piece]:
        pieces = self._parser.push(text)
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
