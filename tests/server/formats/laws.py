"""A family of chat formats as its tests write it down: how calls are spelled, and texts whose reading is known.

`test_laws` holds every family to the same laws. What is peculiar to one stands in its own module, beside its table.
"""

from __future__ import annotations

import cProfile
import functools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from hypothesis import strategies as st

from pilotfish.server.formats.base import ChatFormat, Tool
from tests.schemas import Schema, random_schema
from tests.server.formats.walks import TEXT, VALUES, Call, Masks, Reading, tool

Calls: TypeAlias = list[tuple[str, dict[str, Any]]]
Render: TypeAlias = Callable[[Calls], str]
dumped = functools.partial(json.dumps, ensure_ascii=False)  # as in the chat templates

# One name begins another. Where values are written without quotes, their types are the schema's.
FREE = (Tool("get"), Tool("get_x"), Tool("set"))
TYPED = (
    tool("get", a={"type": "string"}, b={"type": "integer"}, c={"type": ["array", "object"]}),
    tool("get_x"),
    tool("set"),
)

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

_N = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
_VALUES: tuple[Schema, ...] = (
    {"anyOf": [{"type": "string", "maxLength": 4}, {"type": "null"}]},
    {"type": ["string", "integer", "boolean"]},
    {"type": ["string", "number"], "maximum": 3, "maxLength": 5},
    {"$ref": "#/$defs/n"},
    {"anyOf": [{"$ref": "#/$defs/n"}, {"type": "string", "pattern": "^[a-c]+$"}]},
    {"type": "array", "items": {"$ref": "#/$defs/n"}, "maxItems": 2},
    {"type": "object", "additionalProperties": {"type": "integer"}, "maxProperties": 2},
    {"type": "string", "pattern": "b+", "maxLength": 3},
    {"enum": ["5", "null", "a\nb", 5, None, {"x": 1}]},
    {"type": "string", "enum": ["red", "green"]},
    {"const": "x"},
    {"type": "number", "minimum": -1.5, "exclusiveMaximum": 2},
    {"oneOf": [{"type": "boolean"}, {"type": "string", "minLength": 2, "maxLength": 3}]},
    {},
)


def _in_pairs(i: int) -> Schema:
    """An object with the value schema `i`, and perhaps with the next one."""
    properties = {"größe": _VALUES[i], "a-b.c": _VALUES[(i + 1) % len(_VALUES)]}
    return {"properties": properties, "required": ["größe"], "additionalProperties": False, "$defs": {"n": _N}}


WALKED = (*SCHEMAS, *map(_in_pairs, range(len(_VALUES))))


# ---------------------------------------------------------------------------------------------------------- families


@dataclass(frozen=True, eq=False)
class Spelling:
    """How the calls of a checkpoint are written, and the tokens in which they are.

    Args:
        write: calls as the chat template writes them.
        calls: calls that the masks allow in these tokens.
        after_text: stands before calls that follow a text.
    """

    name: str
    format: ChatFormat
    masks: Masks
    write: Render
    calls: st.SearchStrategy[Calls]
    after_text: str = ""

    def allows(self, rule: str, tools: Sequence[Tool], text: str, *, several: bool = True, **how: Any) -> bool:
        """Whether `calls` or `auto` of the format matches a text."""
        return self.masks.accepts(f"start: {rule}\n{getattr(self.format, rule)(tools, several=several, **how)}", text)


@dataclass(frozen=True, eq=False, kw_only=True)
class Family:
    """Spellings that every parser of a family reads; texts are read by that of the first.

    Args:
        hostile: parts of calls, besides the markers.
        readings: texts that the model has ended, and what is read of them.
        cut: texts that `max_tokens` has ended, and what is read of them.
        contents: texts that look like calls and are none.
        broken: texts that the rule of a free answer does not match.
        repeated: what may come very often, perhaps after a beginning.
        wild: calls with any values, which masks need not allow.
        ends: texts that end a value, for random walks.
        is_text_free: whether any text may stand before calls.
        has_channels: whether reasoning, content and calls are messages with headers.
    """

    name: str
    spellings: Sequence[Spelling]
    hostile: Sequence[str] = ()
    readings: dict[str, Reading] = field(default_factory=dict)
    cut: dict[str, Reading] = field(default_factory=dict)
    contents: Sequence[str] = ()
    broken: Sequence[str] = ()
    repeated: Sequence[str | tuple[str, str]] = ()
    wild: st.SearchStrategy[Calls] = field(default_factory=lambda: calls_of(st.dictionaries(TEXT, VALUES, max_size=4)))
    tools: Sequence[Tool] = FREE
    one: tuple[str, dict[str, Any]] = ("get", {"a": 1})
    ends: Sequence[str] = ()
    is_text_free: bool = True
    has_channels: bool = False

    @property
    def first(self) -> Spelling:
        return self.spellings[0]


