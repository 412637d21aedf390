"""Keywords together: a document is accepted if and only if `jsonschema` finds it valid, or the schema is refused."""

from __future__ import annotations

import itertools
import json
import random
import re
from typing import Any

import jsonschema
import pytest

from tests.engine.text.schemas.accepting import Accepted

NAMES = ("a", "b", "c", "xd")
VALUES = (None, True, False, 0, 1, 5, -3, 2.5, "", "a", "ab", "é\n", [], [1], {}, {"a": 1})


class _Schemas:
    """Random schemas of few names and values, so that a random document often fits."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def schema(self, depth: int) -> Any:
        rng = self._rng
        if depth <= 0 or rng.random() < 0.1:
            return rng.choice([True, True, {}, {"type": "integer"}, {"type": ["string", "null"]}, {"const": 1}, False])
        found: dict[str, Any] = {}
        for part in rng.sample([self._types, self._numbers, self._strings, self._arrays, self._objects], 2):
            found |= part(depth - 1)
        if rng.random() < 0.3:
            found |= self._combined(depth - 1)
        if rng.random() < 0.15:
            found["$ref"] = rng.choice(["#/$defs/one", "#/$defs/two"] if depth > 1 else ["#/$defs/two"])
        return found

    def root(self) -> Any:
        # No reference leads back to its own place for the same value: that has no meaning.
        definitions = {"one": self.schema(1), "two": {"type": "array", "items": self.schema(2)}}
        return {"$defs": definitions, "anyOf": [self.schema(3)]}

    def _types(self, depth: int) -> dict[str, Any]:
        rng = self._rng
        if rng.random() < 0.3:
            return {"enum": rng.sample(VALUES, rng.randint(1, 5))}
        return {"type": rng.choice(["object", "object", "array", "string", "number", "integer", ["integer", "array"]])}

    def _numbers(self, depth: int) -> dict[str, Any]:
        rng = self._rng
        keys = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
        return {key: rng.choice([-3, 0, 0.5, 1, 2.5, 5]) for key in rng.sample(keys, 1)} | (
            {"multipleOf": rng.choice([1, 2, 0.5])} if rng.random() < 0.3 else {}
        )

    def _strings(self, depth: int) -> dict[str, Any]:
        rng = self._rng
        return rng.choice([{"minLength": 1}, {"maxLength": 1}, {"pattern": "^a"}, {"pattern": "b$", "minLength": 2}])

    def _arrays(self, depth: int) -> dict[str, Any]:
        rng = self._rng
        found: dict[str, Any] = {"items": self.schema(depth)} if rng.random() < 0.5 else {}
        if rng.random() < 0.4:
            found["prefixItems"] = [self.schema(depth) for _ in range(rng.randint(1, 2))]
        if rng.random() < 0.4:
            found["minItems"] = rng.randint(0, 2)
        if rng.random() < 0.4:
            found["maxItems"] = rng.randint(0, 3)
        return found

    def _objects(self, depth: int) -> dict[str, Any]:
        rng = self._rng
        found: dict[str, Any] = {"properties": {name: self.schema(depth) for name in rng.sample(NAMES, 2)}}
        if rng.random() < 0.4:
            found["required"] = rng.sample(NAMES, rng.randint(1, 2))
        if rng.random() < 0.4:
            found["additionalProperties"] = self.schema(depth)
        if rng.random() < 0.3:
            found["patternProperties"] = {
                p: self.schema(depth) for p in rng.sample(["^x", "[ab]", "d$"], rng.randint(1, 2))
            }
        for keyword in ("minProperties", "maxProperties"):
            if rng.random() < 0.15:
                found[keyword] = rng.randint(0, 3)
        return found

    def _combined(self, depth: int) -> dict[str, Any]:
        keyword = self._rng.choice(["allOf", "anyOf", "oneOf"])
        return {keyword: [self.schema(depth) for _ in range(self._rng.randint(1, 2))]}


def document(rng: random.Random, depth: int = 2) -> Any:
    kind = rng.random()
    if depth and kind < 0.4:
        return {name: document(rng, depth - 1) for name in rng.sample([*NAMES, "e"], rng.randint(0, 3))}
    if depth and kind < 0.55:
        return [document(rng, depth - 1) for _ in range(rng.randint(0, 3))]
    return rng.choice(VALUES)


def orders(value: Any) -> list[str]:
    """The document in every order of its properties: the masks have one, which follows the schema."""
    if isinstance(value, dict):
        members = [[f"{json.dumps(name)}:{text}" for text in orders(one)] for name, one in value.items()]
        return [
            f"{{{','.join(chosen)}}}"
            for order in itertools.permutations(members)
            for chosen in itertools.product(*order)
        ]
    if isinstance(value, list):
        return [f"[{','.join(chosen)}]" for chosen in itertools.product(*map(orders, value))]
    return [json.dumps(value, ensure_ascii=False)]


def check(seeds: range) -> tuple[int, int]:
    accepted_schemas = valid_documents = 0
    for seed in seeds:
        rng = random.Random(seed)
        schema = _Schemas(rng).root()
        validator = jsonschema.Draft202012Validator(schema)
        documents = [document(rng) for _ in range(25)] + list(VALUES)
        accepted, problem = compiled(schema)
        if accepted is None:
            allowed = (
                "oneOf has schemas that may be valid together",
                "minProperties is not supported",
            )
            is_empty = "unsatisfiable" in problem and not any(map(validator.is_valid, documents))
            assert problem.startswith(allowed) or is_empty, (problem, schema)
            continue
        accepted_schemas += 1
        for one in documents:
            is_valid, texts = validator.is_valid(one), orders(one)[:5000]
            valid_documents += is_valid
            assert any(text in accepted for text in texts) == is_valid, (one, json.dumps(schema))
        for _ in range(2):
            if text := accepted.walk(rng):
                assert validator.is_valid(json.loads(text)), (text, json.dumps(schema))
    return accepted_schemas, valid_documents


def compiled(schema: Any) -> tuple[Accepted | None, str]:
    try:
        return Accepted(schema), ""
    except ValueError as problem:
        return None, str(problem)


def test_a_document_is_accepted_if_and_only_if_it_is_valid() -> None:
    schemas, documents = check(range(60))
    assert schemas > 35
    assert documents > 150


@pytest.mark.slow
def test_many_documents_are_accepted_if_and_only_if_they_are_valid() -> None:
    schemas, documents = check(range(1000, 1700))
    assert schemas > 400
    assert documents > 2000


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        ({"type": "int"}, "type has 'int'"),
        ({"maximum": "9"}, "maximum has '9'"),
        ({"maximum": 1e999}, "maximum has 1E"),
        ({"multipleOf": 0}, "multipleOf has 0"),
        ({"maxItems": -1}, "maxItems has -1"),
        ({"required": "a"}, "required has 'a'"),
        ({"required": [1]}, "required has '1'"),
        ({"$ref": "#/nowhere"}, "$ref '#/nowhere' does not refer to a part of the schema"),
        ({"enum": [1, "\x07"]}, "enum has a string with the control character"),
        ({"enum": "a"}, "enum has 'a'"),
        ({"const": 1e999}, "const has 1E"),
        ({"anyOf": []}, "anyOf is empty"),
        ({"oneOf": [{"type": "integer"}, {"minimum": 1}]}, "oneOf"),
    ],
)
def test_what_is_wrong_is_ignored_alone_and_named_if_the_schema_is_not_strict(wrong, problem, caplog) -> None:
    schema = {"type": "object", "properties": {"a": wrong, "b": {"type": "null"}}, "required": ["b"]}
    text = json.dumps(schema).replace("Infinity", "1e999")
    with pytest.raises(ValueError, match=re.escape(problem)):
        Accepted(text)
    accepted = Accepted(text, lenient=True)
    assert '{"a":5,"b":null}' in accepted
    assert '{"a":5,"b":7}' not in accepted
    assert problem in caplog.text


_NESTED = {"properties": {"a": {"properties": {"b": {"type": "integer"}}}, "free": {"type": "object"}}}


@pytest.mark.parametrize(
    ("schema", "accepted", "refused"),
    [
        ({}, ["{}"], ['{"a":1}', "1"]),
        ({"type": "object"}, ["{}"], ['{"a":1}']),
        ({"properties": {"a": {}}}, ["{}", '{"a":1}'], ['{"a":1,"b":1}', '{"b":1}']),
        ({"properties": {"a": {}}, "additionalProperties": True}, ['{"a":1,"b":1}'], []),
        ({"additionalProperties": {"type": "integer"}}, ["{}", '{"a":1}'], ['{"a":"x"}']),
        ({"patternProperties": {"^x": {"type": "integer"}}}, ["{}", '{"x1":1}'], ['{"x1":"a"}', '{"y":1}']),
        (_NESTED, ['{"a":{"b":1},"free":{"c":1}}'], ['{"a":{"c":1}}', '{"c":1}']),
        (
            {"properties": {"a": {}}, "anyOf": [{"properties": {"b": {}}}, {"required": ["a"]}]},
            ['{"a":1,"b":1}'],
            ['{"a":1,"c":1}'],
        ),
        ({"$ref": "#/$defs/f", "$defs": {"f": {"properties": {"a": {}}}}}, ['{"a":1}'], ['{"b":1}']),
        ({"required": ["a"]}, ['{"a":1}'], ["{}", '{"a":1,"b":1}']),
    ],
    ids=str,
)
def test_arguments_have_declared_properties_unless_the_schema_allows_others(schema, accepted, refused) -> None:
    documents = Accepted(schema, of_tool=True, lenient=True)
    assert [text for text in accepted if text not in documents] == []
    assert [text for text in refused if text in documents] == []
