"""Lark rules of values that are written as plain text: what `values` reads as a value that is valid under its schema.

A lexer takes the longest text, so a string must not begin as JSON that could stand in its place, and ends where the
mark behind it is complete.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from decimal import Decimal

from engine.text.schemas.formats import patterns_of
from engine.text.schemas.numbers import written
from engine.text.schemas.patterns import Alphabet, searched
from server.formats.base import pattern, quoted
from server.formats.schemas.values import STRING, Parameters, Schema, declared, type_of

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
_MAX_DEPTH = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueEnd:
    """What stands behind a value.

    Args:
        line_break: a line break before the mark, or nothing.
        mark: the text of the mark.
        token: the mark in Lark if it is a token; no text contains it.
        followers: the parser takes the mark for the end of the value only before one of these.
    """

    line_break: str
    mark: str
    token: str | None
    followers: Sequence[str]

    @property
    def lark(self) -> str:
        """The end in Lark."""
        return quoted(self.line_break + self.mark) if self.token is None else f"{quoted(self.line_break)} {self.token}"


class ValueRules:
    """The rules of the values of all parameters: those with the same schema share them."""

    def __init__(self, end: ValueEnd) -> None:
        self._end = end
        self._names: dict[str, str] = {}
        self.rules: list[str] = []

    def name(self, parameters: Parameters, parameter: str) -> str:
        """The name of the rule that matches a value of a parameter and its end.

        Raises:
            ValueError: the schema allows strings, and is none that can be written.
        """
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
    """Lark rules of which `rule` matches a value of a parameter and its end."""
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
