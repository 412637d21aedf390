"""Random JSON Schemas whose documents are small, so that a random walk under their masks comes to its end."""

from __future__ import annotations

import random
from typing import Any

Schema = dict[str, Any]

_PATTERNS = ("^[a-z]{1,6}$", "^(ab|cd)+e?$", "^[A-Z][a-z]{0,4}-[0-9]{2}$", "^x{2,5}$")
_NAMES = ("a", "name", "größe", "with space", 'quo"te', "back\\slash", "n0", "€")
_CONSTANTS = ("red", "grün", "", 'a "b"', "tab\there", 0, -17, 3.5, True, False, None)


def random_schema(seed: int, depth: int = 3) -> Schema:
    """The schema of this seed: what the library implements of objects, arrays, strings, numbers, enums and anyOf."""
    return _schema(random.Random(seed), depth)


def _schema(rng: random.Random, depth: int) -> Schema:
    nested = [_object, _array, _any_of] if depth else []
    return rng.choice([_string, _integer, _enum, _simple, *nested, *nested])(rng, depth - 1)


def _object(rng: random.Random, depth: int) -> Schema:
    names = rng.sample(_NAMES, rng.randint(0, 4))
    return {
        "type": "object",
        "properties": {name: _schema(rng, depth) for name in names},
        "required": [name for name in names if rng.random() < 0.5],
        # A name that comes twice would count twice for the library and once for a reader of the document.
        "additionalProperties": False,
    }


def _array(rng: random.Random, depth: int) -> Schema:
    fewest = rng.randint(0, 2)
    schema: Schema = {"type": "array", "items": _schema(rng, depth), "minItems": fewest}
    if rng.random() < 0.3:
        schema["prefixItems"] = [_schema(rng, depth)]
    return schema | {"maxItems": fewest + rng.randint(0, 2)}


def _any_of(rng: random.Random, depth: int) -> Schema:
    return {"anyOf": [_schema(rng, depth) for _ in range(rng.randint(1, 3))]}


def _string(rng: random.Random, depth: int) -> Schema:
    if rng.random() < 0.4:
        return {"type": "string", "pattern": rng.choice(_PATTERNS), "maxLength": 12}
    fewest = rng.randint(0, 3)
    return {"type": "string", "minLength": fewest, "maxLength": fewest + rng.randint(0, 6)}


def _integer(rng: random.Random, depth: int) -> Schema:
    low = rng.randint(-1000, 1000)
    return {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 5000)}


def _enum(rng: random.Random, depth: int) -> Schema:
    return {"enum": rng.sample(_CONSTANTS, rng.randint(1, 4))}


def _simple(rng: random.Random, depth: int) -> Schema:
    return {"type": rng.choice(["boolean", "null"])}
