"""The parser that splits reasoning, content and calls, and the format without calls."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

from pilotfish.engine.errors import InvalidRequest
from pilotfish.server.formats.base import (
    CallArguments,
    CallStart,
    ChatFormat,
    Content,
    Piece,
    Reasoning,
    ReasoningMarks,
    Scanner,
    Tool,
    Trimmed,
    num_open,
)
from pilotfish.server.formats.json_text import JsonText

_T = TypeVar("_T")
Steps: TypeAlias = Generator[None, None, _T]  # yields when it needs more text, and never at the end of the text

_NAME, _ARGUMENTS, _IGNORED = '"name"', ('"arguments"', '"parameters"'), ('"id"', '"type"')
_NOTHING = ('""', "null")  # instead of arguments


@dataclass(slots=True)
class _JsonCall:
    """What was read of an object. Arguments before the name are kept in `early`."""

    name: str = ""
    early: str = ""
    has_arguments: bool = False
    has_more: bool = False  # has members after the arguments
    has_others: bool = False  # some of which do not belong to a call
    is_broken: bool = False


class Parser:
    """Reads one output: reasoning at the beginning, then content and calls of `tools`, which subclasses read.

    The result does not depend on how the text is split into pieces. No text is lost: a malformed call becomes content.
    The arguments of a call are a JSON object.

    A call is read in steps: `_start_call`, `_add_arguments`, `_complete_call`. It is passed on when it is complete,
    because until then the text may still turn out to be content. If a grammar constrains calls, their parts are passed
    on immediately, and the output can end within a call (`is_in_call`). `is_reasoning`: the reasoning has begun, in the
    first piece or in the prompt, and its end marker has not been read.

    Args:
        chat_format: the format, with its markers and tokens.
        tools: the functions; without any, no marker begins a call.
        starts_in_reasoning: whether the prompt ends with the marker that begins the reasoning.
        has_structure: whether the parts of calls are passed on immediately.
    """

    begins: tuple[str, ...] = ()  # the markers that may begin a call
    is_in_call = False
    _end_of_broken = re.compile("(?!)")  # where text continues after a malformed call
    # It also continues at another call, except in formats whose strings may quote a whole call.
    _reads_on_at_openings = True

    def __init__(
        self, chat_format: ChatFormat, tools: Sequence[Tool], *, starts_in_reasoning: bool, has_structure: bool
    ) -> None:
        self._scanner, self._is_cut = Scanner(), False
        self.is_reasoning = starts_in_reasoning and chat_format.reasoning is not None
        self._marks, self._starts_in_reasoning = chat_format.reasoning, starts_in_reasoning
        self._dropped = tuple(turn for turn in chat_format.turns if turn in chat_format.special)
        self._openings = self.begins if tools else ()
        # A marker that is a token is never incomplete.
        self._spelled = [mark for mark in self._openings if mark not in chat_format.special]
        self._reasoning, self._text = Trimmed(leading=True), Trimmed(leading=False)
        self._pieces: list[Piece] = []
        self._num_calls, self._is_early = 0, has_structure
        self._name, self._arguments = "", list[str]()  # of the call that is read
        self._ran_out = False  # whether the text ended where a call could have continued
        self._names = tuple(tool.name for tool in tools)
        escapes = (True, False)
        self._written = {json.dumps(name, ensure_ascii=escape): name for name in self._names for escape in escapes}
        self._steps = self._run()

    def push(self, text: str) -> list[Piece]:
        """Read as far as the result is certain."""
        self._scanner.push(text)
        return self._read()

    def finish(self, *, is_cut: bool = False) -> list[Piece]:
        """Read what was held back, at the end of the text.

        `is_cut`: the model would have continued. An incomplete call at the end is then neither a call nor content.
        """
        self._is_cut = is_cut
        self._scanner.is_over = True
        return self._read()

    def _read(self) -> list[Piece]:
        next(self._steps, None)
        if self._scanner.is_over:
            self._add_content(self._text.end(keep=True))
        pieces, self._pieces = self._pieces, []
        return pieces

    def _run(self) -> Steps[None]:
        if self._marks is not None:
            yield from self._reason(self._marks)
        yield from self._content()

    def _reason(self, marks: ReasoningMarks) -> Steps[None]:
        self._scanner.mark()
        yield from self._space()
        is_reasoning = bool((yield from self._expect(marks.begin))) or self._starts_in_reasoning
        if not is_reasoning:
            self._scanner.rewind()
        self._scanner.forget()
        while is_reasoning:
            text, marker = self._scanner.until(marks.end, *self._dropped)
            self._add_reasoning(self._reasoning.add(text))
            if marker == marks.end:
                self.is_reasoning, self._text = False, Trimmed(leading=True)
                return
            if marker is None:
                if self._scanner.is_over:
                    return
                yield

    def _content(self) -> Steps[None]:
        while True:
            text, marker = self._scanner.until(*self._openings, *self._dropped)
            if marker is None and self._is_cut:
                text = text[: len(text) - num_open(text, self._spelled)]
            self._add_content(self._text.add(text))
            if marker is None:
                if self._scanner.is_over:
                    return
                yield
            elif marker in self._openings:
                yield from self._try_call(marker)

    def _add_reasoning(self, text: str) -> None:
        if text:
            self._pieces.append(Reasoning(text))
            self.is_reasoning = True

    def _add_content(self, text: str) -> None:
        if text:
            self._pieces.append(Content(text))

    # Calls

    def _try_call(self, marker: str) -> Steps[None]:
        """Read a call after a marker that was just taken, or content if it is malformed."""
        self._scanner.mark(len(marker))
        self._ran_out = False
        if not (yield from self._call(marker)):
            self._no_call()
        self._scanner.forget()

    def _call(self, marker: str) -> Steps[bool]:
        """Read calls after a marker; return whether all text taken since the last complete one belongs to them.

        By default there are none, as in formats without calls: the text is content.
        """
        yield from ()
        return False

    def _start_call(self, name: str) -> None:
        self._name, self._arguments = name, []
        if self._is_early:
            self._text.pause()
            self._pieces.append(CallStart(self._num_calls, name))
            self._scanner.mark()
            self.is_in_call = True

    def _add_arguments(self, text: str) -> None:
        if self._is_early and text:
            self._pieces.append(CallArguments(self._num_calls, text))
            self._scanner.mark()
        self._arguments.append(text)

    def _complete_call(self) -> None:
        if not self._is_early:
            self._text.pause()
            arguments = "".join(self._arguments)
            self._pieces += [CallStart(self._num_calls, self._name), CallArguments(self._num_calls, arguments)]
        self._num_calls += 1
        self.is_in_call = False
        self._scanner.mark()

    def _is_unfinished(self) -> bool:
        """Whether the text ended within a call; its part is then neither a call nor content.

        A call whose parts were passed on can end anywhere. Any other one counts as malformed if it contains what may be
        the end of a call.
        """
        if not self._scanner.is_over:
            return False
        is_open = self._is_cut and self._ran_out and self._length_of_broken(self._scanner.taken) is None
        if self.is_in_call or is_open:
            self._scanner.take_all()
        return self.is_in_call or is_open

    def _length_of_broken(self, taken: str) -> int | None:
        """Return the position in the taken text where a malformed call may have ended; None if there is none."""
        found = self._end_of_broken.search(taken)
        return found.end() if found else None

    def _no_call(self) -> None:
        """Treat a malformed call as content, up to its possible end or the next call; the rest is read again."""
        if self._is_unfinished():
            return
        text = self._scanner.taken
        openings = self._openings if self._reads_on_at_openings else ()
        begins = (text.find(opening, 1) for opening in openings)  # from 1, because the text begins with its own
        found = [at for at in (self._length_of_broken(text), *begins) if at is not None and at >= 0]
        length = min(found, default=len(text) - num_open(text, openings, 1))
        self._num_calls += self.is_in_call
        self._scanner.rewind(length)
        self._add_content(self._text.add(text[:length]))

    # Steps

    def _sees(self, *markers: str) -> Steps[str]:
        """Return which of `markers` comes next, without taking it; "" if none does."""
        while (found := self._scanner.next_of(*markers)) is None:
            yield
        self._ran_out |= found == "" and self._scanner.is_cut(*markers)
        return found

    def _expect(self, *markers: str) -> Steps[str]:
        """Take which of `markers` comes next; "" if none does."""
        return self._scanner.take(len((yield from self._sees(*markers))))

    def _space(self) -> Steps[str]:
        """Take white space."""
        parts = [self._scanner.take_space()]
        while self._scanner.is_waiting:
            yield
            parts.append(self._scanner.take_space())
        return "".join(parts)

    def _until(self, *markers: str) -> Steps[tuple[str, str]]:
        """Take the text before the first of `markers`, and the marker; "" if the text ends before it."""
        parts: list[str] = []
        while True:
            text, marker = self._scanner.until(*markers)
            parts.append(text)
            if marker or self._scanner.is_over:
                self._ran_out |= not marker
                return "".join(parts), marker or ""
            yield

    def _json(self, write: Callable[[str], None]) -> Steps[bool]:
        """Take a JSON value and write it incrementally; return whether it is complete."""
        value = JsonText()
        while True:
            written: list[str] = []
            self._scanner.take_json(value, written)
            write("".join(written))
            if value.is_over or value.is_broken or self._scanner.is_over:
                self._ran_out |= not (value.is_over or value.is_broken)
                return value.is_over
            yield

    def _object(self, name: str) -> Steps[bool]:
        """Read the arguments of a call of this function; return whether they are a complete JSON object."""
        if not (yield from self._sees("{")):
            if found := (yield from self._expect(*_NOTHING)):
                self._start_call(name)
                self._add_arguments("{}")
            return bool(found)
        self._start_call(name)
        return (yield from self._json(self._add_arguments))

    def _value(self) -> Steps[str]:
        """Take a JSON value; "" if it is invalid or incomplete."""
        written: list[str] = []
        return "".join(written) if (yield from self._json(written.append)) else ""

    def _call_of(self, name: str, *ends: str, has_end: bool) -> Steps[bool]:
        """Read the arguments of a call of this function: an object, or nothing before one of `ends`.

        With `has_end` one of `ends` is required; otherwise the text may also end.
        """
        yield from self._space()
        if (yield from self._sees("{", *_NOTHING)):
            return (yield from self._object(name))
        is_over = self._scanner.is_cut("{", *_NOTHING, *ends)
        is_empty = bool((yield from self._sees(*ends))) or (is_over and not has_end and not self._is_cut)
        self._ran_out |= is_over
        if is_empty:
            self._start_call(name)
            self._add_arguments("{}")
        return is_empty

    def _ended(self, *ends: str) -> Steps[bool]:
        """Take the end of a call and complete the call; return False if something else follows.

        Surplus braces before it are dropped. The end may be missing before the next call and at the end of the text.
        """
        yield from self._braces()
        if not (yield from self._expect(*ends)) and not (yield from self._sees(*self._openings)):
            if not self._ran_out:
                return False
            self._scanner.take_all()  # an incomplete end
        self._complete_call()
        return True

    def _braces(self) -> Steps[bool]:
        yield from self._space()
        found = False
        while (yield from self._expect("}")):
            found = True
            yield from self._space()
        return found

    def _surplus(self, *followers: str) -> Steps[None]:
        """Drop surplus braces between a complete call and one of `followers`."""
        if (yield from self._braces()) and ((yield from self._sees(*followers)) or self._scanner.is_cut(*followers)):
            self._scanner.mark()

    def _json_call(self, *ends: str) -> Steps[bool]:
        """Read an object with the name and arguments of a call, and its end; return whether it is a call.

        The last brace may be missing, unless unknown members follow the arguments. Without `ends` it is the end.
        """
        if not (yield from self._expect("{")):
            return False
        call = _JsonCall()
        while key := (yield from self._key()):
            if not (yield from self._member(key, call)):
                break
            yield from self._space()
            if (yield from self._sees(", {", ",{")) or not (yield from self._expect(",")):
                break
        is_closed = bool((yield from self._expect("}")))
        if (call.has_others and not is_closed) or (call.has_more and (yield from self._sees("}"))):
            return False  # a surplus brace may have ended the arguments, to which the further members belong
        if not call.name or not (call.has_arguments or (is_closed and not call.is_broken)):
            return False
        if not call.has_arguments:
            self._start_call(call.name)
            self._add_arguments("{}")
        if ends:
            return (yield from self._ended(*ends))
        is_whole = self._ran_out or (not call.is_broken and (is_closed or key not in _IGNORED))
        if is_whole:
            self._complete_call()
        return is_whole

    def _member(self, key: str, call: _JsonCall) -> Steps[bool]:
        """Read the value of a member; return whether it belongs to a call."""
        call.is_broken = True
        if key == _NAME and not call.name:
            written = yield from self._expect(*self._written)
            self._name = call.name = self._written.get(written, "")
            call.is_broken = not written
            if written and call.has_arguments:
                self._start_call(call.name)
                self._add_arguments(call.early)
        elif key in _ARGUMENTS and not call.has_arguments:
            if call.name:
                call.has_arguments = yield from self._object(call.name)
            else:
                call.early = yield from self._value()
                call.has_arguments = call.early.startswith("{")
            call.is_broken = not call.has_arguments
        elif key in _IGNORED or (call.has_arguments and key not in (_NAME, *_ARGUMENTS)):
            call.has_more |= call.has_arguments
            call.has_others |= key not in _IGNORED
            call.is_broken = not (yield from self._value())
        return not call.is_broken

    def _key(self) -> Steps[str]:
        """Take the name of a member, and the colon; "" if there is none."""
        yield from self._space()
        key = (yield from self._value()) if (yield from self._sees('"')) else ""
        yield from self._space()
        colon = yield from self._expect(":")
        yield from self._space()
        return key if colon else ""


class PlainFormat(ChatFormat):
    """Reasoning and content, without calls."""

    name = "plain"
    reads = Parser

    def _sequence(self, *, several: bool) -> str:
        return "call"

    def _call(self, tool: Tool, shared: dict[str, str]) -> str:
        """Raise InvalidRequest: the model has no format of calls."""
        raise InvalidRequest.of("tools", "are not supported by the chat template of this model")
