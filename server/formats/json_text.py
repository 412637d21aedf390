"""Reads JSON that a model writes, incrementally."""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import MutableSequence
from typing import Any

MAX_DEPTH = 256  # of nested arrays and objects; many readers have such a limit
MAX_NUMBER = 1000  # characters

_SPACE, _PLAIN, _WORD = re.compile(r"[ \t\r\n]+"), re.compile(r'[^"\\\x00-\x1f]+'), re.compile(r"[-+.0-9A-Za-z_]+")
_NEAREST = {math.inf: repr(sys.float_info.max), -math.inf: repr(-sys.float_info.max)}
_HEX = "[0-9a-fA-F]"
_HIGH, _LOW = rf"\\u[dD][89abAB]{_HEX}{{2}}", rf"\\u[dD][c-fC-F]{_HEX}{{2}}"
_ESCAPE = re.compile(rf'{_HIGH}{_LOW}|\\u(?![dD][89a-fA-F]){_HEX}{{4}}|\\["\\/bfnrt]')
_SURROGATE = re.compile(f"{_HIGH}|{_LOW}")
_OPEN_ESCAPE = re.compile(rf"(?:{_HIGH})?\\(?:u{_HEX}{{0,3}})?|{_HIGH}")  # possibly incomplete


class JsonText:
    r"""Reads one JSON value in pieces, and writes it again.

    Errors with an obvious meaning are repaired: control characters in strings are escaped, invalid backslashes are
    doubled (`C:\dir`), lone surrogates become U+FFFD, and too large numbers the largest double. Any other error breaks
    the value.
    """

    def __init__(self) -> None:
        self._closing: list[str] = []  # the expected closing brackets
        self._next = "v"  # what may follow: a value, a key, an end, or the character itself
        self._in_string = self._is_key = False
        self.is_over = self.is_broken = False

    def read(self, text: str, start: int, written: MutableSequence[str], *, is_end: bool) -> int:
        """Read from `start`, append JSON to `written`; return the position before an error or an incomplete part.

        `is_end`: the text is complete.
        """
        at = start
        while at < len(text) and not (self.is_over or self.is_broken):
            stop = self._string(text, at, written) if self._in_string else self._token(text, at, written, is_end)
            if stop == at:
                break
            at = stop
        return at

    def _token(self, text: str, at: int, written: MutableSequence[str], is_end: bool) -> int:
        if space := _SPACE.match(text, at):
            written.append(space.group())
            return space.end()
        char = text[at]
        if char == '"' and self._next[0] in "vk":
            self._in_string, self._is_key = True, self._next[0] == "k"
        elif char in "{[" and self._next[0] == "v" and len(self._closing) < MAX_DEPTH:
            self._closing.append("}" if char == "{" else "]")
            self._next = "ke" if char == "{" else "ve"
        elif char in "}]" and self._next[-1] == "e" and self._closing[-1] == char:
            self._closing.pop()
            self._end_value()
        elif char in ",:" and self._next[0] == char:
            self._next = "k" if char == "," and self._closing[-1] == "}" else "v"
        else:
            return self._scalar(text, at, written, is_end)
        written.append(char)
        return at + 1

    def _scalar(self, text: str, at: int, written: MutableSequence[str], is_end: bool) -> int:
        found = _WORD.match(text, at)
        if found is None or self._next[0] != "v" or found.end() - at > MAX_NUMBER:
            self.is_broken = True
        elif found.end() < len(text) or is_end:
            try:
                value = _DECODER.decode(found.group())
            except ValueError:
                self.is_broken = True
                return at
            written.append(_NEAREST.get(value, found.group()))
            self._end_value()
            return found.end()
        return at

    def _string(self, text: str, at: int, written: MutableSequence[str]) -> int:
        if plain := _PLAIN.match(text, at):
            written.append(plain.group())
            return plain.end()
        char = text[at]
        if char == "\\":
            return self._escape(text, at, written)
        if char == '"':
            self._in_string = False
            self._next = ":"
            if not self._is_key:
                self._end_value()
        written.append(char if char == '"' else json.dumps(char)[1:-1])
        return at + 1

    def _escape(self, text: str, at: int, written: MutableSequence[str]) -> int:
        if found := _ESCAPE.match(text, at):
            written.append(found.group())
            return found.end()
        if _OPEN_ESCAPE.fullmatch(text, at):
            return at
        half = _SURROGATE.match(text, at)
        written.append("\\ufffd" if half else "\\\\")
        return half.end() if half else at + 1

    def _end_value(self) -> None:
        self._next, self.is_over = ",e", not self._closing


def value_in(text: str) -> str | None:
    """Return a text that is a JSON value as `JsonText` writes it; None for other texts."""
    value, written = JsonText(), list[str]()
    end = value.read(text, 0, written, is_end=True)
    return "".join(written) if value.is_over and end == len(text) else None


def object_in(text: str) -> dict[str, Any] | None:
    """Decode a JSON object; None for other texts, and for NaN, infinities and numbers beyond the doubles."""
    try:
        found = _FINITE_DECODER.decode(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _finite(digits: str) -> float:
    if math.isinf(value := float(digits)):
        raise ValueError(f"{digits} is too large")
    return value


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not valid JSON")


_DECODER = json.JSONDecoder(parse_constant=_refuse)
_FINITE_DECODER = json.JSONDecoder(parse_constant=_refuse, parse_float=_finite)
