"""Divides the text of an output, which arrives in pieces, into reasoning and answer. Prints nothing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby

from pilotfish.client.results import Piece, ReasoningMarks


@dataclass(frozen=True, slots=True)
class Part:
    """Text of one token, of the reasoning or of the answer."""

    text: str
    from_draft: bool | None
    is_reasoning: bool


class ReasoningSplitter:
    r"""Finds the reasoning at the beginning of one output. Without `marks` everything is the answer.

    The marks, and white space after them, are no part of either text; text that may begin a mark is held back.
    "<think>so</think>\n\n42" is the reasoning "so" and the answer "42".
    """

    def __init__(self, marks: ReasoningMarks | None, *, starts_in_reasoning: bool = False) -> None:
        self._marks = marks
        self._is_open = marks is not None and starts_in_reasoning  # in the reasoning
        self._may_begin = marks is not None and not starts_in_reasoning  # only the beginning of `begin` so far
        self._at_edge = marks is not None  # only white space since a mark
        self._held: list[tuple[str, bool | None]] = []  # characters that may belong to a mark
        self.reasoning = self.answer = ""

    def add(self, pieces: Iterable[Piece]) -> Iterator[Part]:
        """Add text, and yield what is certain, one part per token or fewer characters."""
        characters = [(char, piece.from_draft) for piece in pieces for char in piece.text]
        return self._parts(self._certain(characters))

    def end(self) -> Iterator[Part]:
        """Yield the text that is still held back."""
        held, self._held, self._may_begin = self._held, [], False
        return self._parts((*each, self._is_open) for each in held)

    def _certain(self, characters: Iterable[tuple[str, bool | None]]) -> Iterator[tuple[str, bool | None, bool]]:
        for each in characters:
            if self._at_edge and not self._held and each[0].isspace():
                continue
            if self._marks is None or not (self._is_open or self._may_begin):
                self._at_edge = False
                yield *each, False
                continue
            self._held.append(each)
            mark = self._marks.end if self._is_open else self._marks.begin
            text = "".join(char for char, _ in self._held)
            if text == mark:
                self._held, self._is_open, self._may_begin, self._at_edge = [], self._may_begin, False, True
                continue
            if not self._is_open and not mark.startswith(text):
                self._may_begin = False
            while self._held and not ((self._is_open or self._may_begin) and mark.startswith(text)):
                self._at_edge, text = False, text[1:]
                yield *self._held.pop(0), self._is_open

    def _parts(self, certain: Iterable[tuple[str, bool | None, bool]]) -> Iterator[Part]:
        for (from_draft, is_reasoning), group in groupby(certain, key=lambda each: each[1:]):
            text = "".join(char for char, *_ in group)
            if is_reasoning:
                self.reasoning += text
            else:
                self.answer += text
            yield Part(text, from_draft, is_reasoning)
