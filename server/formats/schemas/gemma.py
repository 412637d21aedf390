"""JSON Schemas as Lark rules for the notation in which Gemma writes arguments.

The notation has strings between marks, and names without quotes: `{city:<|"|>Paris<|"|>,days:[1,2]}`. What is not
converted here is JSON, which the parser reads too: numbers, and values of schemas with other keywords.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from typing import Any

from engine.text.schemas.keywords import Document, parsed
from engine.text.schemas.rules import schema_rule
from server.formats.base import Tool, pattern, quoted

_Schema = Mapping[str, Any]

_ANNOTATIONS = frozenset(
    {
        "title",
        "description",
        "default",
        "examples",
        "deprecated",
        "readOnly",
        "writeOnly",
        "$comment",
        "$schema",
        "$id",
        "$defs",
        "definitions",
    }
)
_SIMPLE = {"type": ["number", "boolean", "null"]}
_NOT_BARE = frozenset(':,{}[]"<>')
_NAME_END = r'[^\s\x00-\x1f:,{}\[\]"<>]'
_ANY_NAME = rf'/{_NAME_END}([^\x00-\x1f:,{{}}\[\]"<>]*{_NAME_END})?/'


def argument_rules(name: str, tool: Tool, quote: str) -> str:
    """Lark rules of which the one of this name matches the arguments of a tool.

    Args:
        name: with which the names of all rules begin.
        tool: whose arguments they are.
        quote: the mark around strings, in Lark.

    Raises:
        ValueError: the schema is wrong.
    """
    root = parsed(tool.parameters)
    return _Converter(name, root, quote, lenient=not tool.strict).rules({"type": "object"} | root)


class _Converter:
    """Writes a rule for every part of a schema that more than one rule needs."""

    def __init__(self, name: str, root: _Schema, quote: str, *, lenient: bool) -> None:
        self._name, self._root, self._quote, self._lenient = name, root, quote, lenient
        self._document = Document(root)
        self._references: dict[str, str] = {}
        self._lines: list[str] = []

    def rules(self, schema: _Schema) -> str:
        """All rules."""
        top = self._value(schema)
        return "\n".join([f"{self._name}: {top}", *self._lines])

    def _rule(self, body: str) -> str:
        name = f"{self._name}_{len(self._lines)}"
        self._lines.append(f"{name}: {body}")
        return name

    def _value(self, schema: Any) -> str:
        """What matches the values of a schema."""
        keywords = schema.keys() - _ANNOTATIONS if isinstance(schema, dict) else set()
        if schema is True or (isinstance(schema, dict) and not keywords):
            return self._reference("")
        if keywords == {"$ref"}:
            return self._reference(schema["$ref"])
        if keywords == {"anyOf"}:
            return _one_of(map(self._value, schema["anyOf"]))
        if keywords == {"enum"} or (keywords == {"enum", "type"} and _has_strings(schema)):
            return _one_of(map(self._constant, schema["enum"]))
        return self._typed(schema, keywords)

    def _typed(self, schema: Any, keywords: AbstractSet[str]) -> str:
        kind = schema["type"] if "type" in keywords else None
        if isinstance(kind, list) and len(kind) > 1:
            return _one_of(self._value(schema | {"type": one}) for one in kind)
        if kind == "string" and keywords <= {"type", "minLength", "maxLength"}:
            return self._string(schema)
        if kind == "array" and keywords <= {"type", "items", "minItems", "maxItems"}:
            return self._array(schema)
        if kind == "object" and keywords <= {"type", "properties", "required", "additionalProperties"}:
            return self._object(schema)
        return self._json(schema)

    def _json(self, schema: Any) -> str:
        return schema_rule(schema, self._root, lenient=self._lenient)

    def _reference(self, reference: str) -> str:
        """The rule of what a reference names; of any value for ""."""
        if reference not in self._references:
            rule = self._references[reference] = f"{self._name}_ref_{len(self._references)}"
            body = self._value(self._document.resolved(None, reference)) if reference else self._anything(rule)
            self._lines.append(f"{rule}: {body}")
        return self._references[reference]

    def _anything(self, rule: str) -> str:
        array, members = _listed(rule), _listed(f'{_ANY_NAME} ":" {rule}')
        return f'{self._string({})} | {schema_rule(_SIMPLE)} | "[" {array} "]" | "{{" {members} "}}"'

    def _constant(self, value: Any) -> str:
        if isinstance(value, str):
            return f"{self._quote} {quoted(value) if value else ''} {self._quote}"
        return self._json({"const": value})

    def _string(self, schema: _Schema) -> str:
        fewest, most = int(schema.get("minLength", 0)), schema.get("maxLength", "")
        text = f"/(?s:.{{{fewest},{most and int(most)}}})/" if fewest or most != "" else "/(?s:.*)/"
        return f"{self._quote} {text} {self._quote}"

    def _array(self, schema: _Schema) -> str:
        fewest, most = int(schema.get("minItems", 0)), schema.get("maxItems")
        if most == 0:
            return '"[]"'
        item = self._rule(self._value(schema.get("items", True)))
        further = f"{{{max(0, fewest - 1)},{'' if most is None else int(most) - 1}}}"
        items = item if most == 1 else f'{item} ("," {item}){further}'
        return f'"[" {items} "]"' if fewest else f'"[" ({items})? "]"'

    def _object(self, schema: _Schema) -> str:
        """The members in the order of their names, as in the chat templates, and then others."""
        properties, required = schema.get("properties", {}), schema.get("required", [])
        if not properties.keys() >= set(required):
            return self._json(schema)
        after, firsts = self._others(schema)
        is_empty = not required
        for name in sorted(properties, key=str.lower, reverse=True):
            member = self._rule(f"{self._name_of(name)} {self._value(properties[name])}")
            first = f"{member} {after}"
            firsts = [first] if name in required else [first, *firsts]
            after = self._rule(f'("," {member}){"" if name in required else "?"} {after}')
        members = f"({' | '.join(firsts)}){'?' if is_empty else ''}" if firsts else ""
        return f'"{{" {members} "}}"'

    def _others(self, schema: _Schema) -> tuple[str, list[str]]:
        """What matches undeclared members after others, and the ways in which they stand alone."""
        allowed = schema.get("additionalProperties", True)
        if allowed is False:
            return "", []
        declared = "|".join(map(pattern, schema.get("properties", {})))
        terminal = f"{self._name}_{len(self._lines)}".upper()
        self._lines.append(f"{terminal}: {_ANY_NAME}{f' & ~/({declared})/' if declared else ''}")
        other = self._rule(f'{terminal} ":" {self._value(allowed)}')
        after = self._rule(f'("," {other})*')
        return after, [f"{other} {after}"]

    def _name_of(self, name: str) -> str:
        is_bare = name and name == name.strip() and _NOT_BARE.isdisjoint(name)
        return quoted(f"{name}:") if is_bare else f'{self._constant(name)} ":"'


def _one_of(choices: Iterable[str]) -> str:
    return f"({' | '.join(choices)})"


def _listed(item: str) -> str:
    return f'({item} ("," {item})*)?'


def _has_strings(schema: _Schema) -> bool:
    return schema["type"] == "string" and all(isinstance(value, str) for value in schema["enum"])
