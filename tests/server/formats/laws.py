"""Laws of chat formats: what is written is read again, what a mask allows is a valid call, and nothing is lost."""

from __future__ import annotations

import functools
import json
import random
import re
import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, TypeAlias

import jsonschema
from hypothesis import strategies as st
from llguidance import LLMatcher

from server.formats.base import ChatFormat, Tool
from tests.schemas import Schema, random_schema
from tests.server.formats.walks import Call, Masks, Reading, joined, pieces_of, read

Calls: TypeAlias = list[tuple[str, dict[str, Any]]]
Render: TypeAlias = Callable[[Calls], str]

FREE = (Tool("get"), Tool("get_x"), Tool("set"))  # one name begins another

_NODE = {"type": "object", "properties": {"of": {"$ref": "#/$defs/node"}}, "additionalProperties": False}
_POINT = {
    "type": "object",
    "properties": {"x": {"type": "integer"}, "y": {"type": ["integer", "null"]}},
    "required": ["x"],
    "additionalProperties": False,
}
_BY_HAND: tuple[Schema, ...] = (
    {"$ref": "#/$defs/node", "$defs": {"node": _NODE}},
    {"properties": {"a": {"anyOf": [{"type": "string", "maxLength": 4}, {"type": "null"}], "default": None}}},
    {"properties": {"p": _POINT}, "required": ["p"], "additionalProperties": {"type": "boolean"}},
    {"properties": {"n": {"type": "number", "minimum": 0.5, "exclusiveMaximum": 2}}, "required": ["n"]},
    {"properties": {"k": {"const": "it's"}, "e": {"enum": ["a", "b c"], "type": "string"}}, "required": ["e", "k"]},
    {"properties": {"l": {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 3}}},
    {"properties": {"l": {"type": "array", "maxItems": 1, "items": {"type": "array", "maxItems": 0}}}},
    {"properties": {"u": {"anyOf": [{"type": "integer", "maximum": 9}, {"const": "none"}]}}, "required": ["u"]},
    {"properties": {"s": {"type": "string", "pattern": "^[a-z]+$", "description": "letters"}}, "required": ["s"]},
    {"properties": {"q": {"$ref": "#/properties/r"}, "r": {"type": "integer", "minimum": 3}}, "required": ["q"]},
    {"properties": {"q": {"allOf": [{"$ref": "#/properties/r"}]}, "r": {"type": "integer", "maximum": 5}}},
    {"properties": {"t": {"type": "array", "prefixItems": [{"const": 1}], "items": False, "minItems": 1}}},
    {"properties": {"d": {"type": "string", "format": "date"}}, "required": ["d"], "additionalProperties": False},
)


def _as_object(schema: Schema) -> Schema:
    return schema if schema.get("type") == "object" else {"properties": {"value": schema}, "required": ["value"]}


SCHEMAS = (*_BY_HAND, *(_as_object(random_schema(seed)) for seed in range(50 - len(_BY_HAND))))


# -------------------------------------------------------------------------------------------------------- strategies


def some_calls(*texts: str) -> st.SearchStrategy[Calls]:
    """Calls of the free tools, whose strings are made of these texts and of others."""
    letters = st.characters(min_codepoint=32, exclude_categories=["Cs", "Cc"])
    strings = st.lists(st.sampled_from(['"', "\\", "\n", "<", "}", *texts]) | letters, max_size=5).map("".join)
    scalars = st.none() | st.booleans() | st.integers(-(10**9), 10**9) | st.sampled_from([0.5, -3.25]) | strings
    names = st.text(st.sampled_from("abcé_ 1-"), min_size=1, max_size=5).map(str.strip).filter(bool)
    values = st.recursive(
        scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3)
    )
    arguments = st.dictionaries(names, values, max_size=3)
    return st.lists(st.tuples(st.sampled_from([tool.name for tool in FREE]), arguments), min_size=1, max_size=3)


def hostile_texts(*parts: str) -> st.SearchStrategy[str]:
    """Texts of parts of calls in any order."""
    common = ["get", "get_x", "other", "{", "}", '"', ":", ",", " ", "\n", "[", "]", '{"a": 1}', "x", "\\", ";", "é"]
    keys = ['{"name": "get", "arguments": ', '"id": "a"', '"name"', '"parameters"']
    return st.lists(st.sampled_from([*parts, *common, *keys]), max_size=12).map("".join)


