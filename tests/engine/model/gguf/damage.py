"""GGUF files with one value of their metadata replaced, and the values with which strangers might replace it."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from pathlib import Path

import gguf

_SIZES = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


def number(kind: int, value: float) -> bytes:
    """A number as a metadata value: its type, and its bytes."""
    return struct.pack(f"<I{_SIZES[kind]}", kind, value)


def text(value: bytes) -> bytes:
    """A text as a metadata value."""
    return struct.pack("<IQ", 8, len(value)) + value


def array(kind: int, count: int, content: bytes) -> bytes:
    """An array as a metadata value; `content` need not be what its count says."""
    return struct.pack("<IIQ", 9, kind, count) + content


def texts(*values: bytes) -> bytes:
    """An array of texts as a metadata value."""
    return array(8, len(values), b"".join(struct.pack("<Q", len(value)) + value for value in values))


# By what they are; None takes the key away.
HOSTILE: Mapping[str, bytes | None] = {
    "missing": None,
    "0": number(4, 0),
    "1": number(4, 1),
    "3": number(4, 3),
    "-1": number(5, -1),
    "2^20": number(4, 1 << 20),
    "2^31": number(4, 1 << 31),
    "2^32-1": number(4, (1 << 32) - 1),
    "2^63": number(10, 1 << 63),
    "nan": number(6, float("nan")),
    "inf": number(6, float("inf")),
    "-inf": number(6, float("-inf")),
    "0.0": number(6, 0.0),
    "1e38": number(6, 1e38),
    "true": number(7, True),
    "empty text": text(b""),
    "long text": text(b"x" * (1 << 20)),
    "escapes": text(b"\x1b[31m\r\n\x07{% for"),
    "no UTF-8": text(b"\xff\xfe"),
    "no numbers": array(4, 0, b""),
    "two numbers": array(4, 2, struct.pack("<2I", 0, 7)),
    "floats": array(6, 2, struct.pack("<2f", float("nan"), 1.0)),
    "truths": array(7, 3, b"\1\0\1"),
    "texts": texts(b"a", b"a", b""),
    "array of arrays": array(9, 1, b""),
    "array of 2^60": array(7, 1 << 60, b""),
    "unknown type": struct.pack("<I", 99),
}


class Parts:
    """A file in its parts, to be put together again with other metadata."""

    def __init__(self, path: Path) -> None:
        whole, reader = path.read_bytes(), gguf.GGUFReader(path)
        self.metadata = {
            key: whole[found.offset + 8 + len(key.encode()) : found.offset + sum(p.nbytes for p in found.parts)]
            for key, found in reader.fields.items()
            if not key.startswith("GGUF.")
        }
        tables = [tensor.field for tensor in reader.tensors]
        self.table = b"".join(whole[t.offset : t.offset + sum(p.nbytes for p in t.parts)] for t in tables)
        self.num_tensors, self.data = len(tables), whole[reader.data_offset :]

    def written(self, path: Path, change: Mapping[str, bytes | None]) -> Path:
        """Write the file with other values of these keys."""
        metadata = {key: value for key, value in (self.metadata | dict(change)).items() if value is not None}
        entries = (struct.pack("<Q", len(key.encode())) + key.encode() + value for key, value in metadata.items())
        header = struct.pack("<4sIQQ", b"GGUF", 3, self.num_tensors, len(metadata)) + b"".join(entries) + self.table
        path.write_bytes(header + bytes(-len(header) % 32) + self.data)
        return path

    def hostile(self) -> Iterator[tuple[str, str]]:
        """Each key with the name of each hostile value."""
        return ((key, name) for key in self.metadata for name in HOSTILE)
