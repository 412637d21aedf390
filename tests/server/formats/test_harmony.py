"""The format of gpt-oss: messages in channels."""

from __future__ import annotations

import json

import pytest
from hypothesis import given

from server.formats.harmony import HarmonyFormat
from tests.server.formats.laws import (
    FREE,
    SCHEMAS,
    Calls,
    check_linear,
    check_prefixes,
    check_round_trip,
    check_streams,
    check_walk,
    hostile_texts,
    some_calls,
)
from tests.server.formats.walks import Call, Masks, Reading, read

TOKENS = Masks(dict.fromkeys(HarmonyFormat.markers, True))
FORMAT = HarmonyFormat(TOKENS.ids)
ROLE, ANALYSIS, FINAL = "<|start|>assistant", "<|channel|>analysis<|message|>", "<|channel|>final<|message|>"
COMMENTARY, JSON = "<|channel|>commentary", "<|constrain|>json<|message|>"
HEAD = f"{COMMENTARY} to=functions.get {JSON}"
GET = Call("get", '{"a": 1}')
ONE = f'{HEAD}{{"a": 1}}'


def render(calls: Calls) -> str:
    """As the model writes calls; the token that ends the output has no text."""
    messages = (
        f"{COMMENTARY} to=functions.{name} {JSON}{json.dumps(arguments, ensure_ascii=False)}"
        for name, arguments in calls
    )
    return f"<|end|>{ROLE}".join(messages)


@given(some_calls("json", "to=functions.get", "assistant"))
def test_a_call_that_is_written_is_read(calls: Calls) -> None:
    check_round_trip(FORMAT, TOKENS, render, calls)


@given(some_calls("<|call|>", "<|message|>", "<|end|>"))
def test_markers_in_strings_are_text(calls: Calls) -> None:
    found = read(FORMAT, FREE, render(calls))
    assert [(name, json.loads(arguments)) for name, arguments in found.calls] == calls
    assert not found.content


@pytest.mark.parametrize("index", range(len(SCHEMAS)))
def test_a_walk_under_the_masks_is_a_valid_call(index: int) -> None:
    check_walk(FORMAT, TOKENS, SCHEMAS[index], index)


@given(
    hostile_texts(*HarmonyFormat.markers, ROLE, ANALYSIS, FINAL, COMMENTARY, " to=functions.get", "to=", HEAD, "json")
)
def test_hostile_texts_are_read_the_same_in_all_cuts(text: str) -> None:
    read(FORMAT, FREE, text)
    read(FORMAT, FREE, text, starts_in_reasoning=True)


def test_the_beginning_of_a_text_is_read_as_the_beginning_of_its_calls() -> None:
    check_prefixes(FORMAT, render([("get", {"a": [1, "}"]}), ("get_x", {})]))


def test_arguments_stream() -> None:
    check_streams(FORMAT, render)


@pytest.mark.parametrize(
    "text",
    [
        ONE,
        f"{ROLE}{ONE}<|call|>",
        f' to=functions.get{COMMENTARY} json<|message|>{{"a": 1}}<|call|>',
        f'{ROLE} to=functions.get{COMMENTARY} json<|message|>{{"a": 1}}',
        f'{COMMENTARY} to=functions.get<|message|>{{"a": 1}}\n<|end|>',
        f'{COMMENTARY} to=get<|constrain|>json<|message|> {{"a": 1}}',
        '<|channel|>analysis to=functions.get code<|message|>{"a": 1}',
        f'{COMMENTARY} to=functions.get{COMMENTARY} {JSON}{{"a": 1}}',
    ],
)
def test_a_call_may_be_written_in_several_ways(text: str) -> None:
    assert read(FORMAT, FREE, text) == Reading("", "", [GET])


def test_a_call_that_is_cut_off_before_its_arguments_is_a_call() -> None:
    assert read(FORMAT, FREE, HEAD) == Reading("", "", [Call("get", "")])


