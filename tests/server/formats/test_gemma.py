"""The format of Gemma, in both variants."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.formats.base import ReasoningMarks, Tool
from server.formats.gemma import GemmaFormat, GemmaVariant
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
from tests.server.formats.walks import Call, Masks, Reading, read

BEGIN, END, QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
MARKS = {"functiongemma": ("<start_function_call>", "<end_function_call>", "<escape>"), "gemma4": (BEGIN, END, QUOTE)}
TOKENS = Masks(dict.fromkeys([*GemmaFormat.markers, "<|channel>", "<channel|>", "<|tool_response>"], True))
THOUGHT = ReasoningMarks("<|channel>thought", "<channel|>")
VARIANTS: tuple[GemmaVariant, ...] = ("functiongemma", "gemma4")
GET = Call("get", '{"a": 1}')


def format_of(variant: GemmaVariant) -> GemmaFormat:
    """The format of a checkpoint of whose tokenizer the markers are special tokens."""
    return GemmaFormat(TOKENS.ids, THOUGHT, variant=variant)


def render_in(variant: GemmaVariant) -> Render:
    """As the chat template of a variant writes calls: with members in the order of their names, whatever their case."""
    begin, end, quote = MARKS[variant]

    def members(value: dict[str, Any]) -> str:
        names = sorted(value, key=lambda name: (name.lower(), name))
        return f"{{{','.join(f'{name}:{written(value[name])}' for name in names)}}}"

    def written(value: Any) -> str:
        if isinstance(value, str):
            return f"{quote}{value}{quote}"
        if isinstance(value, dict):
            return members(value)
        return f"[{','.join(map(written, value))}]" if isinstance(value, list) else json.dumps(value)

    return lambda calls: "".join(f"{begin}call:{name}{members(given)}{end}" for name, given in calls)


RENDERS: dict[GemmaVariant, Render] = {variant: render_in(variant) for variant in VARIANTS}


@given(st.sampled_from(VARIANTS), some_calls("]", ",", ":", "call:"))
def test_a_call_that_is_written_is_read(variant: GemmaVariant, calls: Calls) -> None:
    check_round_trip(format_of(variant), TOKENS, RENDERS[variant], calls)


@given(some_calls(BEGIN, END, "<escape>"))
def test_marks_in_strings_are_text(calls: Calls) -> None:
    found = read(format_of("gemma4"), FREE, RENDERS["gemma4"](calls))
    assert [(name, json.loads(arguments)) for name, arguments in found.calls] == calls
    assert not found.content


@pytest.mark.parametrize("index", range(len(SCHEMAS)))
def test_a_walk_under_the_masks_is_a_valid_call(index: int) -> None:
    check_walk(format_of(VARIANTS[index % 2]), TOKENS, SCHEMAS[index], index, ":")


@given(
    hostile_texts(*GemmaFormat.markers, "call:", "call:get{", "<|channel>thought\n", "<channel|>", "a:", "null", "1")
)
def test_hostile_texts_are_read_the_same_in_all_cuts(text: str) -> None:
    read(format_of("gemma4"), FREE, text)


@given(hostile_texts(QUOTE, "a:", "null", "1", "[1", "{a:"))
def test_arguments_are_always_json_or_the_beginning_of_it(text: str) -> None:
    for call in read(format_of("gemma4"), FREE, f"{BEGIN}call:get{{{text}").calls[:1]:
        assert isinstance(json.loads(closed(call.arguments)), dict)


def closed(text: str) -> str:
    """The beginning of a JSON text, with what is missing at its end."""
    closing: list[str] = []
    is_in_string = is_escaped = False
    for char in text:
        if is_in_string:
            is_in_string = is_escaped or char != '"'
            is_escaped = char == "\\" and not is_escaped
        elif char in '"{[':
            is_in_string = char == '"'
            closing += [] if is_in_string else [{"{": "}", "[": "]"}[char]]
        elif char in "]}":
            assert closing.pop() == char
    return text + '"' * is_in_string + "".join(reversed(closing))


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_beginning_of_a_text_is_read_as_the_beginning_of_its_calls(variant: GemmaVariant) -> None:
    calls: Calls = [("get", {"a": [True, "}", {"b": None}], "c": -1.5}), ("get_x", {})]
    check_prefixes(format_of(variant), RENDERS[variant](calls))


@pytest.mark.parametrize("variant", VARIANTS)
def test_arguments_stream(variant: GemmaVariant) -> None:
    check_streams(format_of(variant), RENDERS[variant])


def test_what_is_no_call_is_content() -> None:
    texts = [
        f"{BEGIN}call:other{{}}{END}",
        f"{BEGIN}get{{}}{END}",
        f"{BEGIN}call:get(){END}",
        f"{BEGIN} x",
        BEGIN,
        QUOTE,
    ]
    check_nothing_lost(format_of("gemma4"), texts)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("written", VARIANTS)
def test_every_variant_is_read(variant: GemmaVariant, written: GemmaVariant) -> None:
    text = RENDERS[written]([("get", {"a": 1}), ("get", {"a": 1})])
    assert read(format_of(variant), FREE, f"{text}<|tool_response>") == Reading("", "", [GET, GET])


@pytest.mark.parametrize(
    ("written", "arguments"),
    [
        ("{a:None,b:True,c:False}", {"a": None, "b": True, "c": False}),
        ('{"a":"x}","b:":1}', {"a": "x}", "b:": 1}),
        (f"{{{QUOTE}a:b{QUOTE}:{QUOTE}c{QUOTE}}}", {"a:b": "c"}),
        ("{ a b : 1 ,\n c : [ 1 , 2 ] }", {"a b": 1, "c": [1, 2]}),
        (f'{{a:{QUOTE}"\\\n{QUOTE}}}', {"a": '"\\\n'}),
        ("{a:{b:{}},c:[[],{}]}", {"a": {"b": {}}, "c": [[], {}]}),
        ("{a:1e+16}", {"a": 1e16}),
    ],
)
def test_arguments_may_be_written_in_several_ways(written: str, arguments: dict[str, Any]) -> None:
    (call,) = read(format_of("gemma4"), FREE, f"{BEGIN}call:get{written}{END}").calls
    assert json.loads(call.arguments) == arguments


@pytest.mark.parametrize(
    ("written", "arguments", "rest"),
    [
        ("{a:x}", "{", "a:x}"),
        ("{a:1,}", '{"a": 1', ",}"),
        ("{a:1 b:2}", '{"a": 1', "b:2}"),
        ("{a}", "{", "a}"),
        ("{:1}", "{", ":1}"),
        ("{a:[1}]", '{"a": [1', "}]"),
        ("{a:NaN}", "{", "a:NaN}"),
    ],
)
def test_a_call_ends_where_its_notation_is_broken(written: str, arguments: str, rest: str) -> None:
    text = f"{BEGIN}call:get{written}{END}"
    assert read(format_of("gemma4"), FREE, text) == Reading("", rest + END, [Call("get", arguments)])


def test_reasoning_content_and_calls_follow_each_other() -> None:
    text = f"<|channel>thought\nhm\n<channel|>Hi \n{BEGIN}call:get{{a:1}}{END}\n Bye"
    assert read(format_of("gemma4"), FREE, text) == Reading("hm", "HiBye", [GET])
    assert read(format_of("gemma4"), FREE, text.removeprefix(THOUGHT.begin), starts_in_reasoning=True) == Reading(
        "hm", "HiBye", [GET]
    )


_STRICT = {
    "type": "object",
    "properties": {"b": {"type": "string"}, "A": {"type": "integer"}, "c:": {"enum": ["", "x"]}},
    "required": ["A"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("arguments", "is_allowed"),
    [
        ("{A:1}", True),
        (f"{{A:1,b:{QUOTE}{QUOTE}}}", True),
        (f"{{A:1,{QUOTE}c:{QUOTE}:{QUOTE}x{QUOTE}}}", True),
        (f"{{A:1,b:{QUOTE}y{QUOTE},{QUOTE}c:{QUOTE}:{QUOTE}{QUOTE}}}", True),
        (f"{{b:{QUOTE}y{QUOTE}}}", False),
        (f"{{b:{QUOTE}y{QUOTE},A:1}}", False),
        ("{A:1,d:2}", False),
        (f"{{A:{QUOTE}1{QUOTE}}}", False),
        ("{}", False),
    ],
)
def test_masks_hold_arguments_to_their_schema(arguments: str, is_allowed: bool) -> None:
    chat_format = format_of("gemma4")
    rules = chat_format.auto([Tool("get", parameters=json.dumps(_STRICT))], several=True)
    assert TOKENS.accepts(f"start: auto\n{rules}", f"Hi {BEGIN}call:get{arguments}{END}") == is_allowed


def test_the_work_is_proportional_to_the_text() -> None:
    head = f"{BEGIN}call:get{{"
    parts = [f"{head}a:1}}{END}", f"{head}a", f"{head}a:{QUOTE}", f"{head}a:1,", f"{head}a:[", "{a:", "1,"]
    check_linear(format_of("gemma4"), ["a", " ", "<", BEGIN, END, QUOTE, *parts])
