"""Values that a model writes as plain text, without JSON's quotes: what a text means is decided by the schema.

A parameter that can only be a string is the text as it is; one that cannot be a string is JSON; of others a text is
JSON if it is a value of a type that is allowed, and else a string. So a string that looks like such a value cannot be
written.
"""

from __future__ import annotations

import json
from decimal import Decimal
from typing import Any, NoReturn, TypeAlias

from engine.text.schemas.documents import Document, parsed
from engine.text.schemas.rules import schema_rule
from server.formats.base import Tool
from server.formats.json_text import value_in

Schema: TypeAlias = dict[str, Any]

STRING = frozenset({"string"})
SPACE = " \t\r\n"
_TYPES = frozenset({"string", "integer", "number", "object", "array", "boolean", "null"})
_PYTHON = {"True": "true", "False": "false", "None": "null"}  # templates show the calls of the past with these words
_NOTES = ("title", "description", "default", "examples", "deprecated")
_MAX_DEPTH = 16  # of references and unions in each other


class Parameters:
    """The parameters of a tool by their names."""

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
        """The types that a value can have."""
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
        """Raise a ValueError: this schema cannot be written."""
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
