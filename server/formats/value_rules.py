"""Values of arguments that are written as plain text: how they are read, and Lark rules of those that are valid.

A lexer takes the longest text, so a string must not begin as JSON that could stand in its place, and ends where the
mark behind it is complete.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any, NoReturn, TypeAlias

from engine.text.schemas.formats import patterns_of
from engine.text.schemas.keywords import Document, parsed
from engine.text.schemas.numbers import written
from engine.text.schemas.patterns import Alphabet, searched
from engine.text.schemas.rules import schema_rule
from server.formats.base import Tool, pattern, quoted
from server.formats.json_text import value_in

Schema: TypeAlias = dict[str, Any]

STRING = frozenset({"string"})
SPACE = " \t\r\n"
_TYPES = frozenset({"string", "integer", "number", "object", "array", "boolean", "null"})
_PYTHON = {"True": "true", "False": "false", "None": "null"}  # templates show the calls of the past with these words
_NOTES = ("title", "description", "default", "examples", "deprecated")
_MAX_DEPTH = 16  # of references and unions in each other


class Parameters:
    """The parameters of a tool by their names, with values as plain text, which has no quotes of JSON.

    One that can only be a string is the text as it is; one that cannot be a string is JSON; of others a text is JSON if
    it is a value of a type that is allowed, and else a string. So a string that looks like such a value cannot be
    written.
    """

    def __init__(self, tool: Tool) -> None:
        self._tool, self._root = tool, parsed(tool.parameters)
        self.is_lenient = not tool.strict  # keywords that cannot be followed are ignored
        self._document = Document(self._root)
        self.schema = self.resolved(self._root)
        self._types: dict[str, frozenset[str]] = {}

    def property(self, name: str) -> Schema:
        """The schema of a parameter, without a reference and without notes for readers."""
        others = self.schema.get("additionalProperties") or True  # one that is forbidden may have any value
        found = self.resolved(_mapping(self.schema.get("properties")).get(name, others))
        return {key: value for key, value in found.items() if key not in _NOTES}

    def types(self, name: str) -> frozenset[str]:
        """The types that the value of a parameter can have; with `number` always `integer`."""
        if name not in self._types:
            self._types[name] = self.types_of(self.property(name))
        return self._types[name]

    def json_of(self, name: str, text: str) -> str:
        """The JSON of the value of a parameter that was written as `text`."""
        types, written = self.types(name), text.strip(SPACE)
        value = None if types == STRING else value_in(_PYTHON.get(written, written))
        if value is None or type_of(json.loads(value)) not in types - STRING:
            return json.dumps(text, ensure_ascii=False)
        return value

    def resolved(self, schema: Any, depth: int = 0) -> Schema:
        """The keywords of a schema and of the one that it refers to; with `$ref` if that is nowhere."""
        if not isinstance(schema, dict):
            return {} if schema else {"enum": []}
        if "$ref" not in schema or depth > _MAX_DEPTH:
            return schema
        try:
            found = self._document.resolved(schema, schema["$ref"])
        except ValueError:
            return schema
        return self.resolved(found, depth + 1) | {key: value for key, value in schema.items() if key != "$ref"}

    def rule(self, schema: Schema) -> str:
        """The right-hand side of a Lark rule of a part, as JSON. ValueError: it cannot be followed exactly."""
        return schema_rule(schema, self._root, lenient=self.is_lenient)

    def types_of(self, schema: Schema, depth: int = 0) -> frozenset[str]:
        if depth > _MAX_DEPTH:
            return _TYPES
        types = declared(schema)
        for union in ("anyOf", "oneOf"):
            if union in schema:
                parts = [self.types_of(self.resolved(part), depth + 1) for part in _listed(schema[union])]
                types &= frozenset().union(*parts)
        for part in _listed(schema.get("allOf")):
            types &= self.types_of(self.resolved(part), depth + 1)
        return types

    def refuse(self, problem: str) -> NoReturn:
        raise ValueError(f"the schema of {self._tool.name} {problem}; this model's format of calls cannot express that")


def declared(schema: Schema) -> frozenset[str]:
    """The types that the schema itself allows, without its parts."""
    types = _TYPES
    if "type" in schema:
        given = schema["type"]
        types = _TYPES & {kind for kind in [given, *_listed(given)] if isinstance(kind, str)}
        types |= {"integer"} if "number" in types else set()
    if "const" in schema:
        return types & {type_of(schema["const"])}
    return types & {*map(type_of, _listed(schema["enum"]))} if "enum" in schema else types


# A schema that is not strict was not compiled, so its keywords can have any values.


def _mapping(value: Any) -> Schema:
    return value if isinstance(value, dict) else {}


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def type_of(value: Any) -> str:
    """The type of a value in JSON Schema."""
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, float | Decimal):
        return "integer" if value % 1 == 0 else "number"
    return {str: "string", int: "integer", list: "array", dict: "object"}.get(type(value), "null")


_ANY = "/(?s:.*)/"
_TEXT = Alphabet(is_json=False)
_SPACE = r"[ \t\r\n]*"
_INTEGER = r"-?(0|[1-9][0-9]*)"
_NUMBER = _INTEGER + r"(\.[0-9]+)?([eE][+\-]?[0-9]+)?"
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_WRITTEN = {  # how a value begins, or what it is, that is no string beside this type
    "object": r"\{(?s:.*)",
    "array": r"\[(?s:.*)",
    "number": _NUMBER + _SPACE,
    "integer": _NUMBER + _SPACE,
    "boolean": f"([tT]rue|[fF]alse){_SPACE}",
    "null": f"(null|None){_SPACE}",
}
_SIMPLE = {"boolean": "true|false", "null": "null", "number": _NUMBER, "integer": _INTEGER}


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueEnd:
    """What stands behind a value."""

    line_break: str  # a line break before the mark, or nothing
    mark: str  # the text of the mark
    token: str | None  # the mark in Lark if it is a token; no text contains it
    followers: Sequence[str]  # the parser takes the mark for the end of the value only before one of these

    @property
    def lark(self) -> str:
        return quoted(self.line_break + self.mark) if self.token is None else f"{quoted(self.line_break)} {self.token}"


class ValueRules:
    """The rules of the values of all parameters: those with the same schema share them."""

    def __init__(self, end: ValueEnd) -> None:
        self._end = end
        self._names: dict[str, str] = {}
        self.rules: list[str] = []

    def name(self, parameters: Parameters, parameter: str) -> str:
        """The name of the rule that matches a value of a parameter and its end. Raises ValueError if there is none."""
        rules = list(_value_rules(parameters, parameter, "value", self._end))
        if (text := "\n".join(rules)) not in self._names:
            name = self._names[text] = f"value_{len(self._names)}"
            self.rules += _value_rules(parameters, parameter, name, self._end)
        return self._names[text]


@dataclass(slots=True)
class _Leaves:
    """What a value may be: regexes that strings match, regexes of other values, and schemas of what is JSON."""

    strings: list[str] = field(default_factory=list)
    others: list[str] = field(default_factory=list)
    schemas: list[Schema] = field(default_factory=list)


def _value_rules(parameters: Parameters, name: str, rule: str, end: ValueEnd) -> Iterator[str]:
    schema, types = parameters.property(name), parameters.types(name)
    if "string" not in types:
        yield f"{rule}: {parameters.rule(schema)} {end.lark}"
        return
    leaves = _Leaves()
    for leaf in _leaves(parameters, schema, 0):
        _add_leaf(leaves, leaf, is_lenient=parameters.is_lenient)
    terminal, is_json = rule.upper(), bool(leaves.schemas)
    banned = dict.fromkeys([*_banned(types - STRING, leaves.schemas), *_early_ends(end)])
    exclusions = "".join(f" & ~/{regex}/" for regex in banned)
    strings = [f"{string}{exclusions}" for string in leaves.strings]
    yield f"{terminal}: {' | '.join([*strings, *(f'/{other}/' for other in leaves.others)])}"
    yield f"{rule}: {rule}_text{f' | {rule}_json' if is_json else ''}"
    if end.token is not None:
        yield (
            f"{terminal}_END: {terminal} {quoted(end.line_break)}" if end.line_break else f"{terminal}_END: {terminal}"
        )
        yield f"{rule}_text: {terminal}_END {end.token}"
    else:
        yield f"{rule}_text[suffix={quoted(end.line_break + end.mark)}]: {terminal}"
    if is_json:
        rules = [parameters.rule(schema) for schema in leaves.schemas]
        yield from (f"{rule}_{i}: {one}" for i, one in enumerate(rules))
        yield f"{rule}_json: ({' | '.join(f'{rule}_{i}' for i in range(len(rules)))}) {end.lark}"


def _early_ends(end: ValueEnd) -> Iterator[str]:
    """Texts that contain their end, or that the parser would read as values that end earlier."""
    yield rf"(?s:.*){pattern(end.line_break + end.mark)}(?s:.*)"
    if end.line_break:
        yield rf"(?s:.*){pattern(end.mark)}{_SPACE}({'|'.join(map(pattern, end.followers))})(?s:.*)"


def _banned(types: frozenset[str], schemas: Sequence[Schema]) -> Iterator[str]:
    """Texts that are no strings beside these types, because they are or begin other values."""
    yield from (_SPACE + _WRITTEN[kind] for kind in sorted(types))
    if any({"number", "integer"} & declared(schema) for schema in schemas):
        yield r"[\-0-9](?s:.*)"


def _leaves(parameters: Parameters, schema: Schema, depth: int) -> Iterator[Schema]:
    """Schemas without unions, each of one type or of a list of values, one of which a value has to fit."""
    schema = parameters.resolved(schema)
    if depth > _MAX_DEPTH:
        parameters.refuse("has too many unions in each other")
    for union in ("anyOf", "oneOf"):
        if union in schema:
            rest = {key: value for key, value in schema.items() if key != union}
            for part in map(parameters.resolved, schema[union]):
                if any(part.get(key, value) != value for key, value in rest.items()):
                    parameters.refuse(f"has {union} beside a keyword that a part has too")
                yield from _leaves(parameters, rest | part, depth + 1)
            return
    if found := next((key for key in ("$ref", "not", "if", "allOf") if key in schema), None):
        parameters.refuse(f"has {found} where a string is allowed")
    if "const" in schema or "enum" in schema:
        types, values = declared(schema), [schema["const"]] if "const" in schema else schema["enum"]
        yield {"enum": [value for value in values if type_of(value) in types]}
        return
    given = schema.get("type", ["string", "number", "object", "array", "boolean", "null"])
    yield from (schema | {"type": kind} for kind in ([given] if isinstance(given, str) else given))


def _add_leaf(leaves: _Leaves, leaf: Schema, *, is_lenient: bool) -> None:
    if "enum" in leaf:
        for value in leaf["enum"]:
            if isinstance(value, str):
                leaves.strings.append(f"/{pattern(value)}/")
            elif isinstance(value, dict | list):
                leaves.schemas.append({"const": value})
            else:
                leaves.others.append(written(value) if isinstance(value, Decimal) else json.dumps(value))
    elif leaf["type"] == "string":
        leaves.strings.append(_string(leaf, is_lenient=is_lenient))
    elif leaf["type"] in _SIMPLE and not any(key in leaf for key in _BOUNDS):
        leaves.others.append(f"({_SIMPLE[leaf['type']]})")
    else:
        leaves.schemas.append(leaf)


def _string(leaf: Schema, *, is_lenient: bool) -> str:
    """A terminal of the strings of a schema."""
    fewest, most = int(leaf.get("minLength", 0)), leaf.get("maxLength", "")
    parts = [f"/(?s:.{{{fewest},{most and int(most)}}})/" if fewest or most != "" else _ANY]
    for keyword, patterns in (("pattern", lambda pattern: [pattern]), ("format", patterns_of)):
        try:
            found = [searched(pattern, _TEXT) for pattern in (patterns(leaf[keyword]) if keyword in leaf else ())]
        except ValueError:
            if not is_lenient:
                raise
            continue
        if None in found:
            raise ValueError(f"the {keyword} of a string matches nothing")
        parts += [f"/{regex}/" for regex in found]
    return " & ".join(parts)
