"""The bytes of each token of a vocabulary, by the steps of the tokenizer's decoder."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from functools import partial
from operator import methodcaller
from typing import Any

from tokenizers import Tokenizer

_BYTE = re.compile(b"<0x[0-9A-Fa-f]{2}>")
_REPLACED = "\ufffd"  # a decoder's replacement of invalid bytes
_Write = Callable[[bytes], bytes]


class Spelling:
    """The bytes of single tokens; concatenated, they are the bytes of the decoded text.

    SentencePiece decoders drop the space before the first token of a text, so that token has different bytes there.
    `has_bytes`: there are tokens for parts of characters.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        try:
            steps = steps_of(tokenizer.decoder)
        except Exception:  # noqa: BLE001  # a part that is written in Python; the library raises bare Exception
            steps = []
        self._first, self._others = (_writers(steps, leads=leads) for leads in (True, False))
        self.has_bytes = any(step["type"] in ("ByteLevel", "ByteFallback") for step in steps)

    def bytes_of(self, token: int, *, leads: bool = False) -> bytes | None:
        """Return the bytes of a token; None if unknown. `leads`: it is the first of a text."""
        text, writers = self._tokenizer.id_to_token(token), self._first if leads else self._others
        if text is None:
            return None
        if not writers:
            text = self._tokenizer.decode([token], skip_special_tokens=False)
            return None if _REPLACED in text else text.encode()
        data: bytes = text.encode()
        for write in writers:
            data = write(data)
        return data


def steps_of(part: Any) -> list[dict[str, Any]]:
    """The steps of a normalizer, pre-tokenizer or decoder, in order, as in tokenizer.json."""
    waiting, found = [] if part is None else [json.loads(part.__getstate__())], []
    while waiting:
        step = waiting.pop()
        inner = step.get("normalizers", step.get("pretokenizers", step.get("decoders")))
        waiting += reversed(inner or [])
        found += [step] if inner is None else []
    return found


def _writers(steps: list[dict[str, Any]], *, leads: bool) -> list[_Write]:
    """The functions of the steps on the bytes of one token; empty if one of them is not supported."""
    writers = [_writer(step, leads=leads) for step in steps]
    return [] if None in writers else [write for write in writers if write is not None]


def _writer(step: Mapping[str, Any], *, leads: bool) -> _Write | None:
    match step:
        case {"type": "ByteLevel"}:
            return _of_byte_level
        case {"type": "ByteFallback"}:
            return _of_byte_fallback
        case {"type": "Replace", "pattern": {"String": before}, "content": after}:
            return methodcaller("replace", before.encode(), after.encode())
        case {"type": "Metaspace", "replacement": space, "prepend_scheme": scheme}:
            return methodcaller("replace", space.encode(), b"" if leads and scheme != "never" else b" ")
        case {"type": "Strip", "content": char, "start": most, "stop": 0} if leads:
            return partial(_stripped, char.encode(), most)
        case {"type": "Fuse"} | {"type": "Strip", "stop": 0}:
            return bytes
    return None


def _of_byte_level(data: bytes) -> bytes:
    try:
        return data.decode().translate(_BYTES).encode("latin-1")
    except UnicodeError:  # it has other characters, like some added tokens: literal
        return data


def _of_byte_fallback(data: bytes) -> bytes:
    return bytes([int(data[3:5], 16)]) if _BYTE.fullmatch(data) else data


def _stripped(char: bytes, most: int, data: bytes) -> bytes:
    for _ in range(most):
        data = data.removeprefix(char)
    return data


# The byte of each character of a byte-level vocabulary: itself if printable. Other characters with a printable byte
# have none.
_PRINTED = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
_OTHERS = [byte for byte in range(256) if byte not in _PRINTED]
_BYTES = dict.fromkeys(_OTHERS, 0xFFFF) | {256 + i: byte for i, byte in enumerate(_OTHERS)}
