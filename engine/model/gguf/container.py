"""Reads the container: header, metadata and the table of tensors. Knows bytes, and no tensor library.

Source: "GGUF" in the documents of ggml (github.com/ggml-org/ggml/blob/master/docs/gguf.md), versions 2 and 3, which
differ in nothing that a reader of little-endian files sees.
"""

from __future__ import annotations

import math
import mmap
import re
import struct
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

from engine.errors import ModelError
from engine.model.gguf.kinds import KINDS, BlockKind, unreadable

T = TypeVar("T")

_MAGIC, _VERSIONS = b"GGUF", (2, 3)
_ALIGNMENT = 32  # bytes, where the file says nothing else
_MOST_DIMENSIONS = 4
# Types of metadata values with a fixed size, by their numbers: u8, i8, u16, i16, u32, i32, f32, bool, u64, i64, f64.
_FIXED = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_FLOAT, _STRING, _ARRAY = 6, 8, 9
_PART = re.compile(r"(?P<stem>.+)-\d{5}-of-(?P<count>\d{5})\.gguf")


@dataclass(frozen=True, slots=True)
class Strings:
    """An array of strings that is still in the file: where it starts, and how many there are."""

    start: int
    count: int


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where a tensor lies in the file, and how."""

    name: str
    shape: tuple[int, ...]  # in the order of torch: the inputs of a matrix last
    kind: BlockKind
    start: int  # byte of the file
    path: Path  # of the file

    @property
    def num_weights(self) -> int:
        """Numbers of the tensor."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensor in the file."""
        return self.num_weights // self.kind.weights * self.kind.size

    @property
    def shape_of_bytes(self) -> tuple[int, ...]:
        """The shape, with the bytes of a row instead of its numbers."""
        return (*self.shape[:-1], self.shape[-1] // self.kind.weights * self.kind.size)

    def part(self, index: int) -> StoredTensor:
        """One of the tensors of which this one is a stack."""
        shape, size = self.shape[1:], self.num_bytes // self.shape[0]
        return replace(self, shape=shape, start=self.start + index * size)


class Container:
    """An open file, or the first of several with the tensors of all.

    `metadata` holds numbers, texts, lists of numbers, and `Strings`; `paths` the files.
    """

    def __init__(self, path: Path) -> None:
        """Read everything but the data of tensors.

        Raises:
            ModelError: this is no GGUF file, it is cut short, or it holds what cannot be read.
        """
        self.path, self.paths, self.size = path, [path], path.stat().st_size
        if not self.size:
            raise ModelError(f"{path} is no GGUF file: it is empty")
        with path.open("rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        cursor = _Cursor(self._map, path)
        num_tensors, num_values = _counts(cursor)
        self.metadata: dict[str, Any] = dict(_entry(cursor) for _ in range(num_values))
        table = [_described(cursor) for _ in range(num_tensors)]
        self.header_bytes = cursor.at
        self.tensors = self._placed(table)

    @classmethod
    def open(cls, path: Path) -> Container:
        """Return the container of a file, or of all files to which it belongs; they are read again where they changed.

        Raises:
            ModelError: a file is missing or cannot be read, or the files do not belong together.
        """
        paths = tuple(path.with_name(name) for name in names_of_parts(path.name))
        try:
            states = tuple((status.st_mtime_ns, status.st_size) for status in (part.stat() for part in paths))
        except OSError as error:
            raise ModelError(f"cannot read {error.filename}: {error.strerror}") from error
        return _opened(paths, states)

    def join(self, others: Seq[Container]) -> None:
        """Add the tensors of the files that follow this one.

        Raises:
            ModelError: the files do not belong together.
        """
        for number, part in enumerate((self, *others)):
            told = part.get("split.no", int) or 0, part.get("split.count", int) or 1
            if told != (number, 1 + len(others)):
                told_as = f"its metadata says part {told[0] + 1} of {told[1]}"
                raise ModelError(f"{part.path} is part {number + 1} of {1 + len(others)} by its name; {told_as}")
        for other in others:
            twice = self.tensors.keys() & other.tensors.keys()
            if twice:
                raise ModelError(f"{other.path} holds {min(twice)}, which an earlier part holds too")
            self.tensors |= other.tensors
            self.paths.append(other.path)

    def get(self, key: str, kind: type[T]) -> T | None:
        """The value of a key; None where the file has none.

        Raises:
            ModelError: the value is of another kind.
        """
        found = self.metadata.get(key)
        if found is None:
            return None
        if kind is float and isinstance(found, int) and not isinstance(found, bool):
            found = float(found)
        if not isinstance(found, kind):
            raise ModelError(f"{self.path}: {key} is {found!r}; expected {kind.__name__}")
        return found

    def need(self, key: str, kind: type[T]) -> T:
        """The value of a key that every file of its kind has; ModelError where it is missing or of another kind."""
        found = self.get(key, kind)
        if found is None:
            raise ModelError(f"{self.path} has no {key}")
        return found

    def strings(self, key: str) -> list[str]:
        """The strings of an array; none where the file has no such array."""
        found = self.get(key, Strings)
        if found is None:
            return []
        cursor = _Cursor(self._map, self.path, found.start)
        return [cursor.string() for _ in range(found.count)]

    def _placed(self, table: list[tuple[str, tuple[int, ...], int, int]]) -> dict[str, StoredTensor]:
        alignment = self.get("general.alignment", int) or _ALIGNMENT
        if alignment % 8:
            raise ModelError(f"{self.path}: general.alignment is {alignment}; expected a multiple of 8")
        data = -(-self.header_bytes // alignment) * alignment
        found = dict[str, StoredTensor]()
        for name, shape, number, offset in table:
            if name in found:
                raise ModelError(f"{self.path} holds two tensors of the name {name}")
            if offset % alignment:
                raise ModelError(f"{self.path}: {name} is at byte {offset} of the data; expected whole {alignment}s")
            found[name] = self._checked(StoredTensor(name, shape, self._kind(name, number), data + offset, self.path))
        return found

    def _kind(self, name: str, number: int) -> BlockKind:
        if number not in KINDS:
            raise ModelError(f"{self.path}: {name} is stored as {unreadable(number)}")
        return KINDS[number]

    def _checked(self, tensor: StoredTensor) -> StoredTensor:
        kind, end = tensor.kind, tensor.start + tensor.num_bytes
        if tensor.shape[-1] % kind.weights:
            rows = f"rows of {tensor.shape[-1]}; {kind.name} is for multiples of {kind.weights}"
            raise ModelError(f"{self.path}: {tensor.name} has {rows}")
        if end > self.size:
            raise ModelError(f"{self.path} is cut short: {tensor.name} ends at byte {end}, the file at {self.size}")
        return tensor


def names_of_parts(name: str) -> list[str]:
    """The names of all parts of a model, from that of one: `a-00002-of-00003.gguf`; of a whole file its own name."""
    found = _PART.fullmatch(name)
    if found is None:
        return [name]
    stem, count = found["stem"], int(found["count"])
    return [f"{stem}-{number:05d}-of-{count:05d}.gguf" for number in range(1, count + 1)] or [name]


@lru_cache(maxsize=4)
def _opened(paths: tuple[Path, ...], _states: tuple[tuple[int, int], ...]) -> Container:
    first, *others = map(Container, paths)
    first.join(others)
    return first


class _Cursor:
    """A place in the file from which values are read one after another."""

    def __init__(self, mapped: mmap.mmap, path: Path, at: int = 0) -> None:
        self.path, self.at, self._map = path, at, mapped

    def numbers(self, form: str) -> tuple[Any, ...]:
        """Read numbers in a form of `struct`, little-endian."""
        try:
            found = struct.unpack_from("<" + form, self._map, self.at)
        except struct.error as error:
            raise self._cut_short() from error
        self.at += struct.calcsize("<" + form)
        return found

    def string(self) -> str:
        """Read a length and as many bytes of UTF-8."""
        start = self.skip_string()
        try:
            return self._map[start : self.at].decode()
        except UnicodeDecodeError as error:
            raise ModelError(f"{self.path}: the text at byte {start} is no UTF-8") from error

    def skip_string(self) -> int:
        """Go behind a string, and return where its text starts."""
        (length,) = self.numbers("Q")
        start, self.at = self.at, self.at + length
        if self.at > len(self._map):
            raise self._cut_short()
        return start

    def _cut_short(self) -> ModelError:
        return ModelError(f"{self.path} is cut short or damaged: its header goes on after {len(self._map)} bytes")


def _counts(cursor: _Cursor) -> tuple[int, int]:
    """Numbers of tensors and of metadata values."""
    (magic,) = cursor.numbers("4s")
    if magic != _MAGIC:
        raise ModelError(f"{cursor.path} is no GGUF file: it begins with {magic!r}")
    version, num_tensors, num_values = cursor.numbers("IQQ")
    if version not in _VERSIONS:
        how = "big-endian" if not version & 0xFFFF else f"GGUF of version {version}"
        raise ModelError(f"{cursor.path} is {how}; expected little-endian GGUF of version 2 or 3")
    return num_tensors, num_values


def _entry(cursor: _Cursor) -> tuple[str, Any]:
    key = cursor.string()
    (kind,) = cursor.numbers("I")
    return key, _value(cursor, key, kind)


def _value(cursor: _Cursor, key: str, kind: int) -> Any:
    if kind == _FLOAT:
        return meant(*cursor.numbers("f"))
    if kind in _FIXED:
        return cursor.numbers(_FIXED[kind])[0]
    if kind == _STRING:
        return cursor.string()
    if kind != _ARRAY:
        raise ModelError(f"{cursor.path}: {key} is of the unknown type {kind}")
    inner, count = cursor.numbers("IQ")
    if inner in _FIXED:
        return list(cursor.numbers(f"{count}{_FIXED[inner]}"))
    if inner != _STRING:
        raise ModelError(f"{cursor.path}: {key} is an array of the unknown type {inner}")
    found = Strings(cursor.at, count)
    for _ in range(count):
        cursor.skip_string()
    return found


def meant(number: float) -> float:
    """The shortest decimal of a float32, as it was before it was rounded: 1e-06, not 9.999999974752427e-07."""
    as_stored, shorter = struct.pack("f", number), (float(f"{number:.{digits}g}") for digits in range(6, 10))
    return next((found for found in shorter if struct.pack("f", found) == as_stored), number)


def _described(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    """Name, shape, type and offset of the next tensor of the table."""
    name = cursor.string()
    (dimensions,) = cursor.numbers("I")
    if not 1 <= dimensions <= _MOST_DIMENSIONS:
        raise ModelError(f"{cursor.path}: {name} has {dimensions} dimensions; expected 1 to {_MOST_DIMENSIONS}")
    sizes = cursor.numbers(f"{dimensions}Q")
    number, offset = cursor.numbers("IQ")
    return name, tuple(reversed(sizes)), number, offset
