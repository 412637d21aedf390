"""The format of Mistral's models, in all its variants."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.formats.base import ReasoningMarks
from server.formats.mistral import MistralFormat, MistralVariant
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

TOKENS = Masks(dict.fromkeys(MistralFormat.markers, True))
THINK = ReasoningMarks("[THINK]", "[/THINK]")
VARIANTS: tuple[MistralVariant, ...] = ("v3", "v11", "v13")
CALL = Call("get", '{"a": 1}')


def format_of(variant: MistralVariant) -> MistralFormat:
    """The format of a checkpoint of whose tokenizer the markers are special tokens."""
    return MistralFormat(TOKENS.ids, THINK, variant=variant)


def dumped(arguments: object) -> str:
    """JSON as in the chat templates."""
    return json.dumps(arguments, ensure_ascii=False)


def render_v3(calls: Calls) -> str:
    """As the chat templates of tokenizers of version 3 write calls."""
    objects = (f'{{"name": "{name}", "arguments": {dumped(given)}, "id": "aB3dEf6hI"}}' for name, given in calls)
    return f"[TOOL_CALLS][{', '.join(objects)}]"


def render_v11(calls: Calls) -> str:
    """As the chat templates of tokenizers of version 11 write calls."""
    return "".join(f"[TOOL_CALLS]{name}[CALL_ID]aB3dEf6hI[ARGS]{dumped(given)}" for name, given in calls)


def render_v13(calls: Calls) -> str:
    """As the chat templates of tokenizers of version 13 write calls."""
    return "".join(f"[TOOL_CALLS]{name}[ARGS]{dumped(given)}" for name, given in calls)


RENDERS: dict[MistralVariant, Render] = {"v3": render_v3, "v11": render_v11, "v13": render_v13}


@given(st.sampled_from(VARIANTS), some_calls("[/INST]", "]"))
def test_a_call_that_is_written_is_read(variant: MistralVariant, calls: Calls) -> None:
    check_round_trip(format_of(variant), TOKENS, RENDERS[variant], calls)


@given(st.sampled_from(VARIANTS), some_calls("[TOOL_CALLS]", "[ARGS]", '"}]'))
def test_the_markers_may_be_text_that_is_no_token(variant: MistralVariant, calls: Calls) -> None:
    check_round_trip(MistralFormat(variant=variant), plain_masks(), RENDERS[variant], calls)


@pytest.mark.parametrize("index", range(len(SCHEMAS)))
def test_a_walk_under_the_masks_is_a_valid_call(index: int) -> None:
    check_walk(format_of(VARIANTS[index % 3]), TOKENS, SCHEMAS[index], index)


@given(hostile_texts("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]", "[THINK]", "[/THINK]", "[TOOL_CALLS]get[ARGS]"))
def test_hostile_texts_are_read_the_same_in_all_cuts(text: str) -> None:
    read(format_of("v3"), FREE, text)


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_beginning_of_a_text_is_read_as_the_beginning_of_its_calls(variant: MistralVariant) -> None:
    check_prefixes(format_of(variant), RENDERS[variant]([("get", {"a": [1, "}"]}), ("get_x", {})]))


@pytest.mark.parametrize("variant", VARIANTS)
def test_arguments_stream(variant: MistralVariant) -> None:
    check_streams(format_of(variant), RENDERS[variant])


def test_what_is_no_call_is_content() -> None:
    texts = [
        *("[TOOL_CALLS]other[ARGS]{}", "[TOOL_CALLS]get_y[ARGS]{}", "[TOOL_CALLS]get{}", "[TOOL_CALLS]get[ARGS]3"),
        *('[TOOL_CALLS][{"name": "other", "arguments": {}}]', '[TOOL_CALLS]["get"]', "[TOOL_CALLS][]", "[ARGS]{}"),
        *("[TOOL_CALLS]get[CALL_ID]a b[ARGS]{}", "[TOOL_CALLS]", "[TOOL_CALLS]ge", '[TOOL_CALLS][{"name": "ge'),
    ]
    check_nothing_lost(format_of("v13"), texts)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("written", VARIANTS)
def test_every_variant_is_read(variant: MistralVariant, written: MistralVariant) -> None:
    text = RENDERS[written]([("get", {"a": 1}), ("get", {"a": 1})])
    assert read(format_of(variant), FREE, text) == Reading("", "", [CALL, CALL])


@pytest.mark.parametrize(
    "text",
    [
        '[TOOL_CALLS] [{"name": "get", "arguments": {"a": 1}}]\n',
        '[TOOL_CALLS][{"id": "x", "name": "get", "arguments": {"a": 1}}',
        '[TOOL_CALLS][{"name": "get", "arguments": {"a": 1}}, {"name": "ge',
        '[TOOL_CALLS]get[CALL_ID]x[ARGS] {"a": 1}',
    ],
)
def test_a_call_may_be_written_in_several_ways(text: str) -> None:
    assert read(format_of("v3"), FREE, text) == Reading("", "", [CALL])


@pytest.mark.parametrize(
    "text", ["[TOOL_CALLS]get[CALL_ID]x", "[TOOL_CALLS]get[ARGS]", '[TOOL_CALLS][{"name": "get", ']
)
def test_a_call_that_is_cut_off_before_its_arguments_is_a_call(text: str) -> None:
    assert read(format_of("v3"), FREE, text) == Reading("", "", [Call("get", "")])


def test_reasoning_content_and_calls_follow_each_other() -> None:
    text = '[THINK]\n hm\n[/THINK]\n\nHi \n[TOOL_CALLS]get[ARGS]{"a": 1}\n Bye'
    assert read(format_of("v13"), FREE, text) == Reading("hm", "HiBye", [CALL])
    assert read(format_of("v13"), FREE, text[7:], starts_in_reasoning=True) == Reading("hm", "HiBye", [CALL])


@pytest.mark.parametrize(
    ("text", "is_allowed"),
    [("Hello", True), ("Hello [TOOL_CALLS]get[ARGS]{}", True), ("Hello [TOOL_CALLS]", False), ("[ARGS]", False)],
)
def test_a_free_answer_has_calls_in_their_structure(text: str, is_allowed: bool) -> None:
    rules = format_of("v13").auto(FREE, several=True)
    assert TOKENS.accepts(f"start: auto\n{rules}", text) == is_allowed


def test_the_work_is_proportional_to_the_text() -> None:
    ids = ("[TOOL_CALLS]get[CALL_ID]", "[TOOL_CALLS]get[CALL_ID]a ", '[TOOL_CALLS][{"id": "')
    whole = (render_v3([("get", {"a": 1})]), render_v13([("get", {"a": 1})]), "[TOOL_CALLS][", "[TOOL_CALLS] ")
    check_linear(format_of("v13"), ["a", " ", "[", "[THINK]", *ids, *whole])
