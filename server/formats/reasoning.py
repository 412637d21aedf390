"""Splits the reasoning from the answer, and the answer into content and calls; and the format that has no calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from engine.errors import InvalidRequest
from server.formats.base import (
    CallArguments,
    CallStart,
    ChatFormat,
    Content,
    Parser,
    Piece,
    Reasoning,
    Tool,
    Trimmed,
)

Step: TypeAlias = Callable[[], bool]  # reads some text; returns False to wait for more


class TextParser(Parser):
    """Reads reasoning at the beginning of the text, and then content. A subclass reads calls of functions.

    A subclass reads a call in steps. It takes text with `_accept` and `_skip_space`, which remember what they took
    so that `_no_call` can make it content. What begins a call is forgotten at `_start_call`.

    Args:
        chat_format: whose marks and tokens the text has.
        openings: the markers of which each may begin a call.
        starts_in_reasoning: whether the mark that begins the reasoning stands before the text.
    """

    def __init__(
        self, chat_format: ChatFormat, openings: Sequence[str] = (), *, starts_in_reasoning: bool = False
    ) -> None:
        super().__init__()
        self._marks, self._starts_in_reasoning = chat_format.reasoning, starts_in_reasoning
        self._dropped, self._openings = chat_format.dropped, tuple(openings)
        self._reasoning, self._text = Trimmed(leading=True), Trimmed(leading=False)
        self._pieces: list[Piece] = []
        self._raw: list[str] = []  # what was taken of a call that is not certain yet
        self._num_calls = 0
        self._step: Step = self._begin if self._marks else self._content

    def _read(self) -> list[Piece]:
        while self._step():
            pass
        if self._scanner.is_over:
            self._add_content(self._text.end(keep=True))
        pieces, self._pieces = self._pieces, []
        return pieces

    # Reasoning

    def _begin(self) -> bool:
        assert self._marks is not None, "reads reasoning without marks"
        if not self._skip_space() or (mark := self._scanner.one_of(self._marks.begin)) is None:
            return False
        if mark or self._starts_in_reasoning:
            self._raw, self._step = [], self._reason
        else:
            self._no_call()
        return True

    def _reason(self) -> bool:
        assert self._marks is not None, "reads reasoning without marks"
        text, marker = self._scanner.until(self._marks.end, *self._dropped)
        if more := self._reasoning.add(text):
            self._pieces.append(Reasoning(more))
        if marker == self._marks.end:
            self._text, self._step = Trimmed(leading=True), self._content
        return marker is not None

    # Content

    def _content(self) -> bool:
        text, marker = self._scanner.until(*self._openings, *self._dropped)
        self._add_content(self._text.add(text))
        if marker in self._openings:
            self._raw = [marker]
            self._open(marker)
        return marker is not None

    def _add_content(self, text: str) -> None:
        if text:
            self._pieces.append(Content(text))

    # Calls

    def _open(self, marker: str) -> None:
        """A call may begin: `_step` becomes what reads it."""
        raise NotImplementedError

    def _accept(self, *markers: str) -> str | None:
        """Take that of `markers` with which the text goes on: "" if with none, None if more text has to come first."""
        marker = self._scanner.one_of(*markers)
        self._raw.append(marker or "")
        return marker

    def _skip_space(self) -> bool:
        """Take white space; return whether something else has come, or no more will come."""
        self._raw.append(self._scanner.take_space())
        return not self._scanner.is_waiting

    def _start_call(self, name: str) -> None:
        """A call is certain: white space before it is no content."""
        self._text.end(keep=False)
        self._raw = []
        self._pieces.append(CallStart(self._num_calls, name))
        self._num_calls += 1

    def _add_arguments(self, text: str) -> None:
        if text:
            self._pieces.append(CallArguments(self._num_calls - 1, text))

    def _no_call(self) -> bool:
        """What was taken is no call but content, and so is what follows."""
        self._add_content(self._text.add("".join(self._raw)))
        return self._end_call()

    def _end_call(self) -> bool:
        self._raw, self._step = [], self._content
        return True


class PlainFormat(ChatFormat):
    """Reasoning or none, and content. Calls are not known."""

    name = "plain"

    def parser(self, tools: Sequence[Tool], *, starts_in_reasoning: bool = False) -> Parser:
        """Make a parser that reads reasoning alone."""
        return TextParser(self, starts_in_reasoning=starts_in_reasoning)

    def rest(self, tools: Sequence[Tool], *, several: bool) -> str:
        """Refuse: there is no text that would be a call."""
        raise InvalidRequest.of(
            "tools", "cannot be called: the chat template of this model knows no calls of functions"
        )
