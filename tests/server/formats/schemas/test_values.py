"""What the text of a value means is decided by the schema."""

from __future__ import annotations

import json

import pytest

from pilotfish.server.formats.base import Tool
from pilotfish.server.formats.tagged import Parameters

SCHEMA = {
    "$ref": "#/$defs/root",
    "$defs": {
        "root": {
            "properties": {
                "text": {"type": "string"},
                "color": {"enum": ["red", "1"]},
                "integer": {"type": "integer"},
                "number": {"type": "number"},
                "flag": {"type": "boolean"},
                "items": {"type": "array"},
                "object": {"$ref": "#/$defs/object"},
                "nullable": {"anyOf": [{"type": "string"}, {"type": "null"}]},
                "either": {"type": ["string", "integer"]},
                "both": {"allOf": [{"type": ["string", "null"]}, {"type": ["string", "integer"]}]},
                "any": {},
                "endless": {"$ref": "#/$defs/endless"},
                "unknown": {"$ref": "#/$defs/nowhere"},
            },
            "additionalProperties": {"type": "string"},
        },
        "object": {"type": "object"},
        "endless": {"anyOf": [{"$ref": "#/$defs/endless"}, {"type": "null"}]},
    },
}
PARAMETERS = Parameters(Tool("f", parameters=json.dumps(SCHEMA)))


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("text", " 5\n", " 5\n"),
        ("color", "1", "1"),
        ("integer", " 5\n", 5),
        ("integer", "5.0", 5.0),
        ("integer", "5.5", "5.5"),
        ("integer", "true", "true"),
        ("number", "5", 5),
        ("number", "-1.5e3", -1500.0),
        ("number", "NaN", "NaN"),
        ("flag", "True", True),
        ("flag", "false", False),
        ("items", '["a", 1]', ["a", 1]),
        ("items", "[1", "[1"),
        ("object", '{"a": {}}', {"a": {}}),
        ("object", '"a"', '"a"'),
        ("object", r'{"a": "C:\dir"}', {"a": r"C:\dir"}),
        ("items", r'["\ud83d", 1e400]', ["\ufffd", 1.7976931348623157e308]),
        ("nullable", "None", None),
        ("nullable", " null ", None),
        ("nullable", "nothing ", "nothing "),
        ("nullable", "5", "5"),
        ("either", "5", 5),
        ("either", "5 a", "5 a"),
        ("both", "null", "null"),
        ("any", "5", 5),
        ("any", "", ""),
        ("endless", "null", None),
        ("unknown", "[]", []),
        ("additional", "5", "5"),
    ],
)
def test_a_text_is_read_by_the_types_of_the_schema(name, text, value):
    found = json.loads(PARAMETERS.json_of(name, text))
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize("text", ["9" * 10_000, "[" * 100_000, "[" * 300 + "]" * 300])
def test_values_that_few_would_read_are_strings(text):
    assert PARAMETERS.json_of("text", text) == PARAMETERS.json_of("any", text) == json.dumps(text)


@pytest.mark.parametrize(
    "schema",
    [
        *(True, {"properties": []}, {"$ref": "#/$ref"}, {"additionalProperties": 1}),
        *({"properties": {"x": {"type": 5}}}, {"properties": {"x": {"enum": 1, "anyOf": 2}}}),
        {"properties": {"x": {"type": [{}, None, "t"], "allOf": {}}}},
    ],
)  # fmt: skip
def test_an_unchecked_schema_is_not_an_error(schema):
    assert json.loads(Parameters(Tool("f", parameters=json.dumps(schema))).json_of("x", "a")) == "a"
