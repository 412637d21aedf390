"""Bounds, steps and values of numbers: a number is accepted if and only if it is valid, in exact arithmetic."""

from __future__ import annotations

import json
import random
from decimal import Decimal
from fractions import Fraction
from typing import Any

import pytest

from tests.engine.text.schemas.accepting import Accepted

KEYWORDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")


def number(rng: random.Random) -> Decimal:
    """Small ones, decimals, those beyond the integers of a double, and very large and small ones."""
    kind = rng.randrange(5)
    if kind == 0:
        return Decimal(rng.randint(-12, 12))
    if kind == 1:
        return Decimal(rng.randint(-12000, 12000)).scaleb(-rng.randint(0, 4))
    if kind == 2:
        return Decimal(rng.choice([-1, 1]) * 2 ** rng.choice([31, 53, 63, 64]) + rng.randint(-3, 3))
    if kind == 3:
        return Decimal(rng.choice(["0", "0.1", "0.5", "0.9", "0.99", "9.99", "1", "10", "100"])) * rng.choice([-1, 1])
    return Decimal(rng.randint(-999, 999)).scaleb(rng.randint(-12, 30))


def written(value: Decimal) -> str:
    text = f"{value:f}"
    text = text.rstrip("0").rstrip(".") if "." in text else text
    return "0" if text == "-0" else text


def random_numbers(rng: random.Random) -> dict[str, Any]:
    """A schema of numbers: values, or bounds that are often close to each other, and a step."""
    kind = rng.choice(["integer", "number"])
    if rng.random() < 0.15:
        values = [number(rng) for _ in range(rng.randint(1, 4))]
        return {"enum": values} if rng.random() < 0.5 else {"const": values[0], "type": ["number", "null"]}
    schema: dict[str, Any] = {"type": kind}
    low = number(rng)
    for keyword in rng.sample(KEYWORDS, rng.randint(1, 3)):
        near = low + abs(number(rng)).scaleb(-rng.randint(0, 3))
        schema[keyword] = low if keyword.lower().endswith("minimum") else near if rng.random() < 0.7 else number(rng)
    if rng.random() < 0.35:
        steps = ["1", "2", "5", "10", "3", "7", "60", "0.5", "0.25", "0.01", "0.05", "2.5", "1e-7", "1000", "0.3"]
        schema["multipleOf"] = Decimal(rng.choice(steps))
    return schema


def is_valid(value: Decimal, schema: dict[str, Any]) -> bool:
    exact = Fraction(value)
    holds = [
        "minimum" not in schema or exact >= Fraction(schema["minimum"]),
        "maximum" not in schema or exact <= Fraction(schema["maximum"]),
        "exclusiveMinimum" not in schema or exact > Fraction(schema["exclusiveMinimum"]),
        "exclusiveMaximum" not in schema or exact < Fraction(schema["exclusiveMaximum"]),
        "multipleOf" not in schema or (exact / Fraction(schema["multipleOf"])).denominator == 1,
        schema.get("type") != "integer" or exact.denominator == 1,
        "enum" not in schema or value in schema["enum"],
        "const" not in schema or value == schema["const"],
    ]
    return all(holds)


def candidates(rng: random.Random, schema: dict[str, Any]) -> list[Decimal]:
    """NumberSet at, near and far from those in the schema."""
    found = [number(rng) for _ in range(4)]
    named = [value for key in (*KEYWORDS, "const") if isinstance(value := schema.get(key), Decimal)]
    for value in [*named, *schema.get("enum", [])]:
        found += [
            value,
            value.copy_negate(),
            value + Decimal(rng.choice(["1", "-1", "0.1", "-0.01", "1e-9", "-1e-14"])),
        ]
        found.append(Decimal(str(value)[: rng.randint(1, len(str(value)))].rstrip("E.-+") or 0))
    if step := schema.get("multipleOf"):
        found += [step * rng.randint(-40, 40) for _ in range(3)]
    return found


def as_text(schema: dict[str, Any]) -> str:
    """JSON with each number as it is."""
    marked = json.dumps(schema, default=lambda value: f"#{value}#")
    return marked.replace('"#', "").replace('#"', "")


def compiled(schema: str) -> tuple[Accepted | None, str]:
    try:
        return Accepted(schema), ""
    except ValueError as problem:
        return None, str(problem)


def check(seeds: range) -> int:
    pairs = refused = 0
    for seed in seeds:
        rng = random.Random(seed)
        schema = random_numbers(rng)
        values = candidates(rng, schema)
        accepted, problem = compiled(as_text(schema))
        if accepted is None:
            assert "multipleOf" in problem or not any(is_valid(value, schema) for value in values), as_text(schema)
            refused += "multipleOf" in problem
            continue
        for value in values:
            pairs += 1
            assert (written(value) in accepted) == is_valid(value, schema), (written(value), as_text(schema))
    assert refused < len(seeds) / 10
    return pairs


