"""What a chat format is: how a family of models writes reasoning and calls of functions into its text.

A format has two sides that fit each other: a `Parser` reads what the model writes, piece by piece, and Lark rules say
what it may write where calls are required. Knows text, and no token, request or protocol.
"""

from __future__ import annotations

import functools
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, TypeAlias

from engine.text.guided import json_rule

ANY_OBJECT = '{"type": "object"}'


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call; `parameters` is the text of the JSON Schema of its arguments."""

    name: str
    description: str = ""
    parameters: str = ANY_OBJECT
    strict: bool = False


@dataclass(frozen=True, slots=True)
class ReasoningMarks:
    """What a model writes around its reasoning."""

    begin: str = "<think>"
    end: str = "</think>"


# ------------------------------------------------------------------------------------------------ what a parser finds


@dataclass(frozen=True, slots=True)
class Reasoning:
    """More text of the reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class Content:
    """More text of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A call begins. Calls are numbered from 0."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of the JSON text of a call's arguments."""

    index: int
    text: str


Piece: TypeAlias = Reasoning | Content | CallStart | CallArguments


class Scanner:
    """Text that comes in pieces, read up to markers. An end that may begin a marker is held back.

    The cost is proportional to the text, however it is cut. No marker may stand inside another but at its beginning.
    """

    def __init__(self) -> None:
        self._text, self._at, self._is_over = "", 0, False

    @property
    def is_over(self) -> bool:
        """Whether no more text will come."""
        return self._is_over

    @property
    def held(self) -> str:
        """The text that has come and was not taken. Each use copies it, so that loops should use the other methods."""
        return self._text[self._at :]

    @property
    def is_waiting(self) -> bool:
        """Whether all text was taken and more will come."""
        return self._at == len(self._text) and not self._is_over

    def push(self, text: str) -> None:
        """Add a piece of text."""
        self._text, self._at = self._text[self._at :] + text, 0

    def end(self) -> None:
        """No more text comes, so nothing is held back any longer."""
        self._is_over = True

    def take(self, length: int) -> str:
        """Take so many characters, or all where there are fewer."""
        text = self._text[self._at : self._at + length]
        self._at += len(text)
        return text

    def until(self, *markers: str) -> tuple[str, str | None]:
        """Take the text before the first of `markers`, and take the marker; None if none is complete yet.

        Of two markers that begin at the same place the longer one counts.
        """
        found = _any_of(markers).search(self._text, self._at) if markers else None
        if found is None:
            length = len(self._text) - self._at
            return self.take(length - (0 if self._is_over else self._num_open(markers))), None
        text = self.take(found.start() - self._at)
        return text, self.one_of(*markers)

    def one_of(self, *markers: str) -> str | None:
        """Take that of `markers` with which the text goes on: "" if with none, None if more text has to come first."""
        found = _any_of(markers).match(self._text, self._at)
        marker = found.group() if found else ""
        rest = self._text[self._at : self._at + max(map(len, markers))]
        if not self._is_over and any(len(other) > len(rest) and other.startswith(rest) for other in markers):
            return None
        return self.take(len(marker))

    def is_cut(self, *markers: str) -> bool:
        """Whether the text has ended where one of `markers` could have gone on, or begun."""
        rest = self._text[self._at : self._at + max(map(len, markers))]
        is_end = self._is_over and self._at + len(rest) == len(self._text)
        return is_end and any(len(marker) > len(rest) and marker.startswith(rest) for marker in markers)

    def starts_with(self, marker: str) -> bool | None:
        """Whether the text goes on with `marker`; None if more text has to come first."""
        if self._text.startswith(marker, self._at):
            return True
        rest = self._text[self._at : self._at + len(marker)]
        return None if marker.startswith(rest) and not self._is_over else False

    def take_space(self) -> str:
        """Take leading white space."""
        found = _SPACE.match(self._text, self._at)
        return self.take(found.end() - self._at if found else 0)

    def take_value(self, end: JsonEnd) -> str:
        """Take what belongs to a JSON value."""
        return self.take(end.length(self._text, self._at))

    def _num_open(self, markers: Sequence[str]) -> int:
        """Length of the longest end of the text that begins a marker."""
        longest = min(len(self._text) - self._at, max(map(len, markers), default=1) - 1)
        ends = (length for length in range(longest, 0, -1))
        return next((n for n in ends if any(marker.startswith(self._text[-n:]) for marker in markers)), 0)


