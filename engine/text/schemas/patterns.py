r"""Converts ECMA-262 patterns to Lark regexes; also the patterns of each `format`.

A pattern matches anywhere in a text, so its anchors are resolved here: `^a|b` -> `a.*|.*b.*`. Patterns have the flag
`u`, plus some syntax that browsers accept without it: `\-` and single `]`, `{` and `}` are characters. Look-around,
back-references, word boundaries, flags and escapes without a meaning in ECMA-262 are refused by name.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TypeAlias

_LAST = 0x10FFFF
_SURROGATES = (0xD800, 0xDFFF)
_ESCAPED = {'"': '"', "\\": "\\", "\b": "b", "\f": "f", "\n": "n", "\r": "r", "\t": "t"}
_CONTROLS = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f\ud800-\udfff]")
_PLAIN = frozenset(" !%',:;<=>@_`")  # literal characters in all regexes, besides letters and digits
_MAX_REPEATS = 1_000_000
_MAX_SIZE = 4_000_000  # maximum characters of the regexes of one pattern

_Ranges: TypeAlias = tuple[tuple[int, int], ...]
_DIGITS: _Ranges = ((48, 57),)
_WORD: _Ranges = ((48, 57), (65, 90), (95, 95), (97, 122))
_SPACE: _Ranges = (
    (9, 13), (32, 32), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A), (0x2028, 0x2029), (0x202F, 0x202F),
    (0x205F, 0x205F), (0x3000, 0x3000), (0xFEFF, 0xFEFF),
)  # fmt: skip
_LINE_ENDS: _Ranges = ((10, 10), (13, 13), (0x2028, 0x2029))
_CLASSES = {"d": _DIGITS, "w": _WORD, "s": _SPACE}
_CONTROL_ESCAPES = {"t": 9, "n": 10, "v": 11, "f": 12, "r": 13, "0": 0}
# Properties of characters that are neither letters, digits, nor marks: which of those that JSON escapes have them.
_PROPERTIES = {"Any": '"\\\b\f\n\r\t', "ASCII": '"\\\b\f\n\r\t', "White_Space": "\f\n\r\t"} | dict.fromkeys(
    ("Alphabetic", "Lowercase", "Uppercase", "ID_Start", "ID_Continue", "Emoji", "ASCII_Hex_Digit"), ""
)
_CATEGORY = re.compile(r"(?:(?:General_Category|gc)=)?(L[ultmo]?|M[nce]?|N[dlo]?|P[cdseifo]?|S[mcko]?|Z[slp]?|C[cfo]?)")
_LONG_CATEGORIES = {
    "Letter": "L", "Uppercase_Letter": "Lu", "Lowercase_Letter": "Ll", "Titlecase_Letter": "Lt", "Mark": "M",
    "Number": "N", "Decimal_Number": "Nd", "Punctuation": "P", "Symbol": "S", "Separator": "Z", "Other": "C",
    "Control": "Cc",
}  # fmt: skip
_SCRIPT = re.compile(r"(?:Script|sc|Script_Extensions|scx)=([A-Za-z_]+)")


class PatternError(ValueError):
    """Expected: the pattern is invalid, or cannot be enforced exactly."""


def escaped(text: str) -> str:
    """A regex that matches exactly this text."""
    return "".join(c if c.isalnum() or c in _PLAIN else f"\\x{{{ord(c):x}}}" for c in text)


def writable(text: str) -> str:
    """The same text. Raises ValueError if it needs unsupported escapes."""
    if found := _CONTROLS.search(text):
        raise ValueError(f"has a string with the control character \\u{ord(found[0]):04x}, which is not supported")
    return text


def json_text(text: str) -> str:
    """A text between quotes in JSON, with the supported escapes. Raises ValueError if it needs others."""
    return json.dumps(writable(text), ensure_ascii=False)[1:-1]


@dataclass(frozen=True, slots=True)
class _Chars:
    """A set of characters: ranges, and properties as a regex has them."""

    ranges: _Ranges = ()
    properties: tuple[tuple[str, str], ...] = ()  # with the characters that JSON escapes and that have it
    negated: bool = False

    def has(self, char: str) -> bool:
        found = any(low <= ord(char) <= high for low, high in self.ranges)
        return (found or any(char in those for _, those in self.properties)) != self.negated


class Alphabet:
    """The notation of characters in the matched text.

    Args:
        is_json: as in JSON strings, else literally.
    """

    def __init__(self, *, is_json: bool) -> None:
        self._excluded: _Ranges = ((0, 31), (34, 34), (92, 92), (127, 127)) if is_json else ()
        self._escapes = _ESCAPED if is_json else {}
        self.written = lru_cache(maxsize=4096)(self._written)
        self.any = self.written(_Chars(negated=True)) or ""

    def _written(self, chars: _Chars) -> str | None:
        """A regex of one of these characters; None if there is none."""
        letters = "".join(escaped(letter) for char, letter in self._escapes.items() if chars.has(char))
        plain = self._plain(chars)
        if letters and plain:
            return rf"(?:{plain}|\\[{letters}])"
        return rf"\\[{letters}]" if letters else plain

    def text(self, text: str) -> str:
        """A regex that matches exactly this text in this notation."""
        return escaped(json_text(text) if self._escapes else text)

    def string(self, text: str) -> str:
        """The notation of a whole string. Raises ValueError if it needs unsupported escapes."""
        return f'"{json_text(text)}"' if self._escapes else text

    def terminal(self, regex: str) -> str:
        """A Lark terminal of the strings whose text a regex matches."""
        return f'/"{regex}"/' if self._escapes else f"/{regex}/"

    def _plain(self, chars: _Chars) -> str | None:
        outside = (*self._excluded, _SURROGATES)
        if chars.properties:
            listed = _listed(chars.ranges) + "".join(text for text, _ in chars.properties)
            return f"[[{'^' if chars.negated else ''}{listed}]&&[^{_listed(self._excluded)}]]" if self._excluded else (
                f"[{'^' if chars.negated else ''}{listed}]"
            )  # fmt: skip
        kept = chars.ranges if chars.negated else _complement(chars.ranges)
        ranges = _complement((*kept, *outside))
        if len(ranges) == 1 and ranges[0][0] == ranges[0][1]:
            return escaped(chr(ranges[0][0]))
        if ranges and ranges[-1][1] == _LAST:  # what is not in it is shorter; regexes have no surrogates
            others = [pair for pair in _complement(ranges) if pair != _SURROGATES]
            return f"[^{_listed(others)}]" if others else "(?s:.)"
        return f"[{_listed(ranges)}]" if ranges else None


def _complement(ranges: Iterable[tuple[int, int]]) -> _Ranges:
    found, start = list[tuple[int, int]](), 0
    for low, high in sorted(ranges):
        if low > start:
            found.append((start, low - 1))
        start = max(start, high + 1)
    return (*found, (start, _LAST)) if start <= _LAST else tuple(found)


def _listed(ranges: Iterable[tuple[int, int]]) -> str:
    return "".join(
        escaped(chr(low)) if low == high else f"{escaped(chr(low))}-{escaped(chr(high))}" for low, high in ranges
    )


# ------------------------------------------------------------------------------------------- what a part matches


@dataclass(frozen=True, slots=True)
class _Part:
    text: str  # a regex, which may be concatenated with others
    is_nullable: bool


_Anchors: TypeAlias = tuple[bool, bool]  # it begins where the text begins, it ends where the text ends
_Node: TypeAlias = dict[_Anchors, _Part]

_NOTHING: _Node = {(False, False): _Part("", True)}


def _either(nodes: Iterable[_Node]) -> _Node:
    found: dict[_Anchors, list[_Part]] = {}
    for node in nodes:
        for anchors, part in node.items():
            found.setdefault(anchors, []).append(part)
    return {
        anchors: parts[0]
        if len(parts) == 1
        else _Part(f"(?:{'|'.join(part.text for part in parts)})", any(part.is_nullable for part in parts))
        for anchors, parts in found.items()
    }


def _then(first: _Node, second: _Node) -> _Node:
    """Concatenate: before the beginning of the text, and after its end, only the empty string matches."""
    found = list[_Node]()
    for (begins, ends), one in first.items():
        for (begins_later, ends_later), two in second.items():
            if (one.is_nullable or not begins_later) and (two.is_nullable or not ends):
                text = ("" if begins_later else one.text) + ("" if ends else two.text)
                part = _Part(text, one.is_nullable and two.is_nullable)
                found.append({(begins or begins_later, ends or ends_later): part})
    return _either(found)


# ------------------------------------------------------------------------------------------------------ patterns


@lru_cache(maxsize=256)
def searched(pattern: str, alphabet: Alphabet) -> str | None:
    """A regex of the whole texts in which the pattern matches; None if there are none.

    Raises:
        PatternError: it is not an ECMA-262 pattern, or cannot be enforced exactly.
    """
    node, rest = _Parser(pattern, alphabet).node(), f"{alphabet.any}*"
    found = [f"{'' if a else rest}{part.text}{'' if z else rest}" for (a, z), part in node.items()]
    return f"(?:{'|'.join(found)})" if found else None


class _Parser:
    """Reads a pattern from left to right."""

    def __init__(self, pattern: str, alphabet: Alphabet) -> None:
        self._pattern, self._at, self._size, self._alphabet = pattern, 0, 0, alphabet

    def node(self) -> _Node:
        found = self._alternatives()
        if self._at < len(self._pattern):
            raise self._error("has a ) without its (")
        return found

    def _error(self, problem: str) -> PatternError:
        shown = self._pattern if len(self._pattern) <= 60 else f"{self._pattern[:59]}…"
        return PatternError(f"the pattern {shown!r} {problem}")

    def _take(self, text: str) -> bool:
        if not self._pattern.startswith(text, self._at):
            return False
        self._at += len(text)
        return True

    def _match(self, regex: str) -> re.Match[str] | None:
        found = re.compile(regex).match(self._pattern, self._at)
        self._at = found.end() if found else self._at
        return found

    def _next(self) -> str:
        if self._at >= len(self._pattern):
            raise self._error("ends too early")
        self._at += 1
        return self._pattern[self._at - 1]

    def _alternatives(self) -> _Node:
        nodes = [self._terms()]
        while self._take("|"):
            nodes.append(self._terms())
        return _either(nodes)

    def _terms(self) -> _Node:
        node, size = _NOTHING, 0
        while self._at < len(self._pattern) and self._pattern[self._at] not in "|)":
            node = _then(node, self._term())
            size = sum(len(part.text) for part in node.values())  # each optional anchor doubles it
            if self._size + size > _MAX_SIZE:
                raise self._error("is too large")
        self._size += size
        return node

    def _term(self) -> _Node:
        if anchor := self._match(r"[\^$]"):
            if self._quantifier():
                raise self._error("repeats ^ or $")
            return {(anchor[0] == "^", anchor[0] == "$"): _Part("", True)}
        if plain := self._match(r"[A-Za-z0-9 _]+(?![*+?{])"):  # at once, because patterns may be long
            return {(False, False): _Part(self._alphabet.text(plain[0]), False)}
        if self._take("("):
            return self._repeated(self._group())
        text = self._alphabet.written(self._atom())
        return self._repeated({} if text is None else {(False, False): _Part(text, False)})

    def _group(self) -> _Node:
        kind = self._match(r"\?(?:(?P<plain>:|P?<[\w$]+>)|<?[=!]|[^:]{0,3})")
        if kind and not kind["plain"]:
            raise self._error(f"has ({kind[0]}, which is not supported")
        node = self._alternatives()
        if not self._take(")"):
            raise self._error("has a ( without its )")
        return {anchors: replace(part, text=f"(?:{part.text})") for anchors, part in node.items()}

    def _quantifier(self) -> tuple[int, int | None] | None:
        found = self._match(r"(?:([*+?])|\{([0-9]+)(,?)([0-9]*)\})\??")
        if found is None:
            if re.compile(r"\{,[0-9]+\}").match(self._pattern, self._at):
                raise self._error("has a { whose number of repetitions is not supported")
            return None
        if found[1]:
            return {"*": (0, None), "+": (1, None), "?": (0, 1)}[found[1]]
        least, last = (int(digits.lstrip("0")[:8] or 0) for digits in found.group(2, 4))  # of more digits: too many
        most = last if found[4] else None if found[3] else least
        if most is not None and most < least:
            raise self._error("has the numbers of a repetition out of order")
        if max(least, most or 0) > _MAX_REPEATS:
            raise self._error(f"has more than {_MAX_REPEATS} repetitions")
        return least, most

    def _repeated(self, node: _Node) -> _Node:
        found = self._quantifier()
        if found is None:
            return node
        if self._match(r"[*+?]"):
            raise self._error("repeats a repetition")
        least, most = found
        if most == 0:
            return _NOTHING
        if most == 1:
            return node if least else _optional(node)
        if node.keys() - {(False, False)}:
            raise self._error("has ^ or $ in what is repeated, which is not supported")
        if not node:
            return {} if least else _NOTHING
        part = node[False, False]
        counts = f"{{{least},{'' if most is None else most}}}"
        text = f"(?:{part.text}){counts}"
        return {(False, False): _Part(text, part.is_nullable or least == 0)}

    def _atom(self) -> _Chars:
        char = self._next()
        if char == "[":
            return self._class()
        if char == ".":
            return _Chars(_LINE_ENDS, negated=True)
        if char == "\\":
            return self._escape(is_class=False)
        if char in "*+?":
            raise self._error(f"has a {char} that repeats nothing")
        self._at -= 1
        if char == "{" and self._quantifier():
            raise self._error("has a { that repeats nothing")
        self._at += 1
        return _one(char)

    def _class(self) -> _Chars:
        negated, items = self._take("^"), list[_Chars]()
        while not self._take("]"):
            low = self._class_atom()
            ahead = self._pattern[self._at : self._at + 2]
            if ahead[:1] == "-" and ahead[1:] not in ("", "]"):
                self._at += 1
                high = self._class_atom()
                items += self._range(low, high)
            else:
                items.append(low)
        ranges = tuple(pair for item in items for pair in (_complement(item.ranges) if item.negated else item.ranges))
        return _Chars(ranges, tuple(one for item in items for one in item.properties), negated)

    def _class_atom(self) -> _Chars:
        char = self._next()
        return self._escape(is_class=True) if char == "\\" else _one(char)

    def _range(self, low: _Chars, high: _Chars) -> list[_Chars]:
        ends = [c.ranges[0] if len(c.ranges) == 1 and not c.properties else (0, 1) for c in (low, high)]
        if any(first != last for first, last in ends):
            return [low, _one("-"), high]  # of a class and a character, as browsers read it
        if ends[0][0] > ends[1][0]:
            raise self._error("has a range of characters out of order")
        return [_Chars(((ends[0][0], ends[1][0]),))]

    def _escape(self, *, is_class: bool) -> _Chars:
        if found := self._match(r"u\{([0-9a-fA-F]{1,8})\}|u([0-9a-fA-F]{4})|x([0-9a-fA-F]{2})"):
            return self._code_point(int(found[1] or found[2] or found[3], 16), is_pair=bool(found[2]))
        if found := self._match(r"c([A-Za-z])"):
            return _one(chr(ord(found[1]) % 32))
        if found := self._match(r"([pP])\{([^{}]*)\}"):
            return self._property(found[1], found[2])
        char = self._next()
        if char.lower() in _CLASSES:
            ranges = _CLASSES[char.lower()]
            return _Chars(ranges if char.islower() else _complement(ranges))
        if char in _CONTROL_ESCAPES and not (char == "0" and self._match(r"\d")):
            return _Chars(((_CONTROL_ESCAPES[char],) * 2,))
        if char == "b" and is_class:
            return _one("\b")
        if char.isascii() and char.isalnum():
            raise self._error(f"has \\{char}, which is not supported")
        return _one(char)

    def _code_point(self, code: int, *, is_pair: bool) -> _Chars:
        if code > _LAST:
            raise self._error("has an escape above \\u{10ffff}")
        if is_pair and 0xD800 <= code < 0xDC00 and (low := self._match(r"\\u([dD][c-fC-F][0-9a-fA-F]{2})")):
            code = 0x10000 + ((code - 0xD800) << 10) + int(low[1], 16) - 0xDC00
        return _Chars(((code, code),))

    def _property(self, letter: str, name: str) -> _Chars:
        category = _CATEGORY.fullmatch(_LONG_CATEGORIES.get(name, name))
        script = _SCRIPT.fullmatch(name)
        if category:
            has = "".join(char for char in _ESCAPED if unicodedata.category(char).startswith(category[1]))
            name = category[1]
        elif script:
            has = "".join(_ESCAPED) if script[1] in ("Common", "Zyyy") else ""
        elif name in _PROPERTIES:
            has = _PROPERTIES[name]
        else:
            raise self._error(f"has the property {name!r}, which is not supported")
        if letter == "P":
            has = "".join(char for char in _ESCAPED if char not in has)
        return _Chars(properties=((f"\\{letter}{{{name}}}", has),))


def _optional(node: _Node) -> _Node:
    plain = node.get((False, False))
    text = f"(?:{plain.text})?" if plain else ""
    return node | {(False, False): _Part(text, True)}


def _one(char: str) -> _Chars:
    return _Chars(((ord(char), ord(char)),))


def texts(values: Iterable[str], alphabet: Alphabet) -> str:
    """A regex that matches one of these texts."""
    return f"(?:{'|'.join(map(alphabet.text, values))})"


# ------------------------------------------------------------ what `format` accepts, as patterns all of which match

_LEAP_YEAR = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_MONTH_DAY = (
    "(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
    "|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8]))"
)
_YEAR = "(?:[1-9][0-9]{3}|0[1-9][0-9]{2}|00[1-9][0-9]|000[1-9])"  # Python and most others do not support the year 0
_DATE = f"(?:{_YEAR}-{_MONTH_DAY}|(?:{_LEAP_YEAR})-02-29)"
# Second 60 is valid only at 23:59 UTC, and only on days announced in advance.
_TIME = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]+)?(?:[zZ]|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"

_BYTE = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4 = rf"{_BYTE}(?:\.{_BYTE}){{3}}"
_GROUP = "[0-9a-fA-F]{1,4}"


def _ipv6() -> str:
    """Eight groups, of which the last two may be IPv4, and `::` may stand for one or more (RFC 4291)."""
    found = [f"(?:{_GROUP}:){{7}}{_GROUP}", f"(?:{_GROUP}:){{6}}{_IPV4}"]
    for before in range(8):
        front = f"{_GROUP}(?::{_GROUP}){{{before - 1}}}::" if before else "::"
        after = 7 - before
        ends = [f"(?:{_GROUP}(?::{_GROUP}){{0,{after - 1}}})?"] if after else [""]
        if after >= 2:
            ends.append(f"(?:{_GROUP}:){{0,{after - 2}}}{_IPV4}")
        found.append(f"{front}(?:{'|'.join(ends)})")
    return f"(?:{'|'.join(found)})"


_IPV6 = _ipv6()
_LABEL = "[a-zA-Z0-9](?:[a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?"
_HOSTNAME = rf"{_LABEL}(?:\.{_LABEL})*"
_ATOM = r"[a-zA-Z0-9!#$%&'*+\-/=?^_`{|}~]+"

# RFC 3986
_ESCAPE = "%[0-9a-fA-F]{2}"
_REGISTERED = r"a-zA-Z0-9\-._~!$&'()*+,;="
_SEGMENT = f"(?:[{_REGISTERED}:@]|{_ESCAPE})"
_AUTHORITY = (
    rf"(?:(?:[{_REGISTERED}:]|{_ESCAPE})*@)?"
    rf"(?:\[(?:{_IPV6}|[vV][0-9a-fA-F]+\.[{_REGISTERED}:]+)\]|(?:[{_REGISTERED}]|{_ESCAPE})*)(?::[0-9]*)?"
)
_PATH = f"(?://{_AUTHORITY}(?:/{_SEGMENT}*)*|/(?:{_SEGMENT}+(?:/{_SEGMENT}*)*)?|{_SEGMENT}+(?:/{_SEGMENT}*)*)?"
_QUERY = f"(?:[{_REGISTERED}:@/?]|{_ESCAPE})*"

# RFC 3339, appendix A
_CLOCK = "T(?:[0-9]+H(?:[0-9]+M(?:[0-9]+S)?)?|[0-9]+M(?:[0-9]+S)?|[0-9]+S)"
_CALENDAR = "(?:[0-9]+Y(?:[0-9]+M(?:[0-9]+D)?)?|[0-9]+M(?:[0-9]+D)?|[0-9]+D)"

_FORMATS = {
    "date": (_DATE,),
    "time": (_TIME,),
    "date-time": (f"{_DATE}[tT]{_TIME}",),
    "duration": (f"P(?:{_CALENDAR}(?:{_CLOCK})?|{_CLOCK}|[0-9]+W)",),
    # RFC 5321 without quoted local parts, and of addresses in brackets those of IPv4
    "email": (rf"{_ATOM}(?:\.{_ATOM})*@(?:{_HOSTNAME}|\[{_IPV4}\])", r"[^@]{1,64}@.{1,253}"),
    "hostname": (_HOSTNAME, ".{1,253}"),
    "ipv4": (_IPV4,),
    "ipv6": (_IPV6,),
    "uuid": ("[0-9a-fA-F]{8}-(?:[0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}",),
    "uri": (rf"[a-zA-Z][a-zA-Z0-9+\-.]*:{_PATH}(?:\?{_QUERY})?(?:#{_QUERY})?",),
}


def patterns_of(name: str) -> list[str]:
    """The patterns of a format. Raises ValueError if it is unknown."""
    if name not in _FORMATS:
        raise ValueError(f"{name!r} is not supported; expected {', '.join(_FORMATS)}")
    return [f"^(?:{pattern})$" for pattern in _FORMATS[name]]