def test_channels_are_reasoning_and_content() -> None:
    text = f"{ANALYSIS} hm\n<|end|>{ROLE}{FINAL}Hi\n"
    assert read(FORMAT, FREE, text) == Reading("hm", "Hi\n", [])
    inside = text.removeprefix(ANALYSIS)
    assert read(FORMAT, [], inside, starts_in_reasoning=True) == Reading("hm", "Hi\n", [])


def test_messages_of_one_kind_are_lines() -> None:
    thoughts = f"{ANALYSIS}a <|end|>{ROLE}{ANALYSIS} b<|end|>"
    text = f"{thoughts}{ROLE}{COMMENTARY}<|message|>plan\n<|end|>{ROLE}{FINAL}Hi<|return|>"
    assert read(FORMAT, FREE, text) == Reading("a\nb", "plan\nHi", [])


def test_a_preamble_is_content_before_the_call() -> None:
    text = f"{ANALYSIS}hm<|end|>{ROLE}{COMMENTARY}<|message|>plan:\n<|end|>{ROLE}{ONE}<|call|>"
    assert read(FORMAT, FREE, text) == Reading("hm", "plan:", [GET])


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (" Hi", " Hi"),
        ("to", "to"),
        (f"{COMMENTARY} to=functions.other {JSON}{{}}<|call|>", "{}"),
        (f"{HEAD}x", "x"),
        (f"{ONE} x<|end|>", "x"),
        ("<|start|>x", "x"),
        ("<|channel|>x y", "x y"),
        ("<|message|>x<|return|>y", "xy"),
    ],
)
def test_text_that_is_no_call_is_content(text: str, content: str) -> None:
    assert read(FORMAT, FREE, text).content == content


def test_without_tools_the_bodies_of_calls_are_content() -> None:
    assert read(FORMAT, [], f"{ONE}<|call|>") == Reading("", '{"a": 1}', [])


@pytest.mark.parametrize(
    "text", ["<|start|>assis", f"{ROLE}<|channel|>", f"{COMMENTARY} to=functions.ge", "<|channel|>fin"]
)
def test_a_header_that_is_cut_off_is_no_content(text: str) -> None:
    assert read(FORMAT, FREE, text) == Reading("", "", [])


@pytest.mark.parametrize(
    ("text", "is_allowed"),
    [
        (f"{FINAL}Hi", True),
        (f"{ROLE}{FINAL}Hi", True),
        (f"{COMMENTARY}<|message|>plan<|end|>{ROLE}{HEAD}{{}}", True),
        (f"{ROLE}{COMMENTARY}<|message|>plan<|end|>{ROLE}{HEAD}{{}}", True),
        (f"{COMMENTARY}<|message|>plan<|end|>", False),
        (f"{HEAD}3", False),
        ("Hi", False),
        (f"{FINAL}Hi<|end|>", False),
    ],
)
def test_a_free_answer_is_a_final_message_or_calls(text: str, is_allowed: bool) -> None:
    assert TOKENS.accepts(f"start: auto\n{FORMAT.auto(FREE, several=True)}", text) == is_allowed


@pytest.mark.parametrize("has_reasoned", [False, True])
def test_the_header_stands_before_content_of_a_structure(has_reasoned: bool) -> None:
    start = f'start: {FORMAT.prefix(has_reasoned=has_reasoned)} "yes"'
    assert TOKENS.accepts(start, f"{ROLE * has_reasoned}{FINAL}yes")
    assert read(FORMAT, [], f"{ROLE * has_reasoned}{FINAL}yes") == Reading("", "yes", [])


def test_the_marks_of_reasoning_are_those_of_the_channel() -> None:
    assert FORMAT.reasoning is not None
    assert TOKENS.accepts(f"start: {FORMAT.literal(FORMAT.reasoning.begin)}", ANALYSIS)


def test_the_work_is_proportional_to_the_text() -> None:
    markers = ["<|start|>", "<|channel|>", "<|end|>", "<|message|>"]
    check_linear(FORMAT, ["a", " ", "<", "to=", *markers, ANALYSIS, f"{ONE}<|call|>", HEAD, "<|channel|>x "])