_SPACE = re.compile(r"[ \t\r\n]*")


@functools.lru_cache(maxsize=256)
def _any_of(markers: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, sorted(markers, key=len, reverse=True))))


class Trimmed:
    """Text whose white space at the end is held back until it is known whether the text goes on.

    Args:
        leading: whether white space at the beginning is dropped.
    """

    def __init__(self, *, leading: bool) -> None:
        self._space: list[str] = []
        self._leading = leading  # as long as nothing but white space has come

    def add(self, text: str) -> str:
        """Add text; return what is certain to belong to it, without white space at the end."""
        if self._leading:
            text = text.lstrip()
        body = text.rstrip()
        if not body:
            self._space.append(text)
            return ""
        passed = "".join(self._space) + body
        self._leading, self._space = False, [text[len(body) :]]
        return passed

    def end(self, *, keep: bool) -> str:
        """End the text; return the white space held back if it is to be kept. What is added then begins anew."""
        space, self._space, self._leading = "".join(self._space), [], True
        return space if keep else ""


class JsonEnd:
    """Finds where a JSON value ends, in text that comes in pieces. Its first character is the value's own."""

    def __init__(self) -> None:
        self._depth, self._in_string, self._is_escaped, self._is_scalar = 0, False, False, False
        self.is_over = False

    def length(self, text: str, start: int = 0) -> int:
        """How many characters of `text` from `start` belong to the value; `is_over` tells whether it ends there."""
        at = start
        while at < len(text) and not self.is_over:
            at = self._read_string(text, at) if self._in_string else self._read(text, at)
        return at - start

    def _read(self, text: str, start: int) -> int:
        pattern = _SCALAR_END if self._is_scalar else _STRUCTURE if self._depth else _BEGIN
        found = pattern.search(text, start)
        if found is None:
            return len(text)
        char = found.group()
        if self._is_scalar:
            self.is_over = True
            return found.start()
        if char == '"':
            self._in_string = True
        elif char in "[{":
            self._depth += 1
        elif self._depth:
            self._depth -= 1
            self.is_over = self._depth == 0
        else:
            self._is_scalar = True
        return found.end()

    def _read_string(self, text: str, start: int) -> int:
        if self._is_escaped:
            self._is_escaped = False
            return start + 1
        found = _STRING_END.search(text, start)
        if found is None:
            return len(text)
        self._is_escaped = found.group() == "\\"
        self._in_string = self._is_escaped
        self.is_over = not self._in_string and self._depth == 0
        return found.end()


_BEGIN, _SCALAR_END = re.compile(r"\S"), re.compile(r"[,\]}\s]")
_STRUCTURE, _STRING_END = re.compile(r'["\[\]{}]'), re.compile(r'["\\]')


class Parser(ABC):
    """Reads one output. The pieces of two readings of the same text join to the same, however the text was cut.

    Text is never lost: what looks like a call and is none is content.
    """

    def __init__(self) -> None:
        self._scanner = Scanner()

    @property
    def held(self) -> str:
        """The text that has come and was not read yet, because what it is depends on what comes next."""
        return self._scanner.held

    def push(self, text: str) -> list[Piece]:
        """Read more text."""
        self._scanner.push(text)
        return self._read()

    def finish(self) -> list[Piece]:
        """Read what was held back: the text has ended."""
        self._scanner.end()
        return self._read()

    @abstractmethod
    def _read(self) -> list[Piece]:
        """Read as much as is certain."""


