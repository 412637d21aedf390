"""JSON Schemas as Lark rules for the notation in which Gemma writes arguments.

The notation has strings between marks, and names without quotes: `{city:<|"|>Paris<|"|>,days:[1,2]}`. What is not
converted here is JSON, which the parser reads too: numbers, and values of schemas with other keywords.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from typing import Any

from engine.text.guided import json_rule
from server.formats.base import Tool, pattern, quoted

_Schema = Mapping[str, Any]

_ANNOTATIONS = frozenset(
    {"title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$comment", "$schema", "$id"}
)
_DEFINITIONS = ("$defs", "definitions")
_SIMPLE = '{"type": ["number", "boolean", "null"]}'
_NOT_BARE = frozenset(':,{}[]"<>')
_NAME_END = r'[^\s\x00-\x1f:,{}\[\]"<>]'
_ANY_NAME = rf'/{_NAME_END}([^\x00-\x1f:,{{}}\[\]"<>]*{_NAME_END})?/'


class _NotConverted(Exception):
    """The arguments have to be JSON."""


def argument_rules(name: str, tool: Tool, quote: str) -> str:
    """Lark rules of which the one of this name matches the arguments of a tool.

    Args:
        name: with which the names of all rules begin.
        tool: whose arguments they are.
        quote: the mark around strings, in Lark.

    Raises:
        ValueError: the schema is wrong.
    """
    schema = {"type": "object"} | json.loads(tool.parameters)
    try:
        return _Converter(name, schema, quote).rules()
    except _NotConverted:
        return f"{name}: {json_rule(json.dumps(schema))}"


class _Converter:
    """Writes a rule for every part of a schema that more than one rule needs."""

    def __init__(self, name: str, schema: _Schema, quote: str) -> None:
        self._name, self._root, self._quote = name, schema, quote
        self._references: dict[str, str] = {}
        self._lines: list[str] = []
        self._definitions = {key: schema[key] for key in _DEFINITIONS if key in schema}

    def rules(self) -> str:
        """All rules."""
        top = self._value({key: value for key, value in self._root.items() if key not in _DEFINITIONS})
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
        """JSON. It may refer to definitions, but not to other parts of the whole schema, which it is not."""
        if any(not ref.startswith(("#/$defs/", "#/definitions/")) for ref in _references(schema)):
            raise _NotConverted
        return json_rule(json.dumps(schema | self._definitions if isinstance(schema, dict) else schema))

    def _reference(self, reference: str) -> str:
        """The rule of what a reference names; of any value for ""."""
        if reference not in self._references:
            rule = self._references[reference] = f"{self._name}_ref_{len(self._references)}"
            body = self._value(self._resolved(reference)) if reference else self._anything(rule)
            self._lines.append(f"{rule}: {body}")
        return self._references[reference]

    def _resolved(self, reference: str) -> Any:
        found: Any = self._root
        for part in reference.removeprefix("#").split("/")[1:]:
            found = found.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(found, dict) else None
        if found is None or not reference.startswith("#"):
            raise _NotConverted
        return found

    def _anything(self, rule: str) -> str:
        array, members = _listed(rule), _listed(f'{_ANY_NAME} ":" {rule}')
        return f'{self._string({})} | {json_rule(_SIMPLE)} | "[" {array} "]" | "{{" {members} "}}"'

    def _constant(self, value: Any) -> str:
        if isinstance(value, str):
            return f"{self._quote} {quoted(value) if value else ''} {self._quote}"
        return quoted(json.dumps(value)) if not isinstance(value, dict | list) else self._json({"const": value})

    def _string(self, schema: _Schema) -> str:
        fewest, most = schema.get("minLength", 0), schema.get("maxLength", "")
        text = f"/(?s:.{{{fewest},{most}}})/" if fewest or most != "" else "/(?s:.*)/"
        return f"{self._quote} {text} {self._quote}"

    def _array(self, schema: _Schema) -> str:
        fewest, most = schema.get("minItems", 0), schema.get("maxItems")
        if most == 0:
            return '"[]"'
        item = self._rule(self._value(schema.get("items", True)))
        further = f"{{{max(0, fewest - 1)},{'' if most is None else most - 1}}}"
        items = item if most == 1 else f'{item} ("," {item}){further}'
        return f'"[" {items} "]"' if fewest else f'"[" ({items})? "]"'

    def _object(self, schema: _Schema) -> str:
        """The members in the order of their names, as in the chat templates, and then others."""
        properties, required = schema.get("properties", {}), schema.get("required", [])
        if not properties.keys() >= set(required):
            raise _NotConverted
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


def _references(schema: Any) -> Iterator[str]:
    """Everything that a schema refers to."""
    if isinstance(schema, dict):
        if isinstance(schema.get("$ref"), str):
            yield schema["$ref"]
        schema = list(schema.values())
    if isinstance(schema, list):
        for part in schema:
            yield from _references(part)
