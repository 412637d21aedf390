"""Outputs read as reasoning, content and calls: the same in whole and in any parts, and each token counted once."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest

from pilotfish.engine.types import TokenEvent
from pilotfish.server.chat import Conversation
from pilotfish.server.formats.base import CallArguments, CallStart, Content, Reasoning, ReasoningMarks, Tool
from pilotfish.server.formats.json_calls import HermesFormat
from pilotfish.server.formats.reasoning import PlainFormat
from pilotfish.server.http.pieces import CallReader, _merged, call_id
from tests.server.http.interfaces import ended

ASKED = Conversation(messages=(), tools=(Tool("f"), Tool("g")))
MARKED = ReasoningMarks()
HERMES = HermesFormat({}, MARKED)
CALL = '<tool_call>\n{"name": "f", "arguments": {"x": "a"}}\n</tool_call>'


def reader(chat_format, *, starts_in_reasoning=False):
    return CallReader(ASKED, SimpleNamespace(starts_in_reasoning=starts_in_reasoning), chat_format)


def events(texts, parts, *, tail=""):
    """A stream of an output with these tokens, `parts[i]` of them in event i, and its end."""
    left = iter(texts)
    for i, size in enumerate(parts):
        some = tuple(itertools.islice(left, size))
        yield TokenEvent(request_id="r", texts=some, tail=tail if i == len(parts) - 1 else "")
    yield TokenEvent(request_id="r", finished=ended())


def whole(texts, *, tail=""):
    return TokenEvent(request_id="r", texts=tuple(texts), tail=tail, finished=ended())


ARGUMENTS = '{"x": "a"}'
THOUGHT = [Reasoning("hm so"), Content("yes")]
CASES = {  # tokens, whether they start in the reasoning, what they say, and the tokens of the reasoning
    "content": (["a", " b"], False, [Content("a b")], 0),
    "reasoning": (["<think>", "hm", " so", "</think>", "\n\n", "yes"], False, THOUGHT, 3),
    "begun before": (["hm", " so", "</think>", "\n", "yes"], True, THOUGHT, 3),
    "split marks": (["<th", "ink>", "hm</", "thi", "nk>ye", "s"], False, [Reasoning("hm"), Content("yes")], 3),
    "no end": (["<think>", "hm", "", "m"], False, [Reasoning("hmm")], 3),
    "a call": (
        ["<think>", "hm", "</think>", "<tool_", 'call>\n{"name": "f",', ' "arguments": {}', "}\n</tool_call>"],
        False,
        [Reasoning("hm"), CallStart(0, "f"), CallArguments(0, "{}")],
        2,
    ),
    "content and calls": (
        ["a\n", CALL, "\n", CALL],
        False,
        [Content("a"), *(piece for i in (0, 1) for piece in (CallStart(i, "f"), CallArguments(i, ARGUMENTS)))],
        0,
    ),
}


@pytest.mark.parametrize("name", CASES)
async def test_parts_do_not_matter(name):
    texts, starts_in_reasoning, expected, num_reasoning = CASES[name]
    found = reader(HERMES, starts_in_reasoning=starts_in_reasoning)
    assert await found.read(whole(texts)) == expected
    assert found.reasoning_tokens[0] == num_reasoning
    for parts in ([1] * len(texts), [len(texts)], [2] * (len(texts) // 2 + 1), [1, len(texts)]):
        found, pieces = reader(HERMES, starts_in_reasoning=starts_in_reasoning), []
        for event in events(texts, parts):
            pieces += await found.read(event)
        assert (_merged(pieces), found.reasoning_tokens[0]) == (expected, num_reasoning)


async def test_text_of_no_token_is_read_and_not_counted():
    found = reader(PlainFormat({}, MARKED))
    assert await found.read(whole(["<think>", "a"], tail="b")) == [Reasoning("ab")]
    assert found.reasoning_tokens[0] == 1


async def test_without_a_format_text_comes_as_it_is():
    texts = ["<think> ", "a ", CALL, " "]
    found = reader(None)
    for text, event in zip(texts, events(texts, [1] * 4), strict=False):
        assert await found.read(event) == [Content(text)]
    assert await reader(None).read(whole(texts)) == [Content("".join(texts))]


def test_every_call_has_an_id_of_its_own():
    ids = [call_id(name, output, number) for name in ("r", "s") for output in range(12) for number in range(12)]
    assert len(set(ids)) == len(ids)
    assert all(len(identity) == 9 and identity.isalnum() for identity in ids)
    assert call_id("r", 1, 2) == call_id("r", 1, 2)
