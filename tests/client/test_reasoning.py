"""Where reasoning ends and the answer begins, however the text is cut."""

from __future__ import annotations

import pytest

from pilotfish.client.results import Piece, ReasoningMarks
from pilotfish.client.terminal.reasoning import ReasoningSplitter

MARKS = ReasoningMarks("<think>", "</think>")
TEXTS = {
    "<think>\nso <b>it</b> is</think>\n\n4 < 5": ("so <b>it</b> is", "4 < 5"),
    "\n<think>never ends": ("never ends", ""),
    "<thin> 42": ("", "<thin> 42"),
    "42 <think>no</think>": ("", "42 <think>no</think>"),
    "<think>a</thi": ("a</thi", ""),
    "": ("", ""),
}


@pytest.mark.parametrize("size", [1, 2, 3, 100])
@pytest.mark.parametrize("text", TEXTS)
def test_the_parts_do_not_depend_on_the_pieces(text, size):
    splitter = ReasoningSplitter(MARKS)
    pieces = [Piece(text[at : at + size], at % 2 == 0) for at in range(0, len(text), size)]
    parts = [part for piece in pieces for part in splitter.add([piece])] + list(splitter.end())
    assert (splitter.reasoning, splitter.answer) == TEXTS[text]
    assert "".join(part.text for part in parts if part.is_reasoning) == splitter.reasoning
    assert "".join(part.text for part in parts if not part.is_reasoning) == splitter.answer


def test_reasoning_that_begins_in_the_prompt():
    splitter = ReasoningSplitter(MARKS, starts_in_reasoning=True)
    assert [part.text for part in splitter.add([Piece("so</think>42", None)])] == ["so", "42"]
    assert (splitter.reasoning, splitter.answer) == ("so", "42")


def test_each_character_keeps_its_source():
    splitter = ReasoningSplitter(MARKS)
    parts = [*splitter.add([Piece("<think>a</", True), Piece("b>c", False)]), *splitter.end()]
    assert [(part.text, part.from_draft) for part in parts] == [("a</", True), ("b>c", False)]


def test_without_marks_everything_is_the_answer_at_once():
    splitter = ReasoningSplitter(None)
    assert [part.text for part in splitter.add([Piece(" <think>", None)])] == [" <think>"]
