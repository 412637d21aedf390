"""The format of DeepSeek's models, in both variants."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.formats.base import ReasoningMarks, Tool
from server.formats.deepseek import DeepSeekFormat, DeepSeekVariant
from tests.server.formats.laws import (
    FREE,
    SCHEMAS,
    Calls,
    Render,
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

BEGIN, CALL, SEPARATOR, CALL_END, END = DeepSeekFormat.markers
EOS = DeepSeekFormat.turns[1]
TOKENS = Masks(dict.fromkeys([*DeepSeekFormat.markers, EOS], True))
VARIANTS: tuple[DeepSeekVariant, ...] = ("v3", "v3.1")
GET = Call("get", '{"a": 1}')


def format_of(variant: DeepSeekVariant) -> DeepSeekFormat:
    """The format of a checkpoint of whose tokenizer the markers are special tokens."""
    return DeepSeekFormat(TOKENS.ids, ReasoningMarks(), variant=variant)


def dumped(arguments: object) -> str:
    """JSON as in the chat templates."""
    return json.dumps(arguments, ensure_ascii=False)


def render_v3(calls: Calls) -> str:
    """As the chat templates of V3 and R1 write calls."""
    parts = (
        f"{CALL}function{SEPARATOR}{name}\n```json\n{dumped(arguments)}\n```{CALL_END}" for name, arguments in calls
    )
    return BEGIN + "\n".join(parts) + END


def render_v31(calls: Calls) -> str:
    """As the chat templates of V3.1 write calls."""
    return BEGIN + "".join(f"{CALL}{name}{SEPARATOR}{dumped(given)}{CALL_END}" for name, given in calls) + END


RENDERS: dict[DeepSeekVariant, Render] = {"v3": render_v3, "v3.1": render_v31}


@given(st.sampled_from(VARIANTS), some_calls("\n```"))
def test_a_call_that_is_written_is_read(variant: DeepSeekVariant, calls: Calls) -> None:
    check_round_trip(format_of(variant), TOKENS, RENDERS[variant], calls)


@given(st.sampled_from(VARIANTS), some_calls(BEGIN, CALL_END, "```", EOS))
def test_the_markers_may_be_text_that_is_no_token(variant: DeepSeekVariant, calls: Calls) -> None:
    check_round_trip(DeepSeekFormat(variant=variant), plain_masks(), RENDERS[variant], calls)


@pytest.mark.parametrize("index", range(len(SCHEMAS)))
def test_a_walk_under_the_masks_is_a_valid_call(index: int) -> None:
    check_walk(format_of(VARIANTS[index % 2]), TOKENS, SCHEMAS[index], index)


@given(
    hostile_texts(*DeepSeekFormat.markers, EOS, "<think>", "</think>", "function", "```json\n", f"{CALL}get{SEPARATOR}")
)
def test_hostile_texts_are_read_the_same_in_all_cuts(text: str) -> None:
    read(format_of("v3"), [*FREE, Tool("function")], text)


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_beginning_of_a_text_is_read_as_the_beginning_of_its_calls(variant: DeepSeekVariant) -> None:
    check_prefixes(format_of(variant), RENDERS[variant]([("get", {"a": [1, "}"]}), ("get_x", {})]))


@pytest.mark.parametrize("variant", VARIANTS)
def test_arguments_stream(variant: DeepSeekVariant) -> None:
    check_streams(format_of(variant), RENDERS[variant])


def test_what_is_no_call_is_content() -> None:
    texts = [
        *(BEGIN, END, f"{BEGIN} x", f"{BEGIN}{CALL}other{SEPARATOR}{{}}{CALL_END}{END}", f"{CALL}get_y{SEPARATOR}{{}}"),
        *(f"{CALL}function{SEPARATOR}get\n{{}}", f"{CALL}get{SEPARATOR}3{CALL_END}", f"{CALL}get {SEPARATOR}{{}}"),
        *(f"{CALL}function{SEPARATOR}{{}}", f"{BEGIN}{CALL}get", f"{CALL}function{SEPARATOR}get"),
    ]
    check_nothing_lost(format_of("v3.1"), texts)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("written", VARIANTS)
def test_every_variant_is_read(variant: DeepSeekVariant, written: DeepSeekVariant) -> None:
    text = RENDERS[written]([("get", {"a": 1}), ("get", {"a": 1})])
    assert read(format_of(variant), FREE, text + EOS) == Reading("", "", [GET, GET])


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_function_may_have_the_name_function(variant: DeepSeekVariant) -> None:
    tools = [Tool("function"), *FREE]
    text = RENDERS[variant]([("function", {}), ("get", {"a": 1})])
    assert read(format_of(variant), tools, text) == Reading("", "", [Call("function", "{}"), GET])


@pytest.mark.parametrize(
    "text",
    [
        f'{CALL}get{SEPARATOR}{{"a": 1}}',
        f'{BEGIN}\n{CALL}get{SEPARATOR} {{"a": 1}}\n{CALL_END}\n{END}\n',
        f'{BEGIN}{CALL}get{SEPARATOR}{{"a": 1}}{CALL_END}{CALL}ge',
        f'{CALL}function{SEPARATOR}get\n```json\n{{"a": 1}}\n``',
    ],
)
def test_a_call_may_be_written_in_several_ways(text: str) -> None:
    assert read(format_of("v3"), FREE, text) == Reading("", "", [GET])


@pytest.mark.parametrize("text", [f"{CALL}get{SEPARATOR}", f"{CALL}function{SEPARATOR}get\n```js"])
def test_a_call_that_is_cut_off_before_its_arguments_is_a_call(text: str) -> None:
    assert read(format_of("v3"), FREE, text) == Reading("", "", [Call("get", "")])


def test_reasoning_content_and_calls_follow_each_other() -> None:
    text = f"<think>\nhm\n</think>\n\nHi \n{render_v31([('get', {'a': 1})])}\n Bye"
    assert read(format_of("v3"), FREE, text) == Reading("hm", "HiBye", [GET])
    assert read(format_of("v3"), FREE, text[8:], starts_in_reasoning=True) == Reading("hm", "HiBye", [GET])


@pytest.mark.parametrize(
    ("text", "is_allowed"),
    [("Hi", True), (f"Hi{render_v31([('get', {})])}", True), (f"Hi{BEGIN}", False), (render_v3([("get", {})]), False)],
)
def test_a_free_answer_has_calls_in_their_structure(text: str, is_allowed: bool) -> None:
    rules = format_of("v3.1").auto(FREE, several=True)
    assert TOKENS.accepts(f"start: auto\n{rules}", text) == is_allowed


def test_the_work_is_proportional_to_the_text() -> None:
    call = [("get", {"a": 1})]
    parts = [f"{CALL}function{SEPARATOR}get\n", f"{CALL}get{SEPARATOR} ", render_v3(call), render_v31(call)]
    check_linear(format_of("v3"), ["a", " ", "<", BEGIN, f"{BEGIN} ", CALL, END, *parts])
