"""Reads the values of a header in order. Arrays and texts stay in the file until they are used.

The size of a header is bounded, because a file of a few bytes can declare any count, and a sparse one of a few
kilobytes can have any size.
"""

from __future__ import annotations

import mmap
import struct
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from engine.errors import ModelError

MOST_BYTES = 1 << 26  # of a header: 64 MiB, four times the largest vocabularies with all of their merges
MOST_ENTRIES = 1 << 16  # metadata values, and tensors
_MOST_STRINGS = 1 << 21  # in all arrays together
_MOST_DIMENSIONS = 4
# Types of metadata values with a fixed size, by their numbers: u8, i8, u16, i16, u32, i32, f32, bool, u64, i64, f64.
_FIXED = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_FLOAT, _STRING, _ARRAY = 6, 8, 9
_LENGTH = struct.Struct("<Q")  # before each string


@dataclass(frozen=True, slots=True)
class BlockKind:
    """A type in which numbers are stored (`ggml.h`). A row of `weights * n` numbers takes `size * n` bytes."""

    name: str
    weights: int  # of a block; 1 where numbers are stored as floats
    size: int  # bytes of a block

    @property
    def is_float(self) -> bool:
        """Whether numbers are stored as floats, and not as codes."""
        return self.weights == 1


# By their numbers in files.
KINDS = {
    0: BlockKind("F32", 1, 4),
    1: BlockKind("F16", 1, 2),
    30: BlockKind("BF16", 1, 2),
    2: BlockKind("Q4_0", 32, 18),
    3: BlockKind("Q4_1", 32, 20),
    6: BlockKind("Q5_0", 32, 22),
    7: BlockKind("Q5_1", 32, 24),
    8: BlockKind("Q8_0", 32, 34),
    12: BlockKind("Q4_K", 256, 144),
    13: BlockKind("Q5_K", 256, 176),
    14: BlockKind("Q6_K", 256, 210),
    10: BlockKind("Q2_K", 256, 84),
    11: BlockKind("Q3_K", 256, 110),
    20: BlockKind("IQ4_NL", 32, 18),
    23: BlockKind("IQ4_XS", 256, 136),
    39: BlockKind("MXFP4", 32, 17),
    16: BlockKind("IQ2_XXS", 256, 66),
    17: BlockKind("IQ2_XS", 256, 74),
    22: BlockKind("IQ2_S", 256, 82),
    18: BlockKind("IQ3_XXS", 256, 98),
    21: BlockKind("IQ3_S", 256, 110),
    19: BlockKind("IQ1_S", 256, 50),
    29: BlockKind("IQ1_M", 256, 56),
    34: BlockKind("TQ1_0", 256, 54),
    35: BlockKind("TQ2_0", 256, 66),
}
# Names of types that are not read, for messages.
_OTHERS = {9: "Q8_1", 15: "Q8_K", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 40: "NVFP4"}


class Strings:
    """An array of strings that is still in the file; each is decoded when it is read."""

    def __init__(self, cursor: Cursor, key: str, starts: array[int]) -> None:
        """`starts`: of each string, behind its length; the last is where a further one would start."""
        self._texts, self._starts = partial(cursor.texts, key), starts

    def __len__(self) -> int:
        return len(self._starts) - 1

    def __getitem__(self, index: int) -> str:
        return next(self._texts([slice(self._starts[index], self._starts[index + 1] - _LENGTH.size)]))

    def __iter__(self) -> Iterator[str]:
        return self._texts(slice(start, after - _LENGTH.size) for start, after in pairwise(self._starts))

    def sizes(self) -> np.ndarray[Any, Any]:
        """Bytes of each string."""
        return np.diff(np.array(self._starts, np.int64)) - _LENGTH.size