class ChatFormat(ABC):
    """A format, as one checkpoint has it.

    Args:
        special: the ids of all tokens that were added to the checkpoint's tokenizer, special or not, by their texts. A
            grammar names such a token by its id, because no text matches it. Special ones are only in the text that
            a parser reads if special tokens are not skipped.
        reasoning: what the model writes around its reasoning; None if it marks none.
    """

    name: ClassVar[str]
    markers: tuple[str, ...] = ()  # of calls
    trigger: str = ""  # the marker that begins every call
    turns: ClassVar[tuple[str, ...]] = ()  # begin and end turns; where they are tokens, parsers drop them

    def __init__(self, special: Mapping[str, int] | None = None, reasoning: ReasoningMarks | None = None) -> None:
        self.special, self.reasoning = dict(special or {}), reasoning

    @property
    def dropped(self) -> tuple[str, ...]:
        """The texts of the tokens that a parser drops."""
        return tuple(turn for turn in self.turns if turn in self.special)

    @abstractmethod
    def parser(self, tools: Sequence[Tool], *, starts_in_reasoning: bool = False) -> Parser:
        """Make a parser of one output. Without `tools` it reads reasoning alone, and calls are content."""

    @abstractmethod
    def rest(self, tools: Sequence[Tool], *, several: bool) -> str:
        """Lark rules of which `rest` matches a call of a tool after its trigger; with `several` also further calls."""

    def calls(self, tools: Sequence[Tool], *, several: bool) -> str:
        """Lark rules of which `calls` matches one call of a tool, or with `several` one or more."""
        return f"calls: {self.literal(self.trigger)} rest\n{self.rest(tools, several=several)}"

    def auto(self, tools: Sequence[Tool], *, several: bool, unlike: str | None = None) -> str:
        """Lark rules of which `auto` matches any text in which calls of tools have their structure, and are its end.

        Args:
            tools: the functions that may be called.
            several: whether there may be more than one call.
            unlike: the text does not begin with this, nor with white space and this.
        """
        # A lexer that has read the beginning of a trigger as text does not go back: so text and trigger are one lexeme.
        is_token, trigger = self.trigger in self.special, self.literal(self.trigger)
        others = "" if unlike is None else rf" & ~/\s*{pattern(unlike)}(?s:.*)/"
        # Other tokens must not spell a trigger that is a token: a parser would read a call that has no structure.
        others += without(self.trigger) if is_token else ""
        return "\n".join([
            "auto: TEXT | before rest",
            f"before: TEXT {trigger}" if is_token else f"before[suffix={trigger}]: TEXT",
            f"TEXT: /(?s:.*)/{others}",
            self.rest(tools, several=several),
        ])  # fmt: skip

    def prefix(self, *, has_reasoned: bool) -> str:
        """Lark of what stands before an answer that is no call; empty in most formats."""
        return ""

    def literal(self, marker: str) -> str:
        """A marker in Lark, and text around it; tokens are named by their ids."""
        parts, rest = [], marker
        while rest:
            found = [(rest.index(token), -len(token), token) for token in self.special if token in rest]
            at, _, token = min(found, default=(len(rest), 0, ""))
            parts += [quoted(rest[:at])] if at else []
            parts += [f"<[{self.special[token]}]>"] if token else []
            rest = rest[at + len(token) :]
        return parts[0] if len(parts) == 1 else f"({' '.join(parts)})"


def quoted(text: str) -> str:
    """A text in Lark."""
    return json.dumps(text, ensure_ascii=False)


def pattern(text: str) -> str:
    r"""A regex of Lark that matches exactly this text: "a.b" -> "a\x{2e}b"."""
    return "".join(char if char.isalnum() or not char.isascii() else f"\\x{{{ord(char):x}}}" for char in text)


def without(*marks: str) -> str:
    """The end of a Lark terminal that matches no text with one of these marks."""
    return f" & ~/(?s:.*)({'|'.join(map(pattern, marks))})(?s:.*)/"


def arguments_rule(tool: Tool) -> str:
    """The right-hand side of a Lark rule that matches a JSON object that is valid under the schema of the tool."""
    return json_rule(tool.parameters, is_object=True, lenient=not tool.strict)
