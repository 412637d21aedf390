"""Calls of Hermes 2 Pro, Qwen 2.5 and Qwen 3 are read as they are written, and said as they are read."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.formats.base import CallArguments, CallStart, ReasoningMarks, Tool
from server.formats.hermes import HermesFormat
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

HERMES = HermesFormat(reasoning=ReasoningMarks())
TOKENS = Masks({"<tool_call>": False, "</tool_call>": False, "<think>": False, "</think>": False, "<|im_end|>": True})
WITH_TOKENS = HermesFormat(TOKENS.ids, ReasoningMarks())
ANY = Tool("any")
TOOLS = (ANY, tool("add", a={"type": "integer"}, b={"type": "integer"}), tool("ping"))
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
ADD = Call("add", '{"a": 1, "b": 2}')


def rendered(name: str, arguments: object, *, ascii_only: bool = False) -> str:
    call = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=ascii_only)
    return f"<tool_call>\n{call}\n</tool_call>"


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (CALL, "", [ADD]),
        (f"Let me add. \n\n{CALL}", "Let me add.", [ADD]),
        (f"{CALL}\n{CALL}\n", "", [ADD, ADD]),
        (f"{CALL} {CALL}{CALL}", "", [ADD, ADD, ADD]),
        (f"{CALL}\n\nDone. ", "Done. ", [ADD]),
        ('<tool_call>{"name":"ping","arguments":{}}</tool_call>', "", [Call("ping", "{}")]),
        ('<tool_call>\n { "name" : "ping" , "arguments" : { } } \n</tool_call> ', "", [Call("ping", "{ }")]),
        ('<tool_call>\n{"arguments": {"a": 1, "b": 2}, "name": "add"}\n</tool_call>', "", [ADD]),
        ('<tool_call>{"arguments": {"x": "<tool_call>}"}, "name": "any"}', "", [Call("any", '{"x": "<tool_call>}"}')]),
        ('<tool_call>\n{"name": "ping"}\n</tool_call>', "", [Call("ping", "{}")]),
        ('<tool_call>{"name": "any", "arguments": {"x": "</tool_call>"}}', "", [Call("any", '{"x": "</tool_call>"}')]),
    ],
)  # fmt: skip
def test_calls_are_read(text, content, calls):
    assert read(HERMES, TOOLS, text) == Reading("", content, calls)
    assert read(HERMES, TOOLS, f"<think>\nI see {CALL}\n</think>\n{text}") == Reading(f"I see {CALL}", content, calls)


@pytest.mark.parametrize(
    "text",
    [
        " Hi. \n",
        "a < b <tool_cal",
        "<tool_call>",
        " <tool_call>\nno JSON\n</tool_call> ",
        '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>\n',
        '<tool_call>{"arguments": {"a": "}"}, "name": "unknown"}</tool_call>',
        '<tool_call>{"arguments": {"a": 1}}</tool_call>',
        '<tool_call>{"name": "add" "arguments": {}}</tool_call>',
        '<tool_call>{"name": "add", "unknown": {}}</tool_call>',
        '<tool_call>"name": "ping", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "add", "name": "add"}</tool_call>',
        '<tool_call>{"name": "add", "arguments": 5}</tool_call>',
        '<tool_call>{"name": "add", "arguments": "{}"}</tool_call>',
        "<tool_call>{}</tool_call>",
        '<tool_call>["add"]</tool_call>',
        '<tool_call>{"na',
        '<tool_call>{"name": "ad',
        '<tool_call>{"arguments": {"a": 1}, "name',
        "</tool_call>",
    ],
)
def test_what_looks_like_a_call_and_is_none_is_content(text):
    assert read(HERMES, TOOLS, text) == Reading("", text, [])


def test_a_call_after_a_broken_one_is_read():
    broken = '<tool_call>\n{"name": "unknown"}\n</tool_call>'
    assert read(HERMES, TOOLS, f"{broken}\n{CALL}") == Reading("", broken, [ADD])
    assert read(HERMES, TOOLS, f"<tool_call>{CALL}") == Reading("", "<tool_call>", [ADD])


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ('<tool_call>\n{"name": "add"', ""),
        ('<tool_call>\n{"name": "add", "argum', ""),
        ('<tool_call>\n{"name": "add", "arguments": ', ""),
        ('<tool_call>\n{"name": "add", "arguments": {"a": 1, "', '{"a": 1, "'),
        ('<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}', '{"a": 1, "b": 2}'),
        ('<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool', '{"a": 1, "b": 2}'),
        ('<tool_call>\n{"arguments": {"a": 1, "b": 2}, "name": "add"', '{"a": 1, "b": 2}'),
        ('<tool_call>\n{"arguments": {"a": 1, "b": 2}, "name": "add"}', '{"a": 1, "b": 2}'),
    ],
)
def test_of_a_call_that_is_cut_off_the_beginning_is_read(text, arguments):
    assert read(HERMES, TOOLS, f"Well: {text}") == Reading("", "Well:", [Call("add", arguments)])


@pytest.mark.parametrize("text", [f"Well.\n{CALL}\n{CALL}", rendered("any", {"a": ["<tool_call>", {"b": 'x"\\'}]})])
def test_what_is_read_early_is_not_taken_back(text):
    check_prefixes(HERMES, TOOLS, text)


def test_after_arguments_nothing_is_lost():
    text = '<tool_call>{"name": "ping", "arguments": {}, "why": "?"}</tool_call>'
    assert read(HERMES, TOOLS, text) == Reading("", ', "why": "?"}</tool_call>', [Call("ping", "{}")])


def test_arguments_are_passed_on_as_they_come():
    parser = HERMES.parser(TOOLS)
    pieces = [
        parser.push(part)
        for part in ("<tool_call>\n", '{"name": "add", "argu', 'ments": {', '"a": ', "1", ', "b": 2}', "}\n")
    ]
    assert pieces == [
        [], [], [CallStart(0, "add"), CallArguments(0, "{")], [CallArguments(0, '"a": ')], [CallArguments(0, "1")],
        [CallArguments(0, ', "b": 2}')], [],
    ]  # fmt: skip


def test_without_tools_calls_are_content():
    assert read(HERMES, (), f"<think>a</think>{CALL}") == Reading("a", CALL, [])


def test_tokens_of_turns_are_dropped():
    text = f"<think>a<|im_end|></think>b<|im_end|>\n{CALL}<|im_end|>"
    assert read(WITH_TOKENS, TOOLS, text) == Reading("a", "b", [ADD])
    assert (
        read(HERMES, TOOLS, "a<|im_end|>b").content == "a<|im_end|>b"
    )  # spelled by a tokenizer that has no such token


def test_names_are_json():
    tools = (Tool('größe "1"'), Tool("größe"))
    for one in tools:
        for ascii_only in (False, True):
            text = rendered(one.name, {}, ascii_only=ascii_only)
            assert read(HERMES, tools, text) == Reading("", "", [Call(one.name, "{}")])


@given(st.dictionaries(TEXT, VALUES, max_size=4), st.booleans())
def test_all_arguments_are_read(arguments, ascii_only):
    reading = read(HERMES, TOOLS, f"a\n{rendered('any', arguments, ascii_only=ascii_only)}\n{CALL}")
    assert reading.content == "a"
    assert [call.name for call in reading.calls] == ["any", "add"]
    assert json.loads(reading.calls[0].arguments) == arguments


@settings(max_examples=50)
@given(st.dictionaries(TEXT, VALUES, max_size=4))
def test_all_arguments_may_be_said(arguments):
    text = rendered("any", arguments)
    for chat_format, masks in ((HERMES, plain_masks()), (WITH_TOKENS, TOKENS)):
        one, more = (f"start: calls\n{chat_format.calls(TOOLS, several=several)}" for several in (False, True))
        if not any(f"\\u00{code:02x}" in text for code in range(32)):  # the masks allow no such escapes
            assert masks.accepts(one, text)
            assert masks.accepts(more, f"{text}\n{CALL}\n{text}")
        assert not masks.accepts(one, f"{text}\n{CALL}")


@pytest.mark.parametrize("seed", range(50))
def test_what_is_said_under_the_mask_is_valid(seed):
    check_walk(HERMES, plain_masks(), seed)
    check_walk(WITH_TOKENS, TOKENS, seed)


@pytest.mark.parametrize(("chat_format", "masks"), [(HERMES, plain_masks()), (WITH_TOKENS, TOKENS)])
def test_text_may_end_with_calls(chat_format, masks):
    grammar = f"start: auto\n{chat_format.auto(TOOLS, several=True, unlike='<think>')}"
    for text in ("", "Hi <tool_cal", CALL, f"Hi.\n{CALL}", f"Hi <tool> {CALL}\n{CALL}", "a <thin", "a < think>"):
        assert masks.accepts(grammar, text), text
    wrong = CALL.replace("1", '"1"')
    for text in ("<tool_call>", f"Hi {wrong}", f"{CALL} and", "<think>", f" <think>{CALL}", CALL.replace("add", "sub")):
        assert not masks.accepts(grammar, text), text
    only_one = f"start: auto\n{chat_format.auto(TOOLS, several=False)}"
    assert masks.accepts(only_one, f"<{CALL}")
    assert not masks.accepts(only_one, f"{CALL}\n{CALL}")


@pytest.mark.parametrize(
    ("begin", "part"),
    [
        ("", "<"),
        ("", "<tool_call>"),
        ("", "<tool_call>{"),
        ("", '<tool_call>{"name": "ping"'),
        ("", "<tool_call>\n"),
        ("<tool_call>", "\n"),
        ('<tool_call>{"name": "any", "arguments": {"', 'x\\"'),
        ('<tool_call>{"arguments": {"', 'x\\"'),
        ('<tool_call>{"name": "any", "arguments": {', "[{"),
        ("", CALL),
    ],
)
def test_the_cost_is_proportional_to_the_text(begin, part):
    check_linear(HERMES, TOOLS, lambda length: begin + part * (length // len(part)))