class Cursor:
    """A place in the file from which values are read one after another."""

    def __init__(self, mapped: mmap.mmap, path: Path) -> None:
        self.path, self.at, self._map, self._about = path, 0, mapped, "its header"
        self._strings_left = _MOST_STRINGS

    def numbers(self, form: str) -> tuple[Any, ...]:
        """Read numbers in a form of `struct`, little-endian."""
        start = self._skip(struct.calcsize("<" + form))
        return struct.unpack_from("<" + form, self._map, start)

    def string(self) -> str:
        """Read a length and as many bytes of UTF-8."""
        return next(self.texts("a name", [self._text()]))

    def texts(self, key: str, places: Iterable[slice]) -> Iterator[str]:
        """Decode bytes of the file, which are of the value of `key`. Raises ModelError where they are no UTF-8."""
        mapped = self._map
        for place in places:
            try:
                yield mapped[place].decode()
            except UnicodeDecodeError as error:
                raise ModelError(f"{self.path}: {key} has invalid UTF-8 at byte {place.start}") from error

    def entry(self) -> tuple[str, Any]:
        """Read a key and its value: a number, or what stays in the file: a text's bytes, an array, or `Strings`."""
        self._about = key = self.string()
        (kind,) = self.numbers("I")
        if kind == _FLOAT:
            return key, meant(*self.numbers("f"))
        if kind in _FIXED:
            return key, self.numbers(_FIXED[kind])[0]
        if kind == _STRING:
            return key, self._text()
        if kind != _ARRAY:
            raise ModelError(f"{self.path}: {key} has unknown type {kind}")
        inner, count = self.numbers("IQ")
        if inner in _FIXED:
            kind = np.dtype("<" + _FIXED[inner])
            return key, np.frombuffer(self._map, kind, count, self._skip(count * kind.itemsize))
        if inner != _STRING:
            raise ModelError(f"{self.path}: {key} is an array of unknown type {inner}")
        return key, self._strings(key, count)

    def tensor(self) -> tuple[str, tuple[int, ...], BlockKind, int]:
        """Read name, shape, type and offset of the next tensor of the table."""
        self._about = name = self.string()
        (dimensions,) = self.numbers("I")
        if not 1 <= dimensions <= _MOST_DIMENSIONS:
            raise ModelError(f"{self.path}: {name} has {dimensions} dimensions; expected 1 to {_MOST_DIMENSIONS}")
        shape = tuple(reversed(self.numbers(f"{dimensions}Q")))
        if not all(shape):
            raise ModelError(f"{self.path}: {name} has shape {list(shape)}; expected dimensions of 1 or more")
        number, offset = self.numbers("IQ")
        if number not in KINDS:
            kind, known = _OTHERS.get(number, f"type {number}"), ", ".join(kind.name for kind in KINDS.values())
            raise ModelError(f"{self.path}: {name} has type {kind}; supported: {known}")
        return name, shape, KINDS[number], offset

    def _strings(self, key: str, count: int) -> Strings:
        self._strings_left -= count
        if self._strings_left < 0:
            raise ModelError(f"{self.path}: {key} has {count} strings; expected at most {_MOST_STRINGS} in all arrays")
        start, unpack, mapped = self.at + _LENGTH.size, _LENGTH.unpack_from, self._map
        starts = array("q", [start])
        try:
            for _ in range(count):
                start += unpack(mapped, start - _LENGTH.size)[0] + _LENGTH.size
                starts.append(start)
        except (struct.error, OverflowError) as error:
            raise self._cut_short() from error
        self._skip(start - _LENGTH.size - self.at)
        return Strings(self, key, starts)

    def _text(self) -> slice:
        (length,) = self.numbers("Q")
        start = self._skip(length)
        return slice(start, self.at)

    def _skip(self, count: int) -> int:
        """Go on by `count` bytes, and return where they start."""
        start, self.at = self.at, self.at + count
        if self.at > len(self._map):
            raise self._cut_short()
        if self.at > MOST_BYTES:
            raise ModelError(
                f"{self.path}: with {self._about} its header has {self.at} bytes; expected at most {MOST_BYTES}"
            )
        return start

    def _cut_short(self) -> ModelError:
        return ModelError(f"{self.path} is truncated or damaged: {self._about} continues past byte {len(self._map)}")


def meant(number: float) -> float:
    """The shortest decimal of a float32, as it was before it was rounded: 1e-06, not 9.999999974752427e-07."""
    as_stored, shorter = struct.pack("f", number), (float(f"{number:.{digits}g}") for digits in range(6, 10))
    return next((found for found in shorter if struct.pack("f", found) == as_stored), number)
