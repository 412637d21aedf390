"""Resolves combinations of schemas: `$ref`, `allOf`, `anyOf`, `oneOf`, `const` and `enum`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from decimal import Decimal
from typing import Any

from pilotfish.engine.text.schemas.keywords import VALUES, Branch, Keywords, Schema
from pilotfish.engine.text.schemas.numbers import checked
from pilotfish.engine.text.schemas.patterns import writable

MAX_PARTS = 20_000  # maximum schemas and branches; each takes about 20 us
_PARTS_PER_COUNT = 100  # maximum size of a copied branch
_REFUSED = (
    "contains", "dependencies", "dependentRequired", "dependentSchemas", "if", "not", "propertyNames",
    "unevaluatedItems", "unevaluatedProperties", "uniqueItems", "$dynamicRef", "$recursiveRef",
)  # fmt: skip
_SINCE = {"contains": 6, "if": 7, "propertyNames": 6}  # the draft before which a keyword has no meaning
_ASSERTIONS = frozenset({
    "additionalItems", "additionalProperties", "exclusiveMaximum", "exclusiveMinimum", "format", "items", "maxItems",
    "maxLength", "maxProperties", "maximum", "minItems", "minLength", "minProperties", "minimum", "multipleOf",
    "pattern", "patternProperties", "prefixItems", "properties", "required", "type",
})  # fmt: skip


class Branches:
    """Expands schemas into branches: a value is valid if it satisfies all schemas of one branch."""

    def __init__(self, keywords: Keywords) -> None:
        self._keywords = keywords
        self._parts = 0
        self._found: dict[int, list[Branch]] = {}
        self._kept: list[Schema] = []
        self.one_ofs: dict[int, tuple[Schema, list[Schema]]] = {}  # to be checked; the first is all beside it

    def count(self, number: int = 1) -> None:
        """Count work. Raises ValueError above the limit."""
        self._parts += number
        if self._parts > MAX_PARTS:
            raise ValueError("schema too large")

    def of(self, schemas: Iterable[Schema], around: tuple[int, ...] = ()) -> list[Branch]:
        """The alternative branches that satisfy all of these schemas."""
        found: list[Branch] = [[]]
        for schema in schemas:
            found = self._both(found, self._of_one(schema, around))
        return found

    def _both(self, some: list[Branch], others: list[Branch]) -> list[Branch]:
        """The combinations of one branch of each. Raises ValueError if they are too many or too long."""
        size = len(some) * sum(map(len, others)) + len(others) * sum(map(len, some))
        self.count(len(some) * len(others) + size // _PARTS_PER_COUNT)
        return [list({id(part): part for part in [*one, *other]}.values()) for one in some for other in others]

    def _of_one(self, schema: Schema, around: tuple[int, ...]) -> list[Branch]:
        if schema is True or schema is False:
            return [[]] if schema else []
        if not isinstance(schema, dict):
            self._keywords.fail(f"{str(schema)[:40]!r} is not a schema; expected an object, true or false", None)
        if id(schema) in around:
            self._keywords.fail("$ref refers to itself", schema)
        if id(schema) not in self._found:
            self._kept.append(schema)
            self._found[id(schema)] = self._split(schema, (*around, id(schema)))
        return self._found[id(schema)]

    def _split(self, schema: dict[str, Any], around: tuple[int, ...]) -> list[Branch]:
        self.count()
        if "$ref" in schema and self._keywords.document.draft <= 7:  # `$ref` ignores all keywords beside it
            return self.of([self._referenced(schema)], around)
        for keyword in _REFUSED:
            is_known = self._keywords.document.draft >= _SINCE.get(keyword, 0)
            if is_known and schema.get(keyword, False) is not False:
                self._keywords.refuse(keyword, "is not supported", schema)
        own = "properties" if "properties" in schema else next((key for key in schema if key in _ASSERTIONS), None)
        found: list[Branch] = [[]]
        for keyword in schema:
            if keyword == own:
                further = [[schema]]
            elif keyword in ("allOf", "anyOf", "oneOf"):
                further = self._combined(schema, keyword, around)
            elif keyword == "$ref":
                further = self.of([self._referenced(schema)], around)
            elif keyword in ("const", "enum"):
                further = self._given(schema, keyword)
            else:
                continue
            found = self._both(found, further)
        return found

    def _referenced(self, schema: dict[str, Any]) -> Schema:
        try:
            return self._keywords.document.resolved(schema, schema["$ref"])
        except ValueError as problem:
            self._keywords.refuse("$ref", str(problem), schema)
            return True

    def _given(self, schema: dict[str, Any], keyword: str) -> list[Branch]:
        """Branches of the values of `const` or `enum`."""
        values = [schema["const"]] if keyword == "const" else self._keywords.read(schema, keyword, list, None)
        try:
            return [[]] if values is None else [[self.keep(one)] for one in _constants(values)]
        except ValueError as problem:
            self._keywords.refuse(keyword, str(problem), schema)
            return [[]]

    def _combined(self, schema: dict[str, Any], keyword: str, around: tuple[int, ...]) -> list[Branch]:
        options = self._keywords.read(schema, keyword, list, [])
        if not options:
            self._keywords.refuse(keyword, "is empty", schema)
            return [[]]
        if keyword == "allOf":
            return self.of(options, around)
        if keyword == "oneOf" and self._keywords.is_lenient:
            self._keywords.refuse(keyword, "is treated as anyOf", schema)
        elif keyword == "oneOf":
            rest = {key: value for key, value in schema.items() if key != "oneOf"}
            self.one_ofs.setdefault(id(schema), (schema, [self.keep(rest), *options]))
        return [branch for option in options for branch in self._of_one(option, around)]

    def keep(self, schema: Schema) -> Schema:
        """Keep a generated schema alive, so that its id stays unique."""
        self._kept.append(schema)
        return schema


def _constants(values: Sequence[Any]) -> Iterator[Schema]:
    """Schemas of these values: one for all values of a simple type."""
    simple: dict[str, dict[Any, None]] = {}
    for value in values:
        if value is None:
            simple["null"] = {}
        elif isinstance(value, bool):
            simple.setdefault("boolean", {})[value] = None
        elif isinstance(value, Decimal):
            simple.setdefault("number", {})[checked(value)] = None
        elif isinstance(value, str):
            simple.setdefault("string", {})[writable(value)] = None
    for kind, found in simple.items():
        yield {"type": kind, VALUES: found}
    for value in values:
        if isinstance(value, list):
            items, size = [{"const": item} for item in value], Decimal(len(value))
            yield {"type": "array", "items": items, "additionalItems": False, "minItems": size, "maxItems": size}
        elif isinstance(value, dict):
            properties = {name: {"const": one} for name, one in value.items()}
            yield {
                "type": "object", "properties": properties, "required": list(value), "additionalProperties": False,
            }  # fmt: skip
