"""Gemma, in both variants: arguments in a notation of its own."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings

from pilotfish.server.formats.base import ReasoningMarks, Tool
from pilotfish.server.formats.gemma import GemmaFormat
from tests.server.formats.laws import FREE, Family, Render, Spelling, called, hostile_texts, some_calls
from tests.server.formats.walks import Masks, markers_of, read

BEGIN, END, QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
MARKS = {"functiongemma": ("<start_function_call>", "<end_function_call>", "<escape>"), "gemma4": (BEGIN, END, QUOTE)}
TOKENS = Masks(dict.fromkeys([*markers_of(GemmaFormat), "<|channel>", "<channel|>", "<|tool_response>"], True))
THOUGHT = ReasoningMarks("<|channel>thought", "<channel|>")


def write_in(variant: str) -> Render:
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


HEAD = f"{BEGIN}call:get{{"
GEMMA = Family(
    name="gemma",
    spellings=[
        Spelling(
            variant,
            GemmaFormat(TOKENS.ids, THOUGHT, variant=variant),
            TOKENS,
            write_in(variant),
            some_calls("]", ",", ":", "call:"),
        )
        for variant in ("gemma4", "functiongemma")
    ],
    wild=some_calls(BEGIN, END, "<escape>"),
    ends=(":",),
    readings={
        f"{BEGIN}call:get{{a:1}}}}{END}{HEAD}a:1}}{HEAD}a:1}}{END}": called(*['{"a": 1}'] * 3),
        **{
            f"{broken}\n{HEAD}a:1}}{END}": called('{"a": 1}', content=broken)
            for broken in (f"{HEAD}a:{QUOTE}x}}{END}", f"{HEAD}a:[1,2}}{END}", f"{HEAD}a:'x'}}{END}")
        },
    },
    cut=dict.fromkeys((f"{HEAD}a:{QUOTE}x", HEAD, f"{HEAD}a", f"{HEAD}a:1"), called()),
    contents=(
        f"{BEGIN}call:other{{}}{END}",
        f"{BEGIN}get{{}}{END}",
        f"{BEGIN}call:get(){END}",
        f"{BEGIN} x",
        BEGIN,
        QUOTE,
        *(f"{HEAD}{written}}}{END}" for written in ("a:x", "a:1,", "a:1 b:2", "a", ":1", "a:[1}]", "a:NaN", "a=1")),
    ),
    hostile=("call:", "call:get{", "a:", "null", "1"),
    repeated=(f"{HEAD}a", f"{HEAD}a:{QUOTE}", f"{HEAD}a:1,", f"{HEAD}a:[", "{a:", "1,"),
)
FORMAT = GEMMA.first.format


@settings(max_examples=40)
@given(hostile_texts(QUOTE, "a:", "null", "1", "[1", "{a:"))
def test_arguments_are_always_json_or_the_beginning_of_it(text: str) -> None:
    for call in read(FORMAT, FREE, f"{HEAD}{text}", has_structure=True).calls[:1]:
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
    (call,) = read(FORMAT, FREE, f"{BEGIN}call:get{written}{END}").calls
    assert json.loads(call.arguments) == arguments


_STRICT = {
    "type": "object",
    "properties": {"b": {"type": "string", "pattern": "^y?$"}, "A": {"type": "integer"}, "c:": {"enum": ["", "x"]}},
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
        (f"{{A:1,b:{QUOTE}z{QUOTE}}}", False),
        (f"{{b:{QUOTE}y{QUOTE}}}", False),
        (f"{{b:{QUOTE}y{QUOTE},A:1}}", False),
        ("{A:1,d:2}", False),
        (f"{{A:{QUOTE}1{QUOTE}}}", False),
        ("{}", False),
    ],
)
def test_masks_hold_arguments_to_their_schema(arguments: str, is_allowed: bool) -> None:
    tools = [Tool("get", parameters=json.dumps(_STRICT))]
    assert GEMMA.first.allows("auto", tools, f"Hi {BEGIN}call:get{arguments}{END}") == is_allowed
