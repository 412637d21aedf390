"""Reasoning is split from the answer by the marks that a model writes around it."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pilotfish.engine.errors import InvalidRequest
from pilotfish.server.formats.base import ReasoningMarks
from pilotfish.server.formats.reasoning import PlainFormat
from tests.server.formats.laws import check_linear
from tests.server.formats.walks import Reading, read, tool

MARKS = ReasoningMarks()
THINKING = PlainFormat(reasoning=MARKS)


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        ("<think>\nso \n</think>\n\nHi. ", "so", "Hi. "),
        (" \n<think>so</think>Hi", "so", "Hi"),
        ("<think></think>\nHi", "", "Hi"),
        ("<think> \n ", "", ""),
        ("<think>so on \n", "so on", ""),
        ("<think>a <think> b</think> c <think>d</think> ", "a <think> b", "c <think>d</think> "),
        ("<think>a</thin k></think></think>", "a</thin k>", "</think>"),
        (" \nHi <think>a</think>", "", " \nHi <think>a</think>"),
        ("a</think>b", "", "a</think>b"),
        ("<thin", "", "<thin"),
        (" <", "", " <"),
        (" \n", "", " \n"),
        ("", "", ""),
    ],
)
def test_reasoning_at_the_beginning_is_no_content(text, reasoning, content):
    assert read(THINKING, (), text) == Reading(reasoning, content, [])


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        ("so\n</think>\n\nHi", "so", "Hi"),
        ("<think>\nso\n</think>Hi", "so", "Hi"),
        (" \nso", "so", ""),
        ("</think>Hi", "", "Hi"),
        ("", "", ""),
    ],
)
def test_the_mark_at_the_beginning_may_be_part_of_the_prompt(text, reasoning, content):
    assert read(THINKING, (), text, starts_in_reasoning=True) == Reading(reasoning, content, [])


@settings(max_examples=30)
@given(st.text(), st.text())
def test_both_parts_are_kept(reasoning, content):
    reasoning = reasoning.replace("<", "")
    expected = Reading(reasoning.strip(), content.lstrip(), [])
    assert read(THINKING, (), f"<think>{reasoning}</think>{content}") == expected


@settings(max_examples=30)
@given(st.text("<think>/ \na"))
def test_without_marks_all_text_is_content(text):
    for starts_in_reasoning in (False, True):
        reading = read(PlainFormat(), (), text, starts_in_reasoning=starts_in_reasoning)
        assert reading == Reading("", text, [])


def test_text_is_passed_on_as_it_comes():
    parser = THINKING.parser(())
    pieces = [
        [piece.text for piece in parser.push(part)] for part in ("<think>a", " b", " ", "c</th", "ink> d", " ", "e")
    ]
    assert pieces == [["a"], [" b"], [], [" c"], ["d"], [], [" e"]]
    assert parser.finish() == []


@pytest.mark.parametrize("part", ["<", "<think>", " ", "a ", "</think>", "</"])
@pytest.mark.parametrize("begin", ["", "<think>", "<think></think>"], ids=["before", "inside", "behind"])
def test_the_cost_is_proportional_to_the_text(begin, part):
    check_linear(THINKING, (), begin, part)


def test_no_call_is_known():
    ping = tool("ping")
    assert read(THINKING, [ping], "<tool_call>") == Reading("", "<tool_call>", [])
    with pytest.raises(InvalidRequest, match="are not supported by the chat template"):
        PlainFormat().calls([ping], several=True)
    with pytest.raises(InvalidRequest, match="are not supported by the chat template"):
        PlainFormat().auto([ping], several=True)
