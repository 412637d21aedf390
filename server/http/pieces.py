"""Parses the events of a stream into reasoning, content and calls. Independent of the format of answers."""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from itertools import groupby

from pilotfish.engine.types import FinishReason, TokenEvent
from pilotfish.server.chat import Conversation
from pilotfish.server.formats.base import (
    CallStart,
    ChatFormat,
    Content,
    Piece,
    Reasoning,
)
from pilotfish.server.formats.reasoning import Parser
from pilotfish.server.streams.stream import OutputStream

TOKENS_PER_TURN = 256  # parsed before other tasks run


def call_id(request_id: str, output: int, number: int) -> str:
    """Return the unique id of a call, equal in a whole answer and in a stream.

    Some chat templates reject call ids other than nine letters and digits.
    """
    named = f"{request_id}/{output}/{number}".encode()
    return hashlib.blake2b(named, digest_size=5).hexdigest()[:9]


def _merged(pieces: Iterable[Piece]) -> list[Piece]:
    """Join neighbours of the same kind: an event has a piece for each token."""
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
    """Parses the events of one stream, with one parser per output.

    Without callable functions, calls are content. `chat_format`: the model's format; None: all text is content,
    unparsed, and none is held back.
    """

    def __init__(self, asked: Conversation, stream: OutputStream, chat_format: ChatFormat | None) -> None:
        self._format, self._tools = chat_format, asked.callable_tools
        self._has_structure = asked.must_call or any(tool.strict for tool in self._tools)
        self._starts_in_reasoning = stream.starts_in_reasoning
        self._parsers: dict[int, Parser] = {}  # by output
        self.reasoning_tokens = Counter[int]()  # of each output so far

    async def read(self, event: TokenEvent) -> list[Piece]:
        """Parse the next event, or a whole output, into pieces whose neighbours differ in kind."""
        if self._format is None:
            return [Content(event.text)] if event.text else []
        parser = self._parsers.get(event.index)
        if parser is None:
            how = {"starts_in_reasoning": self._starts_in_reasoning, "has_structure": self._has_structure}
            parser = self._parsers[event.index] = self._format.parser(self._tools, **how)
        pieces = list[Piece]()
        for i, text in enumerate(event.texts, 1):  # one by one, so that the tokens of the reasoning are counted
            is_reasoning, found = parser.is_reasoning, parser.push(text)
            is_reasoning = is_reasoning or isinstance(next(iter(found), None), Reasoning)
            self.reasoning_tokens[event.index] += is_reasoning
            pieces += found
            if i % TOKENS_PER_TURN == 0:
                await asyncio.sleep(0)
        pieces += parser.push(event.tail)  # held back until the end, it belongs to no token
        if event.finished is not None:
            pieces += parser.finish(is_cut=event.finished.reason is not FinishReason.STOP)
        return _merged(pieces)

    def is_in_call(self, index: int) -> bool:
        return index in self._parsers and self._parsers[index].is_in_call
