"""What a chat format is: how a family of models writes reasoning and calls of functions into its text.

A format has two sides that fit each other: a `Parser` reads what the model writes, piece by piece, and Lark rules say
what it may write where calls are required. Knows text, and no token, request or protocol.
"""

from __future__ import annotations

import functools
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

from engine.text.guided import json_rule
from engine.text.stops import Asides, StopStrings
from server.formats.json_text import JsonText

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
        self._text, self._at = "", 0
        self.is_over = False  # no more text comes, so nothing is held back any longer
        self._mark: int | None = None
        self._before: list[str] = []  # what was taken since the mark and is in `_text` no more

    @property
    def held(self) -> str:
        """The text that has come and was not taken. Each use copies it, so that loops should use the other methods."""
        return self._text[self._at :]

    @property
    def is_waiting(self) -> bool:
        """Whether all text was taken and more will come."""
        return self._at == len(self._text) and not self.is_over

    def push(self, text: str) -> None:
        if self._mark is not None:
            self._before.append(self._text[self._mark : self._at])
            self._mark = 0
        self._text, self._at = self._text[self._at :] + text, 0

    def take(self, length: int) -> str:
        """Take so many characters, or all where there are fewer."""
        text = self._text[self._at : self._at + length]
        self._at += len(text)
        return text

    def take_all(self) -> None:
        self._at = len(self._text)

    def until(self, *markers: str) -> tuple[str, str | None]:
        """Take the text before the first of `markers`, and take the marker; None if none is complete yet.

        Of two markers that begin at the same place the longer one counts.
        """
        found = _any_of(markers).search(self._text, self._at) if markers else None
        if found is None:
            return self.take(
                len(self._text) - self._at - (0 if self.is_over else num_open(self._text, markers, self._at))
            ), None
        text = self.take(found.start() - self._at)
        marker = self.next_of(*markers)
        self._at += len(marker or "")
        return text, marker

    def next_of(self, *markers: str) -> str | None:
        """That of `markers` with which the text goes on: "" if with none, None if more text has to come first."""
        found = _any_of(markers).match(self._text, self._at)
        rest = self._text[self._at : self._at + max(map(len, markers))]
        if not self.is_over and any(len(other) > len(rest) and other.startswith(rest) for other in markers):
            return None
        return found.group() if found else ""

    def is_cut(self, *markers: str) -> bool:
        """Whether the text has ended where one of `markers` could have gone on, or begun."""
        rest = self._text[self._at : self._at + max(map(len, markers))]
        is_end = self.is_over and self._at + len(rest) == len(self._text)
        return is_end and any(len(marker) > len(rest) and marker.startswith(rest) for marker in markers)

    def take_space(self) -> str:
        found = _SPACE.match(self._text, self._at)
        return self.take(found.end() - self._at if found else 0)

    def take_json(self, value: JsonText, written: list[str]) -> None:
        """Take what belongs to a JSON value, and append it to `written` as valid JSON."""
        self._at = value.read(self._text, self._at, written, is_end=self.is_over)

    def mark(self, back: int = 0) -> None:
        """Remember this place, or one so many characters before it that were taken just now."""
        self._before, self._mark = [], self._at - back

    def forget(self) -> None:
        """Forget the mark, and so the text since."""
        self._before, self._mark = [], None

    @property
    def taken(self) -> str:
        """The text that was taken since the mark. Each use copies it."""
        return "".join([*self._before, self._text[self._mark : self._at]])

    def rewind(self, length: int = 0) -> None:
        """Go back to the mark, and so many characters on."""
        if self._before:
            self._text, self._before = "".join([*self._before, self._text]), []
        assert self._mark is not None, "goes back to no mark"
        self._at = self._mark + length


_SPACE = re.compile(r"[ \t\r\n]*")


def num_open(text: str, markers: Sequence[str], start: int = 0) -> int:
    """Return the length of the longest end of the text from `start` that begins a marker."""
    longest = min(len(text) - start, max(map(len, markers), default=1) - 1)
    return next((n for n in range(longest, 0, -1) if any(marker.startswith(text[-n:]) for marker in markers)), 0)


@functools.lru_cache(maxsize=256)
def _any_of(markers: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, sorted(markers, key=len, reverse=True))))


class Trimmed:
    """Text whose white space at the end is held back until it is known whether it goes on; `leading`: dropped."""

    def __init__(self, *, leading: bool) -> None:
        self._space: list[str] = []
        self._leading = leading  # as long as nothing but white space has come
        self._is_empty, self._is_kept = True, True

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
        self._is_empty, self._is_kept = False, True
        return passed

    def pause(self) -> None:
        """Something else stands here. White space around it is kept if there is text on both sides."""
        self._is_kept = False
        if self._is_empty:
            self._leading, self._space = True, []

    def end(self, *, keep: bool) -> str:
        """End the text; return the white space held back if it is to be kept. What is added then begins anew."""
        space = "".join(self._space) if keep and self._is_kept else ""
        self._space, self._leading, self._is_kept = [], True, True
        return space


