"""A schema as a document: its draft, and what its references name. Knows no keywords' meaning."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from decimal import Decimal
from typing import Any, NoReturn, TypeAlias
from urllib.parse import unquote, urldefrag, urljoin

Schema: TypeAlias = Any  # an object, true or false; whatever a caller has sent in their place

DOCUMENTS = ("const", "default", "enum", "examples")  # keywords whose values are no schemas
_DRAFT = re.compile(r"draft[/-](?:0?)(\d{1,4})")
_LATEST = 2020


def parsed(text: str) -> Schema:
    """A schema of which all numbers are decimals, as they are written. ValueError: the text is no JSON."""
    return _DECODER.decode(text)


def parsed_part(text: str) -> tuple[Schema, int]:
    """The schema with which a text begins, and its length. ValueError: it begins with no JSON."""
    return _DECODER.raw_decode(text)


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


_DECODER = json.JSONDecoder(parse_int=Decimal, parse_float=Decimal, parse_constant=_refuse)


class Document:
    """A schema, in which all references are looked up."""

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
            self._index(part, base, place)

    def _index(self, part: dict[str, Any], base: str, place: str) -> None:
        self._places[id(part)], self._bases[id(part)] = place, base
        self._resources.setdefault(base, part)
        for keyword in ("$anchor", "$dynamicAnchor"):
            if isinstance(part.get(keyword), str):
                self._anchors[base, part[keyword]] = part
        name = part.get("$id")
        if isinstance(name, str) and name.startswith("#"):
            self._anchors[base, name[1:]] = part

    def place(self, part: Schema) -> str:
        """Where a part is, as a JSON pointer; empty if it is no part of the document."""
        return self._places.get(id(part), "")

    def resolved(self, part: Schema, reference: Any) -> Schema:
        """What a reference in a part of the document names.

        Raises:
            ValueError: it is nowhere in the document.
        """
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
            raise ValueError(f"{reference[:80]!r} names no part of the schema") from None
        return found


def _parts(part: Any, base: str, place: str) -> Iterator[tuple[dict[str, Any], str, str]]:
    """All objects of a document, each with its address and its place."""
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