def called(*arguments: str, content: str = "", reasoning: str = "") -> Reading:
    """Calls of `get` with these arguments, and the text around them."""
    return Reading(reasoning, content, [Call("get", text) for text in arguments])


# -------------------------------------------------------------------------------------------------------- strategies


def calls_of(arguments: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[Calls]:
    """Calls of the free tools with these arguments."""
    return st.lists(st.tuples(st.sampled_from([one.name for one in FREE]), arguments), min_size=1, max_size=3)


def _strings(*texts: str) -> st.SearchStrategy[str]:
    letters = st.characters(min_codepoint=32, exclude_categories=["Cs", "Cc"])
    return st.lists(st.sampled_from(['"', "\\", "\n", "<", "}", *texts]) | letters, max_size=5).map("".join)


def some_calls(*texts: str) -> st.SearchStrategy[Calls]:
    """Calls whose strings are made of these texts and of others."""
    scalars = (
        st.none() | st.booleans() | st.integers(-(10**9), 10**9) | st.sampled_from([0.5, -3.25]) | _strings(*texts)
    )
    names = st.text(st.sampled_from("abcé_ 1-"), min_size=1, max_size=5).map(str.strip).filter(bool)
    values = st.recursive(
        scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3)
    )
    return calls_of(st.dictionaries(names, values, max_size=3))


def typed_calls(
    is_text: Callable[[str], bool], strings: st.SearchStrategy[str], values: Any
) -> st.SearchStrategy[Calls]:
    """Calls of the typed tools, with strings and JSON that can be written as text."""
    objects = (st.lists(values, max_size=3) | st.dictionaries(st.text("ab<>/ "), values, max_size=2)).filter(
        lambda value: is_text(str(value))
    )
    values = st.tuples(strings.filter(is_text), st.integers(-(10**18), 10**18), objects)
    get = values.map(lambda each: dict(zip("abc", each, strict=True)))  # in the order of the schema
    one = st.tuples(st.just("get"), get) | st.tuples(st.sampled_from(["get_x", "set"]), st.just({}))
    return st.lists(one, min_size=1, max_size=3)


def hostile_texts(*parts: str) -> st.SearchStrategy[str]:
    """Texts of parts of calls in any order."""
    common = ["get", "get_x", "other", "{", "}", '"', ":", ",", " ", "\n", "[", "]", '{"a": 1}', "x", "\\", ";", "é"]
    keys = ['{"name": "get", "arguments": ', '"id": "a"', '"name"', '"parameters"']
    return st.lists(st.sampled_from([*parts, *common, *keys]), max_size=12).map("".join)


# -------------------------------------------------------------------------------------------------------------- work


def check_linear(chat_format: ChatFormat, tools: Sequence[Tool], begin: str, part: str) -> None:
    """The work for a text is proportional to its length, however often a part comes and however the text is cut."""
    few = max(3, 40 // len(part))
    for is_cut in (False, True):
        little, much = (_work(chat_format, tools, begin + part * times, is_cut=is_cut) for times in (few, 8 * few))
        assert much < 12 * little, (begin, part, is_cut, little, much)


def _work(chat_format: ChatFormat, tools: Sequence[Tool], text: str, *, is_cut: bool) -> int:
    """How many functions are called, and how many characters are held when text comes to them, all together."""
    held, parser, calls = 0, chat_format.parser(tools), cProfile.Profile()
    with calls:
        for part in text if is_cut else [text]:
            parser.push(part)
            held += len(parser._scanner.held)
        parser.finish()
    return held + sum(function.callcount for function in calls.getstats())
