"""Tools of a chat template that renders none: functions, calls and results are text of turns that alternate."""

from __future__ import annotations

import json

import pytest

from pilotfish.server.admission.conversation import records_of
from pilotfish.server.chat import ChatMessage, ToolCall
from pilotfish.server.formats.base import Tool
from pilotfish.server.formats.generic import GenericFormat
from tests.server.formats.walks import Call, Reading, joined, pieces_of, plain_masks, read

ADD, NOW = Tool("add", "Adds.", '{"type": "object", "properties": {"ä": {"type": "integer"}}}'), Tool("now")
CALLS = (ToolCall("c1", "add", '{"ä": 1}'), ToolCall("c2", "now", ""))
SYSTEM, USER = ChatMessage(role="system", content="Be brief."), ChatMessage(role="user", content="Hi")
ASSISTANT = ChatMessage(role="assistant", content="Wait.", tool_calls=CALLS)
RESULTS = ChatMessage(role="tool", content="3", tool_call_id="c1"), ChatMessage(role="tool", content="noon")
WRITTEN = """<tool_call>
{"name": "add", "arguments": {"ä": 1}}
</tool_call>
<tool_call>
{"name": "now", "arguments": {}}
</tool_call>"""
ANSWERED = "<tool_response>\n3\n</tool_response>\n<tool_response>\nnoon\n</tool_response>"


def turns(*messages, place="system", tools=()):
    found, declared = GenericFormat(variant=place).rendered(records_of(messages), tools)
    assert declared == ()
    return [(turn["role"], turn["content"]) for turn in found]


def test_calls_and_results_are_text_and_roles_alternate():
    assert turns(USER, ASSISTANT, *RESULTS) == [
        ("user", "Hi"), ("assistant", f"Wait.\n{WRITTEN}"), ("user", ANSWERED),
    ]  # fmt: skip
    assert turns(USER, ASSISTANT, *RESULTS, USER, ASSISTANT, RESULTS[0])[2:] == [
        ("user", f"{ANSWERED}\n\nHi"),
        ("assistant", f"Wait.\n{WRITTEN}"),
        ("user", "<tool_response>\n3\n</tool_response>"),
    ]
    assert turns(USER, USER) == [("user", "Hi"), ("user", "Hi")], "turns without results are the template's affair"


def test_a_call_is_written_as_it_is_read_and_as_its_grammar_allows():
    [_, (_, content)] = turns(USER, ChatMessage(role="assistant", tool_calls=CALLS))
    assert content == WRITTEN
    assert read(GenericFormat(), [ADD, NOW], content) == Reading("", "", [Call("add", '{"ä": 1}'), Call("now", "{}")])
    rules = f"start: calls\n{GenericFormat().calls([ADD, NOW], several=True)}"
    assert plain_masks().accepts(rules, content)


@pytest.mark.parametrize("has_structure", [False, True])
def test_no_part_of_a_call_that_max_tokens_cuts_is_content(has_structure):
    for size in range(len(WRITTEN)):
        pieces = pieces_of(GenericFormat(), [ADD, NOW], [WRITTEN[:size]], is_cut=True, has_structure=has_structure)
        assert joined(pieces).content == "", WRITTEN[:size]


@pytest.mark.parametrize(
    ("messages", "place", "role", "before", "after"),
    [
        ([USER], "system", "system", "", ""),
        ([SYSTEM, USER], "system", "system", "Be brief.\n\n", ""),
        ([USER, SYSTEM], "system", "system", "", ""),
        ([USER], "user", "user", "", "\n\nHi"),
        ([ASSISTANT], "user", "user", "", ""),
    ],
)
def test_functions_are_in_the_first_turn(messages, place, role, before, after):
    [first, *others] = turns(*messages, place=place, tools=(ADD, NOW))
    assert first[0] == role
    listed = first[1].removeprefix(before).removesuffix(after)
    assert listed.startswith("You can call these functions:")
    assert listed.endswith("answer without a call.")
    declared = listed.partition("<tools>\n")[2].partition("\n</tools>")[0]
    assert [*map(json.loads, declared.splitlines())] == [ADD.declaration, NOW.declaration]
    assert others == turns(*messages, place=place)[len(messages) - len(others) :], "the other turns stay"
    assert len(others) == len(messages) - bool(before or after)
