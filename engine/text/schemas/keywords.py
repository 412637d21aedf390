"""A schema document and its keywords, supported and refused."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from decimal import Decimal
from fractions import Fraction
from typing import Any, NoReturn, TypeAlias
from urllib.parse import unquote, urldefrag, urljoin

from pilotfish.engine.text.schemas.numbers import Bound, NumberSet, checked
from pilotfish.engine.text.schemas.patterns import Alphabet, patterns_of, searched

Schema: TypeAlias = Any  # an object, true or false; invalid ones may have any type

DOCUMENTS = ("const", "default", "enum", "examples")  # keywords whose values are not schemas
_DRAFT = re.compile(r"draft[/-](?:0?)(\d{1,4})")
_LATEST = 2020


def parsed(text: str) -> Schema:
    """Parse a schema, with all numbers as decimals. Raises ValueError if the text is not JSON."""
    return _DECODER.decode(text)


def parsed_part(text: str) -> tuple[Schema, int]:
    """Parse the schema at the beginning of a text; also return its length. Raises ValueError if it is not JSON."""
    return _DECODER.raw_decode(text)


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is not valid JSON")


_DECODER = json.JSONDecoder(parse_int=Decimal, parse_float=Decimal, parse_constant=_refuse)


class Document:
    """A schema document, in which references are resolved."""

    def __init__(self, root: Schema) -> None:
        self._root = root
        named = root.get("$schema") if isinstance(root, dict) else None
        found = _DRAFT.search(named) if isinstance(named, str) else None
        self.draft = int(found[1]) if found else _LATEST
        self._places: dict[int, str] = {}
        self._bases: dict[int, str] = {}
        self._resources: dict[str, Schema] = {"": root}
        self._anchors: dict[tuple[str, str], Schema] = {}
        for part, base, place in _parts(root, "", "#"):
            self._places[id(part)], self._bases[id(part)] = place, base
            self._resources.setdefault(base, part)
            for keyword in ("$anchor", "$dynamicAnchor"):
                if isinstance(part.get(keyword), str):
                    self._anchors[base, part[keyword]] = part
            name = part.get("$id")
            if isinstance(name, str) and name.startswith("#"):
                self._anchors[base, name[1:]] = part

    def place(self, part: Schema) -> str:
        """The JSON pointer of a part; empty if it is not a part of the document."""
        return self._places.get(id(part), "")

    def resolved(self, part: Schema, reference: Any) -> Schema:
        """The target of a reference in a part of the document. Raises ValueError if it is missing."""
        base = self._bases.get(id(part), "")
        reference = str(reference)
        url, fragment = urldefrag(base + reference if reference.startswith("#") else urljoin(base, reference))
        try:
            if fragment and not fragment.startswith("/"):
                return self._anchors[url, fragment]
            found = self._resources[url]
            for key in unquote(fragment).split("/")[1:]:
                name = key.replace("~1", "/").replace("~0", "~")
                found = found[int(name)] if isinstance(found, list) else found[name]
        except (KeyError, IndexError, TypeError, ValueError):
            raise ValueError(f"{reference[:80]!r} does not refer to a part of the schema") from None
        return found


def _parts(part: Any, base: str, place: str) -> Iterator[tuple[dict[str, Any], str, str]]:
    """All objects of a document, each with its address and JSON pointer."""
    waiting = [(part, base, place)]
    while waiting:
        part, base, place = waiting.pop()
        if isinstance(part, dict):
            name = part.get("$id", part.get("id"))
            if isinstance(name, str) and not name.startswith("#"):
                base = urldefrag(urljoin(base, name))[0]
            yield part, base, place
            waiting += [(value, base, f"{place}/{key}") for key, value in part.items() if key not in DOCUMENTS]
        elif isinstance(part, list):
            waiting += [(value, base, f"{place}/{i}") for i, value in enumerate(part)]


Branch: TypeAlias = list[Schema]  # schemas that apply together, without combining keywords

JSON, TEXT = Alphabet(is_json=True), Alphabet(is_json=False)
VALUES = object()  # a key of generated schemas: the values of one type in `const` or `enum`
_MAX_SIZE = 2**31 - 1  # maximum of counts: the library uses 32 bits
_TYPES = ("null", "boolean", "number", "string", "array", "object")
WITH_INTEGERS = frozenset({*_TYPES, "integer"})
_KINDS = {dict: "an object", list: "an array", str: "a string", Decimal: "a number"}
_BOUNDS = (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum"))


class Keywords:
    """Reads keywords of the parts of a document.

    Args:
        document: the whole schema.
        is_lenient: ignore unsupported keywords; `ignored` has them, each with the reason.
        alphabet: notation of names and strings.
    """

    def __init__(self, document: Document, *, is_lenient: bool, alphabet: Alphabet = JSON) -> None:
        self.document, self.is_lenient, self.alphabet = document, is_lenient, alphabet
        self.ignored: dict[str, str] = {}

    def refuse(self, keyword: str, problem: str, part: Schema = None) -> None:
        """Refuse an unsupported keyword; if lenient, ignore it."""
        if not self.is_lenient:
            self.fail(f"{keyword} {problem}", part)
        self.ignored.setdefault(keyword, problem)

    def fail(self, problem: str, part: Schema) -> NoReturn:
        """Refuse the schema, with the JSON pointer of the invalid part."""
        place = self.document.place(part)
        raise ValueError(f"{problem}{f', at {place}' if place else ''}")

    def read(self, part: Schema, keyword: str, kind: type, default: Any) -> Any:
        """The value of a keyword; `default` if it is missing or has another type."""
        value = part.get(keyword, default)
        if value is not default and not isinstance(value, kind):
            self.refuse(keyword, f"has {str(value)[:40]!r}; expected {_KINDS[kind]}", part)
            return default
        return value

    def _size(self, part: Schema, keyword: str) -> int | None:
        value = self.read(part, keyword, Decimal, None)
        if value is None:
            return None
        if not 0 <= value <= _MAX_SIZE or value != value.to_integral_value():
            self.refuse(keyword, f"has {str(value)[:40]}; expected an integer from 0 to {_MAX_SIZE}", part)
            return None
        return int(value)

    def sizes(self, branch: Branch, least: str, most: str) -> tuple[int, int | None]:
        """The bounds of a length or a number of items, over all parts."""
        lows = [size for part in branch if (size := self._size(part, least)) is not None]
        highs = [size for part in branch if (size := self._size(part, most)) is not None]
        return max(lows, default=0), min(highs, default=None)

    def numbers(self, part: Schema) -> NumberSet:
        """The set of allowed numbers."""
        low, high = (self._bound(part, *keywords) for keywords in _BOUNDS)
        step = self._decimal(part, "multipleOf")
        if step is not None and step <= 0:
            self.refuse("multipleOf", f"has {step}; expected a number above 0", part)
            step = None
        values = part.get(VALUES)
        names = part.get("type")
        is_integer = names == "integer" or (isinstance(names, list) and "integer" in names and "number" not in names)
        found = NumberSet(low=low, high=high, step=Fraction(step) if step else None)
        found &= NumberSet(
            step=Fraction(1) if is_integer else None, values=None if values is None else frozenset(values)
        )
        return found

    def _decimal(self, part: Schema, keyword: str) -> Decimal | None:
        value: Decimal | None = self.read(part, keyword, Decimal, None)
        try:
            return None if value is None else checked(value)
        except ValueError as problem:
            self.refuse(keyword, str(problem), part)
            return None

    def _bound(self, part: Schema, inclusive: str, exclusive: str) -> Bound | None:
        value = self._decimal(part, inclusive)
        if isinstance(part.get(exclusive), bool):  # draft 4
            return None if value is None else Bound(value, part[exclusive])
        other = self._decimal(part, exclusive)
        if other is None:
            return None if value is None else Bound(value)
        if value is None:
            return Bound(other, is_open=True)
        is_open = other >= value if inclusive == "minimum" else other <= value
        return Bound(other if is_open else value, is_open)

    def patterns(self, branch: Branch, alphabet: Alphabet) -> Iterator[str | None]:
        """Regexes of all patterns and formats of a string."""
        for part in branch:
            readers = (("pattern", "is refused: ", lambda pattern: [pattern]), ("format", "", patterns_of))
            for keyword, refused, patterns_in in readers:
                if (value := self.read(part, keyword, str, None)) is not None:
                    try:
                        yield from [searched(pattern, alphabet) for pattern in patterns_in(value)]
                    except ValueError as problem:
                        self.refuse(keyword, f"{refused}{problem}", part)

    def items(self, part: Schema) -> tuple[Sequence[Schema], Schema]:
        """The schemas of the first items, and of all others."""
        items = part.get("items", True)
        if isinstance(items, list):
            return items, part.get("additionalItems", True)
        if self.document.draft <= 2019 and VALUES not in part:
            return [], items
        return self.read(part, "prefixItems", list, []), items

    def required(self, part: Schema) -> list[str]:
        """The names of required properties."""
        names: list[Any] = self.read(part, "required", list, [])
        if wrong := [name for name in names if not isinstance(name, str)]:
            self.refuse("required", f"has {str(wrong[0])[:40]!r}; expected names", part)
            return []
        return names

    def name_terminal(self, pattern: str, part: Schema) -> str | None:
        """The names that match a pattern of `patternProperties`."""
        try:
            regex = searched(pattern, self.alphabet)
        except ValueError as problem:
            self.refuse("patternProperties", f"is refused: {problem}", part)
            return None
        return None if regex is None else self.alphabet.terminal(regex)

    def types(self, branch: Branch) -> Iterator[str]:
        """The types of the values of a branch; integer counts as number with a condition."""
        allowed = self.allowed(branch)
        return (kind for kind in _TYPES if kind in allowed or (kind == "number" and "integer" in allowed))

    def allowed(self, branch: Branch) -> set[str]:
        """The types allowed by all parts of a branch; `number` includes `integer`."""
        allowed = set(WITH_INTEGERS)
        for part in branch:
            if "type" not in part:
                continue
            given = part["type"]
            names = given if isinstance(given, list) else [given]
            if not all(isinstance(name, str) and name in WITH_INTEGERS for name in names):
                self.refuse("type", f"has {str(given)[:40]!r}, which is not a type", part)
            else:
                allowed &= {*names, "integer"} if "number" in names else set(names)
        return allowed


def values_of(branch: Branch, default: list[Any] | None) -> list[Any] | None:
    """The values of one type allowed by all parts, in order."""
    sets = [part[VALUES] for part in branch if VALUES in part]
    if not sets:
        return default
    return [value for value in sets[0] if all(value in other for other in sets[1:])]
