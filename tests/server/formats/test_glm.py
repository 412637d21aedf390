"""Calls of GLM are read as they are written, with line breaks and without, and said as they are read."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from server.formats.base import CallArguments, CallStart, ReasoningMarks
from server.formats.glm import GlmFormat
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

GLM = GlmFormat(reasoning=ReasoningMarks())
TOKENS = Masks({**dict.fromkeys([*GlmFormat.markers, "<think>", "</think>"], False), "<|observation|>": True})
WITH_TOKENS = GlmFormat(TOKENS.ids, ReasoningMarks())
FORMATS = [(GLM, plain_masks()), (WITH_TOKENS, TOKENS)]
TOOLS = (
    tool("write", path={"type": "string"}, mode={"type": "integer"}, data={"type": ["array", "object"]}),
    tool("ping"),
    tool("ping2"),
)
PING = "<tool_call>ping\n</tool_call>"


def rendered(name: str, line: str = "\n", **arguments: Any) -> str:
    parameters = "".join(
        f"<arg_key>{key}</arg_key>{line}<arg_value>{written(value)}</arg_value>{line}"
        for key, value in arguments.items()
    )
    return f"<tool_call>{name}{line}{parameters}</tool_call>"


def written(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (PING, "", [("ping", {})]),
        ("<tool_call>ping</tool_call><tool_call>\n ping2\n</tool_call>\n", "", [("ping", {}), ("ping2", {})]),
        (f"Well. \n\n{PING}\nDone.", "Well.Done.", [("ping", {})]),
        (rendered("write", path="\na", mode=5, data=[{}]), "", [("write", {"path": "\na", "mode": 5, "data": [{}]})]),
        (rendered("write", "", mode=5, path=" 5"), "", [("write", {"mode": 5, "path": " 5"})]),
        (rendered("write", path="</arg_value>\n<arg>"), "", [("write", {"path": "</arg_value>\n<arg>"})]),
        (rendered("write", unknown=None), "", [("write", {"unknown": None})]),
    ],
)  # fmt: skip
def test_calls_are_read(text, content, calls):
    reading = read(GLM, TOOLS, f"\n<think>I see {PING}</think>\n{text}")
    assert reading.reasoning == f"I see {PING}"
    assert reading.content == content
    assert [(call.name, json.loads(call.arguments)) for call in reading.calls] == calls


@pytest.mark.parametrize(
    "text",
    [
        "a </arg_value> ",
        "<tool_call>pong\n</tool_call>",
        "<tool_call>ping3\n</tool_call>",
        "<tool_call>ping now</tool_call>",
        "<tool_call>pin",
        "<tool_call>\n",
        '<tool_call>\n{"name": "ping"}\n</tool_call>',
    ],
)
def test_what_looks_like_a_call_and_is_none_is_content(text):
    assert read(GLM, TOOLS, text) == Reading("", text, [])
    assert read(GLM, (), f"{text}{PING}") == Reading("", f"{text}{PING}", [])


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ("", ""),
        ("\n<arg_", ""),
        ("\n<arg_key>path</arg_key>\n<arg", ""),
        ("\n<arg_key>path</arg_key>\n<arg_value>a\n", '{"path": "a\\n'),
        ("\n<arg_key>path</arg_key>\n<arg_value>a</arg", '{"path": "a'),
        ("\n<arg_key>path</arg_key>\n<arg_value>a</arg_value>\n</tool", '{"path": "a"'),
        ("\n<arg_key>mode</arg_key>\n<arg_value>5", ""),
    ],
)
def test_of_a_call_that_is_cut_off_the_beginning_is_read(text, arguments):
    assert read(GLM, TOOLS, f"Well: <tool_call>write{text}") == Reading("", "Well:", [Call("write", arguments)])


def test_what_is_read_early_is_not_taken_back():
    check_prefixes(
        GLM, TOOLS, f"Well.\n{rendered('write', mode=5, path='a b', data=[1])}\n<tool_call>ping2</tool_call>"
    )


def test_strings_are_passed_on_as_they_come():
    parser = GLM.parser(TOOLS)
    parts = ("<tool_call>write\n<arg_key>path</arg_key>", "<arg_value>", "a", '"\n', "</arg_value>\n</tool_call>")
    pieces = [piece for part in parts for piece in parser.push(part)]
    texts = ['{"path": "', "a", '\\"\\n', '"', "}"]
    assert pieces == [CallStart(0, "write"), *(CallArguments(0, text) for text in texts)]


def test_tokens_of_turns_are_dropped():
    assert read(WITH_TOKENS, TOOLS, f"a{PING}<|observation|>") == Reading("", "a", [Call("ping", "{}")])


@given(TEXT, st.integers(), st.lists(VALUES, max_size=3), st.sampled_from(["", "\n"]))
def test_all_arguments_are_read(path, mode, data, line):
    assume("</arg_value>" not in path + written(data))
    arguments = {"path": path, "mode": mode, "data": data}
    reading = read(GLM, TOOLS, f"a {rendered('write', line, **arguments)}\n{PING}")
    assert reading.content == "a"
    assert [call.name for call in reading.calls] == ["write", "ping"]
    assert json.loads(reading.calls[0].arguments) == arguments


@settings(max_examples=50)
@given(TEXT, st.integers(-(10**18), 10**18), st.lists(st.integers() | st.text("a<>/ "), max_size=3), st.booleans())
def test_all_arguments_may_be_said(path, mode, data, has_lines):
    assume(not any(marker in path for marker in TOKENS.ids))
    line = "\n" if has_lines else ""
    text = rendered("write", line, path=path, mode=mode, data=data)
    for chat_format, masks in FORMATS:
        one, more = (f"start: calls\n{chat_format.calls(TOOLS, several=several)}" for several in (False, True))
        assert masks.accepts(one, text)
        assert masks.accepts(more, f"{text}\n{PING}{text}")
        assert not masks.accepts(one, f"{text}\n{PING}")


def test_what_is_not_allowed_cannot_be_said():
    for chat_format, masks in FORMATS:
        grammar = f"start: calls\n{chat_format.calls(TOOLS, several=True)}"
        for arguments in ({"path": "a", "data": []}, {"path": "a", "mode": "b", "data": []}):
            assert not masks.accepts(grammar, rendered("write", **arguments))


def test_a_name_that_cannot_be_written_is_refused():
    with pytest.raises(ValueError, match="a parameter named 'a</arg_key>'"):
        GLM.calls((tool("f", **{"a</arg_key>": {}}),), several=True)


@pytest.mark.parametrize("seed", range(50))
def test_what_is_said_under_the_mask_is_valid(seed):
    for chat_format, masks in FORMATS:
        check_walk(chat_format, masks, seed, "</arg_value>")


def test_text_may_end_with_calls():
    for chat_format, masks in FORMATS:
        grammar = f"start: auto\n{chat_format.auto(TOOLS, several=True, unlike='<think>')}"
        for text in ("", "Hi <tool_cal", PING, f"Hi.\n{PING}\n{PING}"):
            assert masks.accepts(grammar, text), text
        for text in ("<tool_call>", "Hi <tool_call>pong</tool_call>", f"{PING} and", " <think>"):
            assert not masks.accepts(grammar, text), text


@pytest.mark.parametrize(
    ("begin", "part"),
    [
        ("", "<tool_call>"),
        ("", "<tool_call>ping"),
        ("", PING),
        ("<tool_call>write<arg_key>path</arg_key><arg_value>", "</arg_value>"),
        ("<tool_call>write<arg_key>data</arg_key><arg_value>", "</arg_"),
        ("<tool_call>write<arg_key>", "</arg_"),
    ],
)
def test_the_cost_is_proportional_to_the_text(begin, part):
    check_linear(GLM, TOOLS, lambda length: begin + part * (length // len(part)))
