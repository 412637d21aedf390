"""Chat formats: the notation of reasoning and tool calls in a model family's text.

A format has two matching parts: a `Parser` that reads the model's text incrementally, and Lark rules that constrain the
text where calls are required. Independent of tokens, requests and protocol.
"""

from __future__ import annotations

import functools
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

from pilotfish.engine.text.guided import json_rule
from pilotfish.engine.text.schemas.patterns import escaped
from pilotfish.engine.text.stops import Asides, StopStrings
from pilotfish.server.formats.json_text import JsonText

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
    """The markers around a model's reasoning."""

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
    """Reads text that arrives in pieces up to markers, and holds back an end that may begin a marker.

    The cost is proportional to the text, however it is split. A marker may contain another one only at its beginning.
    """

    def __init__(self) -> None:
        self._text, self._at = "", 0
        self.is_over = False  # the text is complete, so nothing is held back
        self._mark: int | None = None
        self._before: list[str] = []  # text that was taken since the mark and is no longer in `_text`

    @property
    def held(self) -> str:
        """The text that was not taken yet. Each use copies it, so that loops should use the other methods."""
        return self._text[self._at :]

    @property
    def is_waiting(self) -> bool:
        """Whether all text was taken and more will arrive."""
        return self._at == len(self._text) and not self.is_over

    def push(self, text: str) -> None:
        if self._mark is not None:
            self._before.append(self._text[self._mark : self._at])
            self._mark = 0
        self._text, self._at = self._text[self._at :] + text, 0

    def take(self, length: int) -> str:
        """Take `length` characters, or all if there are fewer."""
        text = self._text[self._at : self._at + length]
        self._at += len(text)
        return text

    def take_all(self) -> None:
        self._at = len(self._text)

    def until(self, *markers: str) -> tuple[str, str | None]:
        """Take the text before the first of `markers`, and the marker; None if none is complete yet.

        Of two markers at the same position, the longer one is found.
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
        """Return which of `markers` comes next; "" if none does, None if that requires more text."""
        found = _any_of(markers).match(self._text, self._at)
        rest = self._text[self._at : self._at + max(map(len, markers))]
        if not self.is_over and any(len(other) > len(rest) and other.startswith(rest) for other in markers):
            return None
        return found.group() if found else ""

    def is_cut(self, *markers: str) -> bool:
        """Whether the text has ended where one of `markers` could have started or continued."""
        rest = self._text[self._at : self._at + max(map(len, markers))]
        is_end = self.is_over and self._at + len(rest) == len(self._text)
        return is_end and any(len(marker) > len(rest) and marker.startswith(rest) for marker in markers)

    def take_space(self) -> str:
        found = _SPACE.match(self._text, self._at)
        return self.take(found.end() - self._at if found else 0)

    def take_json(self, value: JsonText, written: list[str]) -> None:
        """Take the text of a JSON value, and append it to `written` as valid JSON."""
        self._at = value.read(self._text, self._at, written, is_end=self.is_over)

    def mark(self, back: int = 0) -> None:
        """Set the mark here, or `back` characters before, which were taken just now."""
        self._before, self._mark = [], self._at - back

    def forget(self) -> None:
        """Remove the mark."""
        self._before, self._mark = [], None

    @property
    def taken(self) -> str:
        """The text taken since the mark. Each use copies it."""
        return "".join([*self._before, self._text[self._mark : self._at]])

    def rewind(self, length: int = 0) -> None:
        """Return to the mark plus `length` characters."""
        if self._before:
            self._text, self._before = "".join([*self._before, self._text]), []
        assert self._mark is not None, "there is no mark"
        self._at = self._mark + length


_SPACE = re.compile(r"[ \t\r\n]*")


def num_open(text: str, markers: Sequence[str], start: int = 0) -> int:
    """Return the length of the longest suffix of the text from `start` that is a prefix of a marker."""
    longest = min(len(text) - start, max(map(len, markers), default=1) - 1)
    return next((n for n in range(longest, 0, -1) if any(marker.startswith(text[-n:]) for marker in markers)), 0)


@functools.lru_cache(maxsize=256)
def _any_of(markers: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, sorted(markers, key=len, reverse=True))))


class Trimmed:
    """Text whose trailing white space is held back until more text follows; `leading`: drop leading white space."""

    def __init__(self, *, leading: bool) -> None:
        self._space: list[str] = []
        self._leading = leading  # while there is only white space
        self._is_empty, self._is_kept = True, True

    def add(self, text: str) -> str:
        """Add text; return what is certain to belong to it, without trailing white space."""
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
        """Record that something else follows here. White space around it is kept if there is text on both sides."""
        self._is_kept = False
        if self._is_empty:
            self._leading, self._space = True, []

    def end(self, *, keep: bool) -> str:
        """End the text; return the held-back white space if it must be kept. The next `add` starts a new text."""
        space = "".join(self._space) if keep and self._is_kept else ""
        self._space, self._leading, self._is_kept = [], True, True
        return space


class ChatFormat(ABC):
    """A format, with the tokens and markers of one checkpoint.

    Args:
        special: the ids of all tokens that were added to the checkpoint's tokenizer, special or not, by text. A grammar
            refers to such a token by its id, because no text matches it. The parser's text contains special tokens
            only if they are not skipped.
        reasoning: the markers around the model's reasoning; None if it has none.
        variant: the variant of calls that the chat template writes, if there are several; parsers read all of them.
    """

    name: ClassVar[str]
    reads: ClassVar[type[Any]]  # a subclass of `Parser`, whose module imports this one
    trigger: str = ""  # the marker that begins every call
    turns: ClassVar[tuple[str, ...]] = ()  # markers of turns; parsers drop those that are tokens

    newest: ClassVar[str] = ""  # the default variant

    def __init__(
        self, special: Mapping[str, int] | None = None, reasoning: ReasoningMarks | None = None, variant: str = ""
    ) -> None:
        self.special, self.reasoning, self._variant = dict(special or {}), reasoning, variant or self.newest

    def parser(self, tools: Sequence[Tool], *, starts_in_reasoning: bool = False, has_structure: bool = False) -> Any:
        """Return a `Parser` for one output.

        Args:
            tools: the functions that may be called. Without any, calls are content.
            starts_in_reasoning: whether the prompt ends with the marker that begins the reasoning.
            has_structure: the rules below constrain calls, so that arguments can be passed on before they are complete.
        """
        return self.reads(self, tools, starts_in_reasoning=starts_in_reasoning, has_structure=has_structure)

    def rest(self, tools: Sequence[Tool], *, several: bool) -> str:
        """Return Lark rules: `rest` matches a call of a tool after its trigger, and with `several` further calls.

        Raises ValueError if a tool's schema is not supported.
        """
        shared: dict[str, str] = {}
        calls = choices(self._call(tool, shared) for tool in tools)
        rules = (f"{name}: {body}" for body, name in shared.items())
        return "\n".join([f"rest: {self._sequence(several=several)}", *calls, *rules])

    @abstractmethod
    def _sequence(self, *, several: bool) -> str:
        """Return the right-hand side of the Lark rule `rest`, which uses the rule `call`."""

    @abstractmethod
    def _call(self, tool: Tool, shared: dict[str, str]) -> str:
        """Return a call of a tool in Lark; `shared`: names of shared rules, by their right-hand sides."""

    def calls(self, tools: Sequence[Tool], *, several: bool) -> str:
        """Return Lark rules: `calls` matches one call of a tool, or with `several` one or more."""
        return f"calls: {self.literal(self.trigger)} rest\n{self.rest(tools, several=several)}"

    def auto(self, tools: Sequence[Tool], *, several: bool, unlike: str | None = None) -> str:
        """Return Lark rules: `auto` matches any text, in which calls of tools are well-formed and come last.

        With `several` there may be more than one. The text must not begin with `unlike`, also after white space.
        """
        # Text and trigger are one lexeme, because the lexer does not backtrack into a trigger that it read as text.
        is_token, trigger = self.trigger in self.special, self.literal(self.trigger)
        others = "" if unlike is None else rf" & ~/\s*{escaped(unlike)}(?s:.*)/"
        # Other tokens must not spell a trigger that is a token: the parser would read an unconstrained call.
        others += without(self.trigger) if is_token else ""
        return "\n".join([
            "auto: TEXT | before rest",
            f"before: TEXT {trigger}" if is_token else f"before[suffix={trigger}]: TEXT",
            f"TEXT: /(?s:.*)/{others}",
            self.rest(tools, several=several),
        ])  # fmt: skip

    def prefix(self, *, has_reasoned: bool) -> str:
        """Return the Lark of the text before an answer that is not a call; empty in most formats."""
        return ""

    def asides(self, tools: Sequence[Tool], *, starts_in_reasoning: bool = False) -> Asides:
        """Return the parts of an output that are not its answer: reasoning at the beginning, calls at the end."""
        marks = self.reasoning
        return Asides(
            leading=() if marks is None or starts_in_reasoning else (marks.begin,),
            closes=StopStrings(() if marks is None else (marks.end,)),
            opens=StopStrings((self.trigger,) if tools and self.trigger else ()),
            is_open=marks is not None and starts_in_reasoning,
        )

    def literal(self, marker: str) -> str:
        """Return a text in Lark, in which added tokens are written by id; "" for ""."""
        parts, rest = [], marker
        while rest:
            found = [(rest.index(token), -len(token), token) for token in self.special if token in rest]
            at, _, token = min(found, default=(len(rest), 0, ""))
            parts += [quoted(rest[:at])] if at else []
            parts += [f"<[{self.special[token]}]>"] if token else []
            rest = rest[at + len(token) :]
        return f"({' '.join(parts)})" if len(parts) > 1 else "".join(parts)


def choices(calls: Iterable[str]) -> list[str]:
    """Return Lark rules: `call` matches one of these."""
    rules = [f"call_{i}: {one}" for i, one in enumerate(calls)]
    return [f"call: {' | '.join(f'call_{i}' for i in range(len(rules)))}", *rules]


def quoted(text: str) -> str:
    """Return a text as a Lark string."""
    return json.dumps(text, ensure_ascii=False)


def without(*marks: str) -> str:
    """Return a suffix of a Lark terminal that excludes texts with one of these marks."""
    return f" & ~/(?s:.*)({'|'.join(map(escaped, marks))})(?s:.*)/"


def arguments_rule(tool: Tool, quote: str = "") -> str:
    """Return the right-hand side of a Lark rule for arguments that are valid under the tool's schema.

    `quote`: the token around strings, in Lark; empty for JSON.
    """
    return json_rule(tool.parameters, is_object=True, lenient=not tool.strict, quote=quote)