# -------------------------------------------------------------------------------------------------------------- laws


def check_round_trip(chat_format: ChatFormat, masks: Masks, render: Render, calls: Calls) -> None:
    """A text as the chat template writes it fits the grammar of calls, and is read as the same calls."""
    text = render(calls)
    tokens = masks.tokenizer.encode(text, add_special_tokens=False).ids
    assert _accepts(masks, f"start: calls\n{chat_format.calls(FREE, several=True)}", tokens)
    assert _accepts(masks, f"start: auto\n{chat_format.auto(FREE, several=True)}", tokens)
    one = f"start: calls\n{chat_format.calls(FREE, several=False)}"
    assert _accepts(masks, one, tokens) == (len(calls) == 1)
    found = read(chat_format, FREE, text)
    assert (found.reasoning, found.content) == ("", "")
    assert [(name, json.loads(arguments)) for name, arguments in found.calls] == calls


def _accepts(masks: Masks, lark: str, tokens: list[int]) -> bool:
    matcher = _matcher(masks, lark).deep_copy()
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


@functools.cache
def _matcher(masks: Masks, lark: str) -> LLMatcher:
    return masks.matcher(lark)


def check_walk(chat_format: ChatFormat, masks: Masks, schema: Schema, seed: int, *ends: str) -> None:
    """Random tokens that the masks allow, after a while more and more often `ends`, are calls with valid arguments."""
    tools = [Tool("get", parameters=json.dumps(schema)), *FREE[1:]]
    text = masks.walk(f"start: calls\n{chat_format.calls(tools, several=True)}", random.Random(seed), *ends)
    found = joined(pieces_of(chat_format, tools, [text]))
    assert (found.reasoning, found.content) == ("", ""), text
    assert found.calls, text
    for call in found.calls:
        arguments = json.loads(call.arguments)
        assert isinstance(arguments, dict), text
        if call.name == "get":
            jsonschema.validate(arguments, schema)


def check_prefixes(chat_format: ChatFormat, text: str) -> None:
    """What is read of the beginning of a text is the beginning of what is read of the whole text."""
    whole = joined(pieces_of(chat_format, FREE, [text])).calls
    tokens = [
        (found.start(), found.end()) for mark in chat_format.markers for found in re.finditer(re.escape(mark), text)
    ]
    for length in range(len(text)):
        if any(start < length < end for start, end in tokens):
            continue  # a token comes as a whole
        for i, call in enumerate(joined(pieces_of(chat_format, FREE, [text[:length]])).calls):
            assert call.name == whole[i].name, text[:length]
            assert whole[i].arguments.startswith(call.arguments), text[:length]


def check_streams(chat_format: ChatFormat, render: Render) -> None:
    """Arguments are passed on while they come."""
    text = render([("get", {"a": "x" * 100})])
    parser = chat_format.parser(FREE)
    pieces = [piece for char in text[: text.index("x" * 100) + 50] for piece in parser.push(char)]
    assert joined(pieces).calls == [Call("get", '{"a": "' + "x" * 50)]


def check_nothing_lost(chat_format: ChatFormat, texts: Sequence[str]) -> None:
    """What is no call of a tool is content, unchanged."""
    for text in texts:
        assert read(chat_format, FREE, f"Hi\n {text}") == Reading("", f"Hi\n {text}", [])
        assert read(chat_format, [], text) == Reading("", text, [])


def check_linear(chat_format: ChatFormat, parts: Sequence[str]) -> None:
    """The work for a text is proportional to its length, however often a part comes and however the text is cut."""
    for part in parts:
        for is_cut in (False, True):
            little, much = (_work(chat_format, part * times, is_cut=is_cut) for times in (40, 320))
            assert much < 12 * little, (part, is_cut, little, much)


def _work(chat_format: ChatFormat, text: str, *, is_cut: bool) -> int:
    """How many functions are called, and how many characters the scanner holds when text comes to it, all together."""
    work = 0
    parser = chat_format.parser(FREE)

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal work
        work += 1

    sys.setprofile(count)
    try:
        for part in text if is_cut else [text]:
            parser.push(part)
            work += len(parser._scanner.held)
        parser.finish()
    finally:
        sys.setprofile(None)
    return work
