"""GLM 4.5 and later: pairs of a key and a value, with line breaks between them and without."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import pytest
from hypothesis import strategies as st

from pilotfish.server.formats.base import ReasoningMarks
from pilotfish.server.formats.tagged import GlmFormat
from tests.server.formats.laws import TYPED, Calls, Family, Spelling, called, typed_calls
from tests.server.formats.walks import TEXT, VALUES, Call, Masks, Reading, markers_of, plain_masks, tool

TOKENS = Masks({**dict.fromkeys([*markers_of(GlmFormat), "<think>", "</think>"], False), "<|observation|>": True})


def write(calls: Calls, line: str = "\n") -> str:
    """As the chat templates write calls; that of GLM 4.7 without line breaks."""

    def parameter(key: str, value: Any) -> str:
        value = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        return f"<arg_key>{key}</arg_key>{line}<arg_value>{value}</arg_value>{line}"

    written = (f"{name}{line}{''.join(parameter(*each) for each in given.items())}" for name, given in calls)
    return line.join(f"<tool_call>{one}</tool_call>" for one in written)


def spelling(name: str, masks: Masks, line: str) -> Spelling:
    strings = st.text() | st.lists(st.sampled_from([*"\n </>a5", "</arg"]), max_size=6).map("".join)
    calls = typed_calls(
        lambda text: not any(mark in text for mark in TOKENS.ids), strings, st.integers() | st.text("a<>/ ")
    )
    return Spelling(name, GlmFormat(masks.ids, ReasoningMarks()), masks, partial(write, line=line), calls)


GLM = Family(
    name="glm",
    spellings=(spelling("glm", TOKENS, "\n"), spelling("glm-4.7", TOKENS, ""), spelling("glm-text", plain_masks(), "")),
    tools=TYPED,
    one=("get", {"a": "x", "b": 1, "c": []}),
    wild=typed_calls(lambda text: "</arg_value>" not in text, TEXT, VALUES),
    ends=("</arg_value>",),
    readings={
        "<tool_call>get</tool_call><tool_call>\n get_x\n</tool_call>\n": Reading(
            "", "", [Call("get", "{}"), Call("get_x", "{}")]
        ),
        "Well. \n\n<tool_call>get\n</tool_call>\nDone.": called("{}", content="Well. \n\n\nDone."),
        write([("get", {"a": "\na", "b": 5, "c": [{}]})]): called('{"a": "\\na", "b": 5, "c": [{}]}'),
        write([("get", {"b": 5, "a": " 5"})], ""): called('{"b": 5, "a": " 5"}'),
        write([("get", {"a": "</arg_value>\n<arg>"})]): called('{"a": "</arg_value>\\n<arg>"}'),
        f"<tool_call>get<arg_key>a</arg_key>x</tool_call> {write([('get', {'b': 5})])}": called(
            '{"b": 5}', content="<tool_call>get<arg_key>a</arg_key>x</tool_call>"
        ),
    },
    cut=dict.fromkeys(
        (
            "Well: <tool_call>set",
            "Well: <tool_call>get\n<arg_",
            "Well: <tool_call>get\n<arg_key>a</arg_key>\n<arg",
            "Well: <tool_call>get\n<arg_key>a</arg_key>\n<arg_value>a\n",
            "Well: <tool_call>get\n<arg_key>a</arg_key>\n<arg_value>a</arg",
            "Well: <tool_call>get\n<arg_key>a</arg_key>\n<arg_value>a</arg_value>\n</tool",
        ),
        called(content="Well: "),
    ),
    contents=(
        "a </arg_value> ",
        "<tool_call>other\n</tool_call>",
        "<tool_call>get_y\n</tool_call>",
        "<tool_call>get now</tool_call>",
        "<tool_call>ge",
    ),
    broken=(
        write([("get", {"a": "x", "c": []})]),
        write([("get", {"a": "x", "b": "y", "c": []})]),
        "Hi <tool_call>other</tool_call>",
    ),
    hostile=("<tool_call>get", "<arg_key>a</arg_key>", "<arg_key>b</arg_key>\n<arg_value>"),
    repeated=("<tool_call>set", ("<tool_call>get<arg_key>", "</arg_")),
)


def test_a_name_that_cannot_be_written_is_refused():
    with pytest.raises(ValueError, match="a parameter named 'a</arg_key>'"):
        GLM.first.format.calls((tool("f", **{"a</arg_key>": {}}),), several=True)