class ChatFormat(ABC):
    """A format, as one checkpoint has it.

    Args:
        special: the ids of all tokens that were added to the checkpoint's tokenizer, special or not, by their texts. A
            grammar names such a token by its id, because no text matches it. Special ones are only in the text that
            a parser reads if special tokens are not skipped.
        reasoning: what the model writes around its reasoning; None if it marks none.
        variant: of the calls that the chat template writes, where there are several; a parser reads all of them.
    """

    name: ClassVar[str]
    reads: ClassVar[type[Any]]  # the kind of `Parser`, which knows formats, so that it cannot be named here
    markers: tuple[str, ...] = ()  # of calls
    trigger: str = ""  # the marker that begins every call
    turns: ClassVar[tuple[str, ...]] = ()  # begin and end turns; where they are tokens, parsers drop them

    newest: ClassVar[str] = ""  # the variant where none is named

    def __init__(
        self, special: Mapping[str, int] | None = None, reasoning: ReasoningMarks | None = None, variant: str = ""
    ) -> None:
        self.special, self.reasoning, self._variant = dict(special or {}), reasoning, variant or self.newest

    @property
    def dropped(self) -> tuple[str, ...]:
        """The texts of the tokens that a parser drops."""
        return tuple(turn for turn in self.turns if turn in self.special)

    def parser(self, tools: Sequence[Tool], *, starts_in_reasoning: bool = False, has_structure: bool = False) -> Any:
        """Make a `Parser` of one output.

        Args:
            tools: the functions that may be called. Without any it reads reasoning alone, and calls are content.
            starts_in_reasoning: whether the mark that begins the reasoning stands before the text.
            has_structure: calls have the structure of these rules, so arguments can be passed on before their end.
        """
        return self.reads(self, tools, starts_in_reasoning=starts_in_reasoning, has_structure=has_structure)

    def rest(self, tools: Sequence[Tool], *, several: bool) -> str:
        """Lark rules of which `rest` matches a call of a tool after its trigger; with `several` also further calls.

        Raises ValueError if the schema of a tool cannot be followed.
        """
        shared: dict[str, str] = {}
        calls = choices(self._call(tool, shared) for tool in tools)
        rules = (f"{name}: {body}" for body, name in shared.items())
        return "\n".join([f"rest: {self._sequence(several=several)}", *calls, *rules])

    @abstractmethod
    def _sequence(self, *, several: bool) -> str:
        """What `rest` is in Lark, where `call` is that of a tool."""

    @abstractmethod
    def _call(self, tool: Tool, shared: dict[str, str]) -> str:
        """A call of a tool in Lark; `shared`: the names of rules that several may use, by their right-hand sides."""

    def calls(self, tools: Sequence[Tool], *, several: bool) -> str:
        """Lark rules of which `calls` matches one call of a tool, or with `several` one or more."""
        return f"calls: {self.literal(self.trigger)} rest\n{self.rest(tools, several=several)}"

    def auto(self, tools: Sequence[Tool], *, several: bool, unlike: str | None = None) -> str:
        """Lark rules of which `auto` matches any text in which calls of tools have their structure, and are its end.

        With `several` there may be more than one; the text does not begin with `unlike`, nor with white space and that.
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

    def asides(self, tools: Sequence[Tool], *, starts_in_reasoning: bool = False) -> Asides:
        """The parts of an output that are no answer: the reasoning at its beginning, and calls of tools to its end."""
        marks = self.reasoning
        return Asides(
            leading=() if marks is None or starts_in_reasoning else (marks.begin,),
            closes=StopStrings(() if marks is None else (marks.end,)),
            opens=StopStrings((self.trigger,) if tools and self.trigger else ()),
            is_open=marks is not None and starts_in_reasoning,
        )

    def literal(self, marker: str) -> str:
        """A marker in Lark, and text around it; tokens are named by their ids; nothing for nothing."""
        parts, rest = [], marker
        while rest:
            found = [(rest.index(token), -len(token), token) for token in self.special if token in rest]
            at, _, token = min(found, default=(len(rest), 0, ""))
            parts += [quoted(rest[:at])] if at else []
            parts += [f"<[{self.special[token]}]>"] if token else []
            rest = rest[at + len(token) :]
        return f"({' '.join(parts)})" if len(parts) > 1 else "".join(parts)


def choices(calls: Iterable[str]) -> list[str]:
    """Lark rules of which `call` matches one of these."""
    rules = [f"call_{i}: {one}" for i, one in enumerate(calls)]
    return [f"call: {' | '.join(f'call_{i}' for i in range(len(rules)))}", *rules]


def quoted(text: str) -> str:
    """A text in Lark."""
    return json.dumps(text, ensure_ascii=False)


def pattern(text: str) -> str:
    r"""A regex of Lark that matches exactly this text: "a.b" -> "a\x{2e}b"."""
    return "".join(char if char.isalnum() or not char.isascii() else f"\\x{{{ord(char):x}}}" for char in text)


def without(*marks: str) -> str:
    """The end of a Lark terminal that matches no text with one of these marks."""
    return f" & ~/(?s:.*)({'|'.join(map(pattern, marks))})(?s:.*)/"


def arguments_rule(tool: Tool, quote: str = "") -> str:
    """The right-hand side of a Lark rule that matches an object that is valid under the schema of the tool.

    `quote` is the token around its strings, in Lark; empty: it is JSON.
    """
    return json_rule(tool.parameters, is_object=True, lenient=not tool.strict, quote=quote)
