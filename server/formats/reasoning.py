"""Splits the reasoning from the answer, and the answer into content and calls; and the format that has no calls."""

from __future__ import annotations

import re
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
    num_open,
)

Step: TypeAlias = Callable[[], bool]  # reads some text; returns False to wait for more


class TextParser(Parser):
    """Reads reasoning at the beginning of the text, and then content. A subclass reads calls of functions.

    A subclass reads a call in steps: `_start_call`, `_add_arguments`, `_complete_call`. A call is passed on when it is
    complete. Until then all that was taken can still become content, with `_no_call`. Where calls have a structure,
    they are passed on as they come.

    Args:
        chat_format: whose marks and tokens the text has.
        openings: the markers of which each may begin a call.
        starts_in_reasoning: whether the mark that begins the reasoning stands before the text.
        has_structure: whether calls are passed on as they come.
    """

    _end_of_broken = re.compile("(?!)")  # where text goes on after a call that is none
    # Or where another call begins. Not where a string may quote a whole one, which would then be taken for a call.
    _reads_on_at_openings = True

    def __init__(
        self, chat_format: ChatFormat, openings: Sequence[str] = (), *, starts_in_reasoning: bool = False,
        has_structure: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self._marks, self._starts_in_reasoning = chat_format.reasoning, starts_in_reasoning
        self._dropped, self._openings = chat_format.dropped, tuple(openings)
        self._spelled = [mark for mark in openings if mark not in chat_format.special]  # a token is never half a marker
        self._reasoning, self._text = Trimmed(leading=True), Trimmed(leading=False)
        self._pieces: list[Piece] = []
        self._num_calls, self._is_early = 0, has_structure
        self._name, self._arguments = "", list[str]()  # of the call that is read
        self._ran_out = False  # a call could have gone on where the text has ended
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
        if not self._scanner.has_mark:
            self._scanner.mark()
        if not self._skip_space() or (mark := self._accept(self._marks.begin)) is None:
            return False
        if not (mark or self._starts_in_reasoning):
            self._scanner.rewind()
        self._scanner.forget()
        self._step = self._reason if mark or self._starts_in_reasoning else self._content
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
        if marker is None and self._is_cut:
            text = text[: len(text) - num_open(text, self._spelled)]
        self._add_content(self._text.add(text))
        if marker in self._openings:
            self._begin_call(marker)
        return marker is not None

    def _add_content(self, text: str) -> None:
        if text:
            self._pieces.append(Content(text))

    # Calls

    def _begin_call(self, marker: str) -> None:
        """Remember where a call may begin: at a marker that was just taken."""
        self._scanner.mark(len(marker))
        self._ran_out = False
        self._open(marker)

    def _open(self, marker: str) -> None:
        """A call may begin: `_step` becomes what reads it."""
        raise NotImplementedError

    def _accept(self, *markers: str) -> str | None:
        """Take that of `markers` with which the text goes on: "" if with none, None if more text has to come first."""
        marker = self._scanner.one_of(*markers)
        self._ran_out |= marker == "" and self._scanner.is_cut(*markers)
        return marker

    def _skip_space(self) -> bool:
        """Take white space; return whether something else has come, or no more will come."""
        self._scanner.take_space()
        return not self._scanner.is_waiting

    def _start_call(self, name: str) -> None:
        self._name, self._arguments = name, []
        if self._is_early:
            self._text.pause()
            self._pieces.append(CallStart(self._num_calls, name))
            self._scanner.mark()
            self.is_in_call = True

    def _add_arguments(self, text: str) -> None:
        if self._is_early and text:
            self._pieces.append(CallArguments(self._num_calls, text))
            self._scanner.mark()
        self._arguments.append(text)

    def _complete_call(self) -> None:
        if not self._is_early:
            self._text.pause()
            arguments = "".join(self._arguments)
            self._pieces += [CallStart(self._num_calls, self._name), CallArguments(self._num_calls, arguments)]
        self._num_calls += 1
        self.is_in_call = False
        self._scanner.mark()

    def _is_unfinished(self) -> bool:
        """Whether the end of the text has cut a call. Then what was taken of it is neither a call nor content.

        A call that was passed on early can end in any way. Another one is broken if one may have ended inside of it.
        """
        if not self._scanner.is_over:
            return False
        is_open = self._is_cut and self._ran_out and self._length_of_broken(self._scanner.taken) is None
        if self.is_in_call or is_open:
            self._scanner.take_all()
        return self.is_in_call or is_open

    def _length_of_broken(self, taken: str) -> int | None:
        """Where in the text that was taken a broken call may have ended; None if nowhere."""
        found = self._end_of_broken.search(taken)
        return found.end() if found else None

    def _no_call(self) -> None:
        """What was taken is no call: it is content up to where it may have ended or another call may begin.

        The rest is read again.
        """
        if self._is_unfinished():
            return
        text = self._scanner.taken
        openings = self._openings if self._reads_on_at_openings else ()
        begins = (text.find(opening, 1) for opening in openings)  # what was taken may begin with its own
        found = [at for at in (self._length_of_broken(text), *begins) if at is not None and at >= 0]
        length = min(found, default=len(text) - num_open(text, openings, 1))
        self._num_calls += self.is_in_call
        self._scanner.rewind(length)
        self._add_content(self._text.add(text[:length]))


class PlainFormat(ChatFormat):
    """Reasoning or none, and content. Calls are not known."""

    name = "plain"

    def parser(
        self, tools: Sequence[Tool], *, starts_in_reasoning: bool = False, has_structure: bool = False
    ) -> Parser:
        return TextParser(self, starts_in_reasoning=starts_in_reasoning)

    def rest(self, tools: Sequence[Tool], *, several: bool) -> str:
        """Refuse: there is no text that would be a call."""
        raise InvalidRequest.of(
            "tools", "cannot be called: the chat template of this model knows no calls of functions"
        )
