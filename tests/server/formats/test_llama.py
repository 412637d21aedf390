"""The format of Llama 3: the whole answer is a call."""

from __future__ import annotations

import json

import pytest
from hypothesis import given

from engine.text.guided import json_rule
from server.formats.base import ReasoningMarks, Tool
from server.formats.llama import LlamaFormat
from tests.schemas import Schema
from tests.server.formats.laws import (
    FREE,
    SCHEMAS,
    Calls,
    check_linear,
    check_nothing_lost,
    check_prefixes,
    check_round_trip,
    check_streams,
    check_walk,
    hostile_texts,
    some_calls,
)
from tests.server.formats.walks import Call, Masks, Reading, plain_masks, read

TAG = "<|python_tag|>"
TOKENS = Masks({TAG: True, "<|eom_id|>": True})
FORMAT = LlamaFormat(TOKENS.ids)


def render(calls: Calls) -> str:
    """As the chat templates write calls."""
    return "; ".join(
        f'{{"name": "{name}", "parameters": {json.dumps(arguments, ensure_ascii=False)}}}' for name, arguments in calls
    )


ONE = render([("get", {"a": 1})])


@given(some_calls("; ", "{", '{"name": "get"'))
def test_a_call_that_is_written_is_read(calls: Calls) -> None:
    check_round_trip(FORMAT, TOKENS, render, calls)


@given(some_calls(TAG))
def test_the_tag_may_be_text_that_is_no_token(calls: Calls) -> None:
    check_round_trip(LlamaFormat(), plain_masks(), lambda written: TAG + render(written), calls)


@pytest.mark.parametrize("index", range(len(SCHEMAS)))
def test_a_walk_under_the_masks_is_a_valid_call(index: int) -> None:
    check_walk(FORMAT, TOKENS, SCHEMAS[index], index)


@given(hostile_texts(TAG, ONE, '{"name": "get", "parameters": {}'))
def test_hostile_texts_are_read_the_same_in_all_cuts(text: str) -> None:
    read(FORMAT, FREE, text)


def test_the_beginning_of_a_text_is_read_as_the_beginning_of_its_calls() -> None:
    check_prefixes(FORMAT, render([("get", {"a": [1, "}"]}), ("get_x", {})]))


def test_arguments_stream() -> None:
    check_streams(FORMAT, render)


def test_what_is_no_call_is_content() -> None:
    check_nothing_lost(FORMAT, [ONE, f"{TAG}print(1)", '{"name": "other", "parameters": {}}'])


@pytest.mark.parametrize(
    "text",
    [
        '{"a": 1}',
        '{"name": "other", "parameters": {}}',
        '{"name": "get", "size": 3}',
        '{"name": "get", "parameters": 3}',
        '{"parameters": {}, "name": "other"}',
        '{"parameters": {}}',
        '[{"name": "get", "parameters": {}}]',
        '{"name": "get_y", "parameters": {}}',
        ' {"name": ["get"]}',
        "\n",
        "{",
    ],
)
def test_an_answer_that_begins_with_a_brace_and_is_no_call_is_content(text: str) -> None:
    assert read(FORMAT, FREE, text) == Reading("", text, [])


@pytest.mark.parametrize(
    "text",
    [
        ONE,
        f"\n {TAG} {ONE}",
        '{"name": "get", "arguments": {"a": 1}}',
        '{"parameters": {"a": 1}, "name": "get"}',
        '{"type": "function", "name": "get", "parameters": {"a": 1}, "id": null}\n',
        '{ "name" : "get" ,\n"parameters" : {"a": 1} }<|eom_id|>',
        '{"name": "get", "parameters": {"a": 1}',
    ],
)
def test_a_call_may_be_written_in_several_ways(text: str) -> None:
    assert read(FORMAT, FREE, text) == Reading("", "", [Call("get", '{"a": 1}')])


def test_a_call_without_arguments_has_none() -> None:
    assert read(FORMAT, FREE, '{"name": "get"}') == Reading("", "", [Call("get", "{}")])
    assert read(FORMAT, FREE, '{"name": "get"') == Reading("", "", [Call("get", "")])


def test_calls_are_separated_by_semicolons_or_space() -> None:
    call = Call("get", '{"a": 1}')
    assert read(FORMAT, FREE, f"{ONE}; {ONE}\n{ONE}{ONE}") == Reading("", "", [call] * 4)


def test_text_around_calls_is_content_without_the_space_between() -> None:
    assert read(FORMAT, FREE, f"Hi \n{TAG}{ONE}\n Bye ") == Reading("", "HiBye ", [Call("get", '{"a": 1}')])
    assert read(FORMAT, FREE, f"{ONE}; Bye") == Reading("", "; Bye", [Call("get", '{"a": 1}')])


def test_a_call_follows_the_reasoning() -> None:
    thinking = LlamaFormat(TOKENS.ids, ReasoningMarks())
    expected = Reading("hm", "", [Call("get", '{"a": 1}')])
    assert read(thinking, FREE, f"<think>\nhm\n</think>\n\n{ONE}") == expected
    assert read(thinking, FREE, f"hm</think>{ONE}", starts_in_reasoning=True) == expected


@pytest.mark.parametrize(
    ("text", "is_allowed"),
    [
        ("Hello", True),
        ('{"a": 1}', True),
        ('{"name": "other", "parameters": 3}', True),
        ('{"name": "get", "parameters": {}}', True),
        (f'{TAG}{{"name": "get", "parameters": {{}}}}', True),
        ('{"name": "get", "size": 3}', False),
        ('{"parameters": 3, "name": "get"', False),
        (f"Hello {TAG}", False),
        (f"{TAG}print(1)", False),
    ],
)
def test_a_free_answer_has_calls_in_their_structure(text: str, is_allowed: bool) -> None:
    rules = FORMAT.auto(FREE, several=True)
    assert TOKENS.accepts(f"start: auto\n{rules}", text) == is_allowed


@pytest.mark.parametrize("names", [{}, {"name": {"type": "string"}}])
def test_content_of_a_schema_may_stand_in_the_place_of_calls(names: Schema) -> None:
    content = json_rule(json.dumps({"type": "object", "properties": names}))
    calls = FORMAT.calls([Tool("get", parameters=json.dumps(SCHEMAS[0]))], several=True)
    rules = f"start: content | calls\ncontent: {content}\n{calls}"
    assert TOKENS.accepts(rules, '{"name": "getter"}')
    assert TOKENS.accepts(rules, '{"name": "get", "parameters": {"of": {}}}; {"name": "get", "parameters": {}}')
    assert not TOKENS.accepts(rules, '{"name": "get", "parameters": {}}; {"name": "get", "parameters": {"x": 1}}')


def test_a_free_answer_does_not_begin_like_reasoning() -> None:
    rules = FORMAT.auto(FREE, several=True, unlike="<think>")
    assert TOKENS.accepts(f"start: auto\n{rules}", "so <think>")
    assert not TOKENS.accepts(f"start: auto\n{rules}", "\n<think> so")


def test_the_work_is_proportional_to_the_text() -> None:
    check_linear(FORMAT, ["a", " ", "{", TAG, f"{ONE}; ", '{"name": "get", ', f"{TAG}{ONE}x", '{"id": "', '{"name":'])
