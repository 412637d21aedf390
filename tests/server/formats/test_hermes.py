"""Hermes 2 Pro, Qwen 2.5 and Qwen 3: JSON between marks, which may be tokens."""

from __future__ import annotations

import json

from pilotfish.server.formats.base import ReasoningMarks, Tool
from pilotfish.server.formats.json_calls import HermesFormat
from tests.server.formats.laws import Calls, Family, Spelling, called, some_calls
from tests.server.formats.walks import Masks, plain_masks, read

TOKENS = Masks({"<tool_call>": False, "</tool_call>": False, "<think>": False, "</think>": False, "<|im_end|>": True})
A, CALL = '{"a": 1}', '<tool_call>\n{"name": "get", "arguments": {"a": 1}}\n</tool_call>'


def write(calls: Calls, *, ascii_only: bool = False) -> str:
    """As the chat templates write calls."""
    objects = (json.dumps({"name": name, "arguments": given}, ensure_ascii=ascii_only) for name, given in calls)
    return "\n".join(f"<tool_call>\n{one}\n</tool_call>" for one in objects)


HERMES = Family(
    name="hermes",
    spellings=(
        Spelling("hermes", HermesFormat(TOKENS.ids, ReasoningMarks()), TOKENS, write, some_calls("tool_call>")),
        Spelling("hermes-text", HermesFormat({}, ReasoningMarks()), plain_masks(), write, some_calls("<tool_call>")),
    ),
    readings={
        f"{CALL} {CALL}{CALL}": called(A, A, A),
        f"{CALL}\n\nDone. ": called(A, content="Done. "),
        '<tool_call>{"name":"get","arguments":{}}</tool_call>': called("{}"),
        '<tool_call>\n { "name" : "get" , "arguments" : { } } \n</tool_call> ': called("{ }"),
        '<tool_call>\n{"arguments": {"a": 1}, "name": "get"}\n</tool_call>': called(A),
        '<tool_call>{"arguments": {"x": "<tool_call>}"}, "name": "get"}': called('{"x": "<tool_call>}"}'),
        '<tool_call>\n{"name": "get"}\n</tool_call>': called("{}"),
        '<tool_call>{"name": "get", "arguments": {"x": "</tool_call>"}}': called('{"x": "</tool_call>"}'),
        # After a broken call, and after arguments that are read, nothing is lost.
        f'<tool_call>\n{{"name": "other"}}\n</tool_call>\n{CALL}': called(
            A, content='<tool_call>\n{"name": "other"}\n</tool_call>'
        ),
        f"<tool_call>{CALL}": called(A, content="<tool_call>"),
        '<tool_call>{"name": "get", "arguments": {}, "why": "?"}</tool_call>': called("{}"),
        '<tool_call>{"name": "get", "arguments": {"a": 1}, "id": "1"}</tool_call>': called(A),
        # The end may be missing, or a brace beside it; arguments may be missing.
        CALL[:-14]: called(A),
        CALL[:-5]: called(A),
        f"{CALL.replace('}}', '}')}{CALL.replace('}}', '}}} }')}": called(A, A),
        f"{CALL[:-14]}{CALL}": called(A, A),
        '<tool_call>{"name": "get", "arguments": ""}</tool_call>': called("{}"),
        '<tool_call>{"arguments": {"a": 1}, "name": "get", }</tool_call>': called(A),
        # A broken call takes no other one with it.
        **{
            f"{broken}\n{CALL}": called(A, content=broken)
            for broken in (
                CALL.replace("1}}", '"x}}'),
                CALL.replace("1}}", '"C:\\"}}'),
                CALL.replace("1", "NaN"),
                CALL.replace("1", "[1, ]"),
                CALL.replace('"a"', "a"),
                CALL.replace("1", "[" * 400 + "]" * 400),
                CALL.replace("1", "1" * 2000),
                CALL.replace("1}", '1}, "b": [2]}'),  # a brace too many has ended the arguments
                CALL.replace("1}", '1}, "id": 2}'),  # also before a parameter that is called as a member of calls
            )
        },
        f"{CALL.replace('1', '')} and {CALL}!": called(A, content=f"{CALL.replace('1', '')} and !"),
        # What has one meaning is repaired.
        CALL.replace("1", '"a\nb\t\x01"'): called('{"a": "a\\nb\\t\\u0001"}'),
        CALL.replace("1", r'"C:\dir\u12 \ud83d\ude00 \ud83d \ude00"'): called(
            r'{"a": "C:\\dir\\u12 \ud83d\ude00 \ufffd \ufffd"}'
        ),
    },
    cut={
        **dict.fromkeys(
            (
                'Well: <tool_call>\n{"name": "get"',
                'Well: <tool_call>\n{"name": "get", "argum',
                'Well: <tool_call>\n{"name": "get", "arguments": ',
                'Well: <tool_call>\n{"name": "get", "arguments": {"a": 1, "',
                'Well: <tool_call>\n{"arguments": {"a": 1}, "name": "ge',
                "Well: <tool_",
            ),
            called(content="Well: "),
        ),
        f"{CALL}<tool_call>\n{{": called(A),
        CALL[:-5]: called(A),
        f"{CALL[:-14]}, ": called(A),
        f"{CALL.replace('1}}', chr(34))}\nBye": called(content=f"{CALL.replace('1}}', chr(34))}\nBye"),
    },
    contents=(
        " Hi. \n",
        "a < b <tool_cal",
        "<tool_call>",
        " <tool_call>\nno JSON\n</tool_call> ",
        '<tool_call>{"name": "other", "arguments": {}}</tool_call>\n',
        '<tool_call>{"arguments": {"a": "}"}, "name": "other"}</tool_call>',
        '<tool_call>{"arguments": {"a": 1}}</tool_call>',
        '<tool_call>{"name": "get" "arguments": {}}</tool_call>',
        '<tool_call>{"name": "get", "other": {}}</tool_call>',
        '<tool_call>"name": "get", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "get", "name": "get"}</tool_call>',
        '<tool_call>{"name": "get", "arguments": {}, "arguments": {"a": 1}}</tool_call>',
        '<tool_call>{"name": "get", "arguments": 5}</tool_call>',
        '<tool_call>{"name": "ge',
        '<tool_call>{"name": "get", "arguments": {"a": 1, "',
        '<tool_call>{"arguments": {"a": 1}, "name',
        "</tool_call>",
    ),
    broken=(f"Hi {CALL.replace('1}', '1]')}", CALL.replace("get", "other"), CALL.replace("\n", "")),
    hostile=('{"name": "get"', "</tool_call>\n"),
    repeated=(
        "<tool_call>{",
        '<tool_call>{"name": "get"',
        "<tool_call>\n",
        ("<tool_call>", "\n"),
        ('<tool_call>{"name": "get", "arguments": {"', 'x\\"'),
        ('<tool_call>{"arguments": {"', 'x\\"'),
        ('<tool_call>{"name": "get", "arguments": {', "[{"),
    ),
)


def test_names_and_arguments_are_json() -> None:
    tools = (Tool('größe "1"'), Tool("größe"))
    for one in tools:
        for ascii_only in (False, True):
            found = read(HERMES.first.format, tools, write([(one.name, {"ü": "\x01é"})], ascii_only=ascii_only))
            assert [(call.name, json.loads(call.arguments)) for call in found.calls] == [(one.name, {"ü": "\x01é"})]
