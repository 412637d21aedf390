"""Calls of Qwen3-Coder and Qwen 3.5 are read as they are written, and said as they are read."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from server.formats.base import CallArguments, CallStart, ReasoningMarks, Tool
from server.formats.qwen_coder import QwenCoderFormat
from tests.server.formats.walks import (
    TEXT,
    VALUES,
    Call,
    Masks,
    Reading,
    check_linear,
    check_prefixes,
    check_walk,
    plain_masks,
    read,
    tool,
)

QWEN = QwenCoderFormat(reasoning=ReasoningMarks())
TOKENS = Masks({"<tool_call>": False, "</tool_call>": False, "<think>": False, "</think>": False})
ALL_TOKENS = Masks({**dict.fromkeys(TOKENS.ids, False), "</parameter>": False, "</function>": True})
WITH_TOKENS, WITH_ALL_TOKENS = (QwenCoderFormat(masks.ids, ReasoningMarks()) for masks in (TOKENS, ALL_TOKENS))
FORMATS = [(QWEN, plain_masks()), (WITH_TOKENS, TOKENS), (WITH_ALL_TOKENS, ALL_TOKENS)]
WRITE = tool("write", path={"type": "string"}, mode={"type": "integer"}, data={})
ANY = Tool("any")
TOOLS = (WRITE, ANY, tool("ping"))
END = r"</parameter>[ \t\r\n]*(<parameter=|</function>|</tool_call>)"
PING = "<tool_call>\n<function=ping>\n</function>\n</tool_call>"


def rendered(name: str, **arguments: Any) -> str:
    parameters = "".join(f"<parameter={key}>\n{written(value)}\n</parameter>\n" for key, value in arguments.items())
    return f"<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>"


def written(value: Any) -> str:
    """As the templates write it: only lists and objects are JSON."""
    return json.dumps(value, ensure_ascii=False) if isinstance(value, list | dict) else str(value)


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (PING, "", [("ping", {})]),
        (f"Well. \n\n{PING}\n{PING}\n", "Well.", [("ping", {}), ("ping", {})]),
        (rendered("write", path="a/b", mode=420), "", [("write", {"path": "a/b", "mode": 420})]),
        (rendered("write", path="5", data="5"), "", [("write", {"path": "5", "data": 5})]),
        (rendered("write", path="\n a\n\n", data=""), "", [("write", {"path": "\n a\n\n", "data": ""})]),
        (rendered("write", data=None), "", [("write", {"data": None})]),
        (rendered("write", path="</parameter>\n</x>"), "", [("write", {"path": "</parameter>\n</x>"})]),
        ("<tool_call><function=write><parameter=path>a</parameter><parameter=mode>5</parameter></function></tool_call>",
         "", [("write", {"path": "a", "mode": 5})]),
        ("<tool_call><function=write><parameter=path>a</parameter></tool_call> b", "b", [("write", {"path": "a"})]),
        ("<tool_call><function=write><parameter=path>a</parameter></function> b", "b", [("write", {"path": "a"})]),
    ],
)  # fmt: skip
def test_calls_are_read(text, content, calls):
    reading = read(QWEN, TOOLS, f"<think>I see {PING}\n</think>\n{text}")
    assert reading.reasoning == f"I see {PING}"
    assert reading.content == content
    assert [(call.name, json.loads(call.arguments)) for call in reading.calls] == calls


@pytest.mark.parametrize(
    "text",
    [
        "a </parameter> ",
        "<tool_call>\nping\n</tool_call>",
        "<tool_call>\n<function=unknown>\n</function>\n</tool_call>",
        "<tool_call>\n<function=ping>\nnow\n</function>\n</tool_call>",
        "<tool_call>\n<function=ping",
        "<tool_call>\n<func",
        "<function=ping>\n</function>",
        '<tool_call>\n{"name": "ping", "arguments": {}}\n</tool_call>',
    ],
)
def test_what_looks_like_a_call_and_is_none_is_content(text):
    assert read(QWEN, TOOLS, text) == Reading("", text, [])
    assert read(QWEN, (), f"{text}{PING}") == Reading("", f"{text}{PING}", [])


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ("", ""),
        ("<para", ""),
        ("<parameter=path", ""),
        ("<parameter=path>", '{"path": "'),
        ("<parameter=path>\na\nb\n", '{"path": "a\\nb'),
        ("<parameter=path>\na\n</parameter>", '{"path": "a"'),
        ("<parameter=path>\na\n</parameter>\n</fun", '{"path": "a"'),
        ("<parameter=mode>\n5", ""),
        ("<parameter=path>\na\n</parameter>\n</function>\n</tool_", '{"path": "a"}'),
    ],
)
def test_of_a_call_that_is_cut_off_the_beginning_is_read(text, arguments):
    reading = read(QWEN, TOOLS, f"Well: <tool_call>\n<function=write>\n{text}")
    assert reading == Reading("", "Well:", [Call("write", arguments)])


def test_what_is_read_early_is_not_taken_back():
    check_prefixes(QWEN, TOOLS, f"Well.\n{rendered('write', mode=5, path='a b', data=[1])}\n{PING}")


def test_strings_are_passed_on_as_they_come():
    parser = QWEN.parser(TOOLS)
    pieces = [
        piece
        for part in ("<tool_call>\n<function=write>\n<parameter=path", ">\n", "a", '"b\n', "c\n</par")
        for piece in parser.push(part)
    ]
    assert pieces == [
        CallStart(0, "write"), CallArguments(0, '{"path": "'), CallArguments(0, "a"), CallArguments(0, '\\"b'),
        CallArguments(0, "\\nc"),
    ]  # fmt: skip


@given(TEXT, st.integers(), VALUES, st.lists(TEXT, max_size=2))
def test_all_arguments_are_read(path, mode, data, more):
    # A string that looks like another value is that value where the schema allows both.
    assume(not isinstance(data, str) and not re.search(END, written(data)) and not re.search(END, path))
    arguments = {"path": path, "mode": mode, "data": data}
    reading = read(QWEN, TOOLS, f"a {rendered('write', **arguments)}\n{PING}")
    assert reading.content == "a"
    assert [call.name for call in reading.calls] == ["write", "ping"]
    assert json.loads(reading.calls[0].arguments) == arguments


@settings(max_examples=50)
@given(TEXT, st.integers(-(10**18), 10**18), st.lists(st.integers() | st.text("a<>/ "), max_size=3))
def test_all_arguments_may_be_said(path, mode, data):
    assume("\n</parameter>" not in path and not re.search(END, path))
    text = rendered("write", path=path, mode=mode, data=data)
    for chat_format, masks in FORMATS:
        grammar = f"start: calls\n{chat_format.calls(TOOLS, several=True)}"
        assert masks.accepts(grammar, f"{text}\n{PING}")
        only_one = f"start: calls\n{chat_format.calls(TOOLS, several=False)}"
        assert not masks.accepts(only_one, f"{PING}\n{PING}")


def test_what_is_not_allowed_cannot_be_said():
    grammar = f"start: calls\n{QWEN.calls((WRITE,), several=True)}"
    assert plain_masks().accepts(grammar, rendered("write", path="a", mode=5, data="b"))
    for arguments in (
        {"path": "a", "data": 1},
        {"path": "a", "mode": "b", "data": 1},
        {"mode": 5, "path": "a", "data": 1},
    ):
        assert not plain_masks().accepts(grammar, rendered("write", **arguments))
    for path in ("a</parameter>\n</function>", "a</parameter><parameter=mode>"):  # the parser would see its end
        assert not plain_masks().accepts(grammar, rendered("write", path=path, mode=5, data="b"))
    assert not plain_masks().accepts(grammar, PING)


@pytest.mark.parametrize(
    ("schema", "yes", "no"),
    [
        ({"type": ["string", "null"]}, ["", "a", "null", "nulls"], []),
        ({"type": ["string", "integer"], "minimum": 10}, ["a5", "12", ""], ["9", "5a"]),
        ({"type": ["string", "object"], "required": ["a"]}, ["a", '{"a": 1}'], ["{", '{"b": 1}', " {"]),
        ({"type": "string", "pattern": "^a+$", "maxLength": 3}, ["a", "aaa"], ["", "aaaa", "b"]),
        ({"type": "string", "pattern": "b"}, ["b", "abc"], ["", "ac"]),
        ({"type": "string", "minLength": 1}, ["a\n", "\n"], [""]),
        ({"enum": ["a", "5", 5, [1]]}, ["a", "5", "[1]"], ["b", "55", "[2]", ""]),
        ({"const": "a b"}, ["a b"], ["a"]),
        ({"anyOf": [{"const": "a"}, {"type": "boolean"}]}, ["a", "true"], ["b", "True"]),
        ({"type": "boolean"}, ["true", "false"], ["True", "a"]),
        ({"oneOf": [{"$ref": "#/$defs/x"}, {"type": "string", "maxLength": 1}]}, ["a", '{"y": 1}'], ["ab", "{}"]),
    ],
)
def test_values_of_a_schema(schema, yes, no):
    root = {"properties": {"v": schema}, "required": ["v"], "$defs": {"x": {"type": "object", "required": ["y"]}}}
    one = Tool("one", parameters=json.dumps(root))
    for chat_format, masks in FORMATS:
        grammar = f"start: calls\n{chat_format.calls((one,), several=False)}"
        assert [value for value in yes if not masks.accepts(grammar, rendered("one", v=value))] == []
        assert [value for value in no if masks.accepts(grammar, rendered("one", v=value))] == []


def test_a_tool_that_declares_no_properties_takes_all():
    grammar = f"start: calls\n{QWEN.calls((ANY,), several=False)}"
    assert plain_masks().accepts(grammar, rendered("any", a="b", c=[1]))
    assert plain_masks().accepts(grammar, rendered("any"))
    for schema in ({"properties": {}}, {"additionalProperties": False}):
        grammar = f"start: calls\n{QWEN.calls((Tool('any', parameters=json.dumps(schema)),), several=False)}"
        assert plain_masks().accepts(grammar, rendered("any"))
        assert not plain_masks().accepts(grammar, rendered("any", a="b"))


@pytest.mark.parametrize(
    ("schema", "problem"),
    [
        ({"minProperties": 1}, "has minProperties"),
        ({"anyOf": [{}, {}]}, "has anyOf"),
        ({"properties": {"a>b": {}}}, "a parameter named 'a>b'"),
        (
            {"properties": {"a": {"allOf": [{"type": "string"}, {"minLength": 1}]}}},
            "has allOf where a string is allowed",
        ),
        ({"properties": {"a": {"not": {}}}}, "has not where a string is allowed"),
        ({"properties": {"a": {"$ref": "#/$defs/a"}}}, r"has \$ref where a string is allowed"),
        ({"properties": {"a": {"maxLength": 3, "anyOf": [{"maxLength": 4}]}}}, "has anyOf beside a keyword"),
        (
            {"properties": {"a": {"$ref": "#/$defs/a"}}, "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}, {}]}}},
            "too many",
        ),
    ],
)
def test_a_schema_that_cannot_be_written_is_refused(schema, problem):
    with pytest.raises(ValueError, match=f"the schema of f .*{problem}.*cannot express"):
        QWEN.calls((Tool("f", parameters=json.dumps(schema)),), several=True)


def test_parameters_of_the_same_schema_share_their_rules():
    text, noted = {"type": "string"}, {"type": "string", "description": "A text."}
    grammar = QWEN.calls((tool("f", a=text, b=noted), tool("g", a=text, b={"type": "null"})), several=True)
    assert [name for name in ("value_0:", "value_1:", "value_2:") if name in grammar] == ["value_0:", "value_1:"]


@pytest.mark.parametrize("seed", range(50))
def test_what_is_said_under_the_mask_is_valid(seed):
    for chat_format, masks in FORMATS:
        check_walk(chat_format, masks, seed, "\n</parameter>")


def test_text_may_end_with_calls():
    for chat_format, masks in FORMATS:
        grammar = f"start: auto\n{chat_format.auto(TOOLS, several=True, unlike='<think>')}"
        for text in ("", "Hi <tool_cal", PING, f"Hi.\n{PING}\n{PING}"):
            assert masks.accepts(grammar, text), text
        for text in ("<tool_call>", "Hi <tool_call>\n<function=pong>", f"{PING} and", " <think>"):
            assert not masks.accepts(grammar, text), text


@pytest.mark.parametrize(
    ("begin", "part"),
    [
        ("", "<tool_call>"),
        ("", "<tool_call><function=ping>"),
        ("", PING),
        ("<tool_call><function=write><parameter=path>", 'a"\n'),
        ("<tool_call><function=write><parameter=path>", "</parameter>\n"),
        ("<tool_call><function=write><parameter=path>\n", "<"),
        ("<tool_call><function=write><parameter=data>\n", "[\n"),
        ("<tool_call><function=write><parameter=", "a"),
        ("<tool_call><function=write>", "<parameter=path>a</parameter>"),
        ("<tool_call><function=write>", "<parameter="),
        ("<tool_call><function=write><parameter=path></parameter>", "\n"),
    ],
)
def test_the_cost_is_proportional_to_the_text(begin, part):
    check_linear(QWEN, TOOLS, lambda length: begin + part * (length // len(part)))
