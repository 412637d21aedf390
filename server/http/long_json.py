"""JSON whose long lists are made and encoded in parts, so that others have their turns. Knows no format of answers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

MIN_PIECE = 64 << 10  # characters; smaller parts are joined before others have a turn


@dataclass(frozen=True, slots=True)
class LongList:
    """A list that is made when it is encoded: `make(start, stop)` returns its entries of a half-open range."""

    length: int
    make: Callable[[int, int], list[Any]]
    part: int  # the most entries that are made at once

    def parts(self) -> Iterator[list[Any]]:
        """Yield the entries in parts; the last may be smaller."""
        for start in range(0, self.length, self.part):
            yield self.make(start, min(start + self.part, self.length))


def list_of(length: int, make: Callable[[int, int], list[Any]], part: int) -> list[Any] | LongList:
    """Return a list, which is a long one if it has more than one part."""
    return make(0, length) if length <= part else LongList(length, make, part)


class HasLongList(Exception):  # an event, so its name has no suffix `Error`
    """Expected: a value cannot be encoded in one piece."""


def refuse(value: object) -> NoReturn:
    """`default` of an encoder: refuse long lists, and what is no JSON at all."""
    if isinstance(value, LongList):
        raise HasLongList
    raise TypeError(f"{type(value).__name__} is no JSON")


@dataclass(frozen=True, slots=True)
class Encoder:
    """Encodes values as `json.dumps` would with these separators, but in parts."""

    comma: str = ", "
    colon: str = ": "

    def parts(self, value: Any) -> Iterator[str]:
        """Yield the JSON of `value` in one part if it has no long list, else the parts of what it consists of."""
        try:
            whole = self._dumps(value)
        except HasLongList:
            yield from self._nested(value)
        else:
            yield whole

    def _nested(self, value: Any) -> Iterator[str]:
        if isinstance(value, dict):
            yield "{"
            for i, (name, entry) in enumerate(value.items()):
                yield f"{self.comma if i else ''}{self._dumps(name)}{self.colon}"
                yield from self.parts(entry)
            yield "}"
            return
        yield "["
        for i, some in enumerate(value.parts() if isinstance(value, LongList) else ([entry] for entry in value)):
            if i:
                yield self.comma
            yield from self._entries(some)
        yield "]"

    def _entries(self, some: list[Any]) -> Iterator[str]:
        try:
            yield self._dumps(some)[1:-1]
        except HasLongList:
            for i, entry in enumerate(some):
                if i:
                    yield self.comma
                yield from self.parts(entry)

    def _dumps(self, value: Any) -> str:
        separators = (self.comma, self.colon)
        return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=separators, default=refuse)


async def in_turns(parts: Iterable[str]) -> AsyncGenerator[bytes, None]:
    """Yield the parts, small ones joined; after each piece of some size others have their turns."""
    joined, size = list[str](), 0
    for part in parts:
        joined.append(part)
        size += len(part)
        if size >= MIN_PIECE:
            yield "".join(joined).encode()
            joined, size = [], 0
            await asyncio.sleep(0)
    if joined:
        yield "".join(joined).encode()
