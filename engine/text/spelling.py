"""The bytes that each token of a vocabulary stands for, by the steps of the tokenizer's decoder. Knows no request."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import cache
from typing import Any

from tokenizers import Tokenizer

_BYTE = re.compile(b"<0x[0-9A-Fa-f]{2}>")
_REPLACED = "\ufffd"  # what a decoder writes in place of bytes that are no character


class Spelling:
    """Spells tokens one by one: their bytes, joined, are those of the text that the decoder makes of all of them.

    Decoders of SentencePiece drop the space before the first token of a text; so that token has other bytes there.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        try:
            self._steps = steps_of(tokenizer.decoder)
        except Exception:  # noqa: BLE001  # a part that is written in Python; the library raises bare Exception
            self._steps = []
        self._is_known = bool(self._steps) and all(map(_is_known, self._steps))

    def bytes_of(self, token: int, *, leads: bool = False) -> bytes | None:
        """Return the bytes of a token; None where they are not known. `leads`: it is the first of a text."""
        text = self._tokenizer.id_to_token(token)
        if text is None:
            return None
        if not self._is_known:
            text = self._tokenizer.decode([token], skip_special_tokens=False)
            return None if _REPLACED in text else text.encode()
        return _written(text, self._steps, leads=leads)


def steps_of(part: Any) -> list[dict[str, Any]]:
    """The steps of a normalizer, pre-tokenizer or decoder in their order, in the words of tokenizer.json."""
    waiting, found = [] if part is None else [json.loads(part.__getstate__())], []
    while waiting:
        step = waiting.pop()
        inner = step.get("normalizers", step.get("pretokenizers", step.get("decoders")))
        waiting += reversed(inner or [])
        found += [step] if inner is None else []
    return found


def _is_known(step: Mapping[str, Any]) -> bool:
    match step:
        case {"type": "ByteLevel" | "ByteFallback" | "Fuse" | "Metaspace"} | {
            "type": "Replace",
            "pattern": {"String": _},
        }:
            return True
        case {"type": "Strip", "stop": 0}:
            return True
    return False


def _written(text: str, steps: list[dict[str, Any]], *, leads: bool) -> bytes:
    """What the steps write of one token."""
    data = text.encode()
    for step in steps:
        match step:
            case {"type": "ByteLevel"}:
                known = _byte_of()
                data = bytes(known[char] for char in text) if known.keys() >= set(text) else data
            case {"type": "ByteFallback"} if _BYTE.fullmatch(data):
                data = bytes([int(data[3:5], 16)])
            case {"type": "Replace", "pattern": {"String": before}, "content": after}:
                data = data.replace(before.encode(), after.encode())
            case {"type": "Metaspace", "replacement": space, "prepend_scheme": scheme}:
                data = data.replace(space.encode(), b"" if leads and scheme != "never" else b" ")
            case {"type": "Strip", "content": char, "start": most} if leads:
                for _ in range(most):
                    data = data.removeprefix(char.encode())
    return data


@cache
def _byte_of() -> dict[str, int]:
    """The byte for which each character of a byte-level vocabulary stands: itself if it can be printed."""
    printed = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = sorted(set(range(256)) - set(printed))
    return {chr(byte): byte for byte in printed} | {chr(256 + i): byte for i, byte in enumerate(others)}
