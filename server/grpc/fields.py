"""Counts the fields of a large message before it is parsed. Knows the encoding of protobuf, and no meaning.

Two bytes can be an empty string, or an empty message that takes a hundred bytes when it is parsed. Source: the
specification of the encoding, https://protobuf.dev/programming-guides/encoding.
"""

from __future__ import annotations

from collections import Counter

from google.protobuf.descriptor import Descriptor, FieldDescriptor

from engine.errors import InvalidRequest

MAX_ENTRIES = 65_536  # of one field; a list of numbers is one entry, because it is packed
MAX_NUMBERS = 1 << 20  # of such a list
_TEXTS = (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES)
_VARINT, _BYTES = 0, 2  # wire types
_GROUP = (3, 4)  # the start and the end of one
_FIXED = {1: 8, 5: 4}  # bytes of a number, by its wire type


def require_few(data: bytes, descriptor: Descriptor) -> None:
    """Refuse a message with more than `MAX_ENTRIES` of one field, or more than `MAX_NUMBERS` in one list, at any depth.

    Bytes that are no message pass: the parser says what is wrong with them.

    Raises:
        InvalidRequest: names the field. It is also raised for a group (wire types 3 and 4), because no message of ours
            has one, and its end is known only after what is in it.
    """
    counts: Counter[str] = Counter()
    position, end, message, path = 0, len(data), descriptor, ""
    outer: list[tuple[int, Descriptor, str]] = []  # the messages around this one, innermost last
    try:
        while position < end or outer:
            if position >= end:
                end, message, path = outer.pop()
                continue
            tag, position = _varint(data, position)
            field = message.fields_by_number.get(tag >> 3)
            name = f"{path}{'unknown' if field is None else field.name}"
            counts[name] += 1
            if counts[name] > MAX_ENTRIES:
                raise InvalidRequest.of(name, f"has more than {MAX_ENTRIES} entries")
            if tag & 7 in _GROUP:
                raise InvalidRequest.of(name, "is a group, which no message of this server has")
            size, position = _size(data, position, tag & 7)
            inner = None if field is None else field.message_type
            if inner is not None and tag & 7 == _BYTES:
                outer.append((end, message, path))
                end, message, path = position + size, inner, f"{name}."
                continue
            if field is not None and size > MAX_NUMBERS and field.type not in _TEXTS:
                _require_few_numbers(name, data[position : position + size])
            position += size
    except (IndexError, KeyError, ValueError):
        return


def _require_few_numbers(name: str, packed: bytes) -> None:
    """Each number of a packed list ends with a byte below 128, as far as our messages have such lists."""
    count = len(packed.translate(None, delete=bytes(range(128, 256))))
    if count > MAX_NUMBERS:
        raise InvalidRequest.of(name, f"has {count} entries; the limit is {MAX_NUMBERS}")


def _size(data: bytes, position: int, wire_type: int) -> tuple[int, int]:
    """Return the number of bytes of a value, and where they begin."""
    if wire_type == _VARINT:
        return 0, _varint(data, position)[1]
    if wire_type == _BYTES:
        return _varint(data, position)
    return _FIXED[wire_type], position


def _varint(data: bytes, position: int) -> tuple[int, int]:
    """Return a number of 7 bits per byte, the lowest first, and where the next one begins."""
    value = shift = 0
    while True:
        byte = data[position]
        position += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, position
        shift += 7
        if shift > 63:
            raise ValueError("a number of more than ten bytes")