def test_a_number_is_accepted_if_and_only_if_it_is_valid() -> None:
    assert check(range(250)) > 1500


@pytest.mark.slow
def test_twenty_thousand_numbers_are_accepted_if_and_only_if_they_are_valid() -> None:
    assert check(range(1000, 3600)) > 20_000


BIG = 1234567890123456789


@pytest.mark.parametrize(
    ("schema", "valid", "invalid"),
    [
        ({"const": BIG}, [BIG], [BIG + 1, BIG - 21, float(BIG)]),
        ({"enum": [BIG, "x"]}, [BIG], [BIG - 1]),
        ({"type": "object", "properties": {"id": {"const": BIG}}, "required": ["id"]}, [f'{{"id":{BIG}}}'], []),
        ({"const": [BIG, {"a": BIG}]}, [f'[{BIG},{{"a":{BIG}}}]'], [f'[{BIG},{{"a":{BIG + 1}}}]']),
        ({"type": "integer", "minimum": BIG, "maximum": BIG}, [BIG], [BIG + 1, BIG - 1]),
        ({"type": "integer", "exclusiveMinimum": 2**53}, [2**53 + 1, 2**80], [2**53, 2**53 - 1]),
        ({"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}, [-(2**63), 2**63 - 1], [2**63, -(2**63) - 1]),
        ({"type": "integer", "minimum": 0, "maximum": 2**64 - 1}, [0, 2**64 - 1], [2**64, -1]),
        ({"type": "number", "exclusiveMinimum": 0, "maximum": 0.5}, ["0.5", "0.1", "0.50"], [0, "-0", "0.0", "0.51"]),
        ({"type": "number", "minimum": -0.5, "exclusiveMaximum": 0}, ["-0.5", "-0.1"], [0, "-0", "-0.0"]),
        ({"type": "number", "minimum": 0, "maximum": 0.99}, ["0.9", "0.92", "0.5", "0", "0.990"], ["0.991", 1]),
        ({"type": "number", "maximum": 9.99}, ["9.9", "9", "-100.5", "9.99"], ["9.991", 10]),
        ({"type": "number", "minimum": 1e-7, "maximum": 1e30}, ["0.0000001", 10**30, 1], ["0.00000009", 10**30 + 1, 0]),
        ({"type": "number", "multipleOf": 0.01}, ["0.07", "12.3", 5, "-1.25"], ["0.001", "1.255"]),
        ({"type": "number", "multipleOf": 2.5}, ["2.5", 5, "-7.5", "102.50"], ["2.4", 4, "2.55"]),
        ({"type": "integer", "multipleOf": 3, "minimum": 10}, [12, 15], [10, 9, 13]),
        ({"type": "integer", "multipleOf": 0.3}, [3, -6], [1]),
        ({"minimum": 5}, [5, '"a"', "[1]", "null"], [4]),
        ({"type": "integer", "minimum": 3, "exclusiveMinimum": 3}, [4], [3]),
        (
            {"$schema": "http://json-schema.org/draft-04/schema#", "type": "integer", "minimum": 3,
             "exclusiveMinimum": True},
            [4], [3],
        ),
        ({"allOf": [{"maximum": 0.99}, {"minimum": 0.985}], "type": "number"}, ["0.985", "0.99"], ["0.9", "0.98", 1]),
    ],
)  # fmt: skip
def test_a_bound_is_exact(schema: Any, valid: list[Any], invalid: list[Any]) -> None:
    accepted = Accepted(schema)
    assert [value for value in valid if str(value) not in accepted] == []
    assert [value for value in invalid if str(value) in accepted] == []


@pytest.mark.parametrize(
    ("schema", "problem"),
    [
        ({"type": "number", "multipleOf": 0.3}, "multipleOf 0.3"),
        (
            {"type": "integer", "multipleOf": 3, "minimum": 2**60},
            "multipleOf 3 is not supported|3 is not supported beside a bound",
        ),
        ({"type": "integer", "multipleOf": 999983}, "multipleOf 999983"),
        ({"multipleOf": 0}, "multipleOf has 0; expected a number above 0"),
        ('{"maximum": 1e999999999}', "maximum has 1E"),
        ({"maximum": "5"}, "maximum has '5'; expected a number"),
        ({"type": "integer", "minimum": 1.1, "maximum": 1.9}, "the schema is unsatisfiable"),
    ],
)
def test_what_cannot_be_exact_is_refused_by_name(schema: Any, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        Accepted(schema)
