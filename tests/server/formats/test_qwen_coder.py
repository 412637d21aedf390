"""Qwen3-Coder and Qwen 3.5: one tag around every argument, whose value is plain text."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import strategies as st

from pilotfish.server.formats.base import ReasoningMarks, Tool
from pilotfish.server.formats.tagged import QwenCoderFormat
from tests.server.formats.laws import TYPED, Calls, Family, Spelling, called, typed_calls
from tests.server.formats.walks import TEXT, VALUES, Call, Masks, Reading, plain_masks, tool

TOKENS = Masks({"<tool_call>": False, "</tool_call>": False, "<think>": False, "</think>": False, "<|im_end|>": True})
ALL_TOKENS = Masks({**dict.fromkeys(TOKENS.ids, False), "</parameter>": False, "</function>": True})
PING = "<tool_call>\n<function=get_x>\n</function>\n</tool_call>"
END = r"</parameter>[ \t\r\n]*(<parameter=|</function>|</tool_call>)"


def write(calls: Calls) -> str:
    """As the chat templates write calls: only lists and objects are JSON."""

    def written(value: Any) -> str:
        return json.dumps(value, ensure_ascii=False) if isinstance(value, list | dict) else str(value)

    def one(name: str, given: dict[str, Any]) -> str:
        parameters = (f"<parameter={key}>\n{written(value)}\n</parameter>\n" for key, value in given.items())
        return f"<tool_call>\n<function={name}>\n{''.join(parameters)}</function>\n</tool_call>"

    return "\n".join(one(*call) for call in calls)


def spelling(name: str, masks: Masks, *texts: str) -> Spelling:
    def is_text(text: str) -> bool:
        return "\n</parameter>" not in text and not re.search(END, text)

    strings = st.text() | st.lists(st.sampled_from([*"\n </>a5", *texts]), max_size=6).map("".join)
    calls = typed_calls(is_text, strings, st.integers() | st.text("a<>/ "))
    return Spelling(name, QwenCoderFormat(masks.ids, ReasoningMarks()), masks, write, calls)


def in_call(text: str) -> str:
    return f"<tool_call>\n<function=get>\n{text}"


A_STRING = "<parameter=a>\nx\n</parameter>"
QWEN_CODER = Family(
    name="qwen_coder",
    spellings=(
        spelling("qwen_coder", TOKENS, "</parameter>", "<parameter="),
        spelling("qwen_coder-text", plain_masks(), "</parameter>", "<parameter="),
        spelling("qwen_coder-all", ALL_TOKENS),
    ),
    tools=TYPED,
    one=("get", {"a": "x", "b": 1, "c": []}),
    wild=typed_calls(lambda text: not re.search(END, text), TEXT, VALUES),
    ends=("\n</parameter>",),
    readings={
        in_call(
            "<parameter=a>\na/b\n</parameter>\n<parameter=b>\n420\n</parameter>\n</function>\n</tool_call>"
        ): called('{"a": "a/b", "b": 420}'),
        write([("get", {"a": "5", "any": "5"})]): called('{"a": "5", "any": 5}'),
        write([("get", {"a": "\n a\n\n", "any": ""})]): called('{"a": "\\n a\\n\\n", "any": ""}'),
        write([("get", {"any": None})]): called('{"any": null}'),
        write([("get", {"a": "</parameter>\n</x>"})]): called('{"a": "</parameter>\\n</x>"}'),
        "<tool_call><function=get><parameter=a>a</parameter><parameter=b>5</parameter></function></tool_call>": called(
            '{"a": "a", "b": 5}'
        ),
        "<tool_call><function=get><parameter=a>a</parameter></tool_call> b": called('{"a": "a"}', content="b"),
        "<tool_call><function=get><parameter=a>a</parameter></function> b": called('{"a": "a"}', content="b"),
        f"{in_call('<parameter=a>')}x</function></tool_call> and {PING}": Reading(
            "", f"{in_call('<parameter=a>')}x</function></tool_call> and", [Call("get_x", "{}")]
        ),
        f"{in_call(A_STRING)}\n</function>\n</tool_": called('{"a": "x"}'),
    },
    cut={
        **dict.fromkeys(
            (
                f"Well: {in_call('')}",
                f"Well: {in_call('<para')}",
                f"Well: {in_call('<parameter=a')}",
                f"Well: {in_call('<parameter=a>')}",
                f"Well: {in_call('<parameter=a>a')}",
                f"Well: {in_call(A_STRING)}",
                f"Well: {in_call(A_STRING)}</fun",
            ),
            called(content="Well: "),
        ),
        f"{in_call(A_STRING)}\n</function>\n</tool_": called('{"a": "x"}'),
    },
    contents=(
        "a </parameter> ",
        "<tool_call>\nget\n</tool_call>",
        "<tool_call>\n<function=other>\n</function>\n</tool_call>",
        "<tool_call>\n<function=get>\nnow\n</function>\n</tool_call>",
        "<tool_call>\n<function=get",
        "<tool_call>\n<func",
        in_call(A_STRING),
        "<function=get>\n</function>",
        '<tool_call>\n{"name": "get", "arguments": {}}\n</tool_call>',
    ),
    broken=(
        write([("get", {"a": "x", "c": []})]),
        write([("get", {"a": "x", "b": "y", "c": []})]),
        write([("get", {"b": 5, "a": "x", "c": []})]),
        # The parser would see the end of the value.
        write([("get", {"a": "x</parameter>\n</function>", "b": 1, "c": []})]),
        write([("get", {"a": "x</parameter><parameter=b>", "b": 1, "c": []})]),
        PING.replace("get_x", "other"),
    ),
    hostile=("<function=get>", "<parameter=", "<parameter=a>\n", "\n</parameter>", "</function>", "\n</function>\n"),
    repeated=(
        "<tool_call><function=set>",
        PING,
        ("<tool_call><function=get><parameter=a>", 'a"\n'),
        ("<tool_call><function=get><parameter=a>", "</parameter>\n"),
        ("<tool_call><function=get><parameter=a>\n", "<"),
        ("<tool_call><function=get><parameter=c>\n", "[\n"),
        ("<tool_call><function=get><parameter=", "a"),
        ("<tool_call><function=get>", "<parameter=a>a</parameter>"),
        ("<tool_call><function=get>", "<parameter="),
        ("<tool_call><function=get><parameter=a></parameter>", "\n"),
    ),
)


@pytest.mark.parametrize(
    ("schema", "yes", "no"),
    [
        ({"type": ["string", "null"]}, ["", "a", "null", "nulls"], []),
        ({"type": ["string", "integer"], "minimum": 10}, ["a5", "12", "", "5a"], ["9", "5 "]),
        ({"type": ["string", "object"], "required": ["a"]}, ["a", '{"a": 1}'], ["{", '{"b": 1}', " {"]),
        ({"type": "string", "pattern": "^a+$", "maxLength": 3}, ["a", "aaa"], ["", "aaaa", "b"]),
        ({"type": "string", "pattern": "b"}, ["b", "abc"], ["", "ac"]),
        ({"type": "string", "minLength": 1}, ["a\n", "\n"], [""]),
        ({"enum": ["a", "5", 5, [1]]}, ["a", "5", "[1]"], ["b", "55", "[2]", ""]),
        ({"const": "a b"}, ["a b"], ["a"]),
        ({"allOf": [{"type": "string"}, {"minLength": 1}]}, ["a"], [""]),
        ({"type": "string", "maxLength": 3, "anyOf": [{"maxLength": 4}, {"pattern": "^b"}]}, ["abc", "b"], ["abcd"]),
        ({"type": "string", "format": "date"}, ["2024-02-29"], ["2023-02-29", "a"]),
        ({"type": ["string", "integer"], "multipleOf": 3}, ["a", "12"], ["5", "5a"]),
        ({"anyOf": [{"const": "a"}, {"type": "boolean"}]}, ["a", "true"], ["b", "True"]),
        ({"type": "boolean"}, ["true", "false"], ["True", "a"]),
        ({"oneOf": [{"$ref": "#/$defs/x"}, {"type": "string", "maxLength": 1}]}, ["a", '{"y": 1}'], ["ab", "{}"]),
    ],
)
def test_values_of_a_schema(schema, yes, no):
    root = {"properties": {"v": schema}, "required": ["v"], "$defs": {"x": {"type": "object", "required": ["y"]}}}
    tools = [Tool("one", parameters=json.dumps(root))]
    for each in QWEN_CODER.spellings:
        assert [value for value in yes if not each.allows("calls", tools, write([("one", {"v": value})]))] == []
        assert [value for value in no if each.allows("calls", tools, write([("one", {"v": value})]))] == []


def test_a_tool_that_declares_no_properties_takes_all():
    nothing, something = (write([("any", given)]) for given in ({}, {"a": "b", "c": [1]}))
    for schema, takes_all in (({}, True), ({"properties": {}}, False), ({"additionalProperties": False}, False)):
        tools = [Tool("any", parameters=json.dumps(schema))]
        assert QWEN_CODER.first.allows("calls", tools, nothing)
        assert QWEN_CODER.first.allows("calls", tools, something) == takes_all


@pytest.mark.parametrize(
    ("schema", "problem"),
    [
        ({"minProperties": 1}, "minProperties is not supported in .*format of calls"),
        ({"anyOf": [{}, {}]}, "the schema of f has several lists of parameters"),
        ({"properties": {"a>b": {}}}, "a parameter named 'a>b'"),
        ({"properties": {"a": {"not": {}}}}, "not is not supported"),
        ({"properties": {"a": {"$ref": "#/$defs/a"}}}, r"\$ref .* does not refer to a part"),
        (
            {"properties": {"a": {"$ref": "#/$defs/a"}}, "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}, {}]}}},
            r"\$ref refers to itself",
        ),
    ],
)
def test_a_schema_that_cannot_be_written_is_refused(schema, problem):
    with pytest.raises(ValueError, match=problem):
        QWEN_CODER.first.format.calls((Tool("f", parameters=json.dumps(schema), strict=True),), several=True)


def test_parameters_of_the_same_schema_share_their_rules():
    text, noted = {"type": "string"}, {"type": "string", "description": "A text."}
    tools = (tool("f", a=text, b=noted), tool("g", a=text, b={"type": "null"}))
    grammar = QWEN_CODER.first.format.calls(tools, several=True)
    assert [name for name in ("value_0:", "value_1:", "value_2:") if name in grammar] == ["value_0:", "value_1:"]
