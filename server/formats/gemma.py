"""Calls of Gemma 4 and FunctionGemma: arguments in a special notation, with strings between marks.

Gemma 4: `<|tool_call>call:f{city:<|"|>Paris<|"|>,days:[1,2]}<tool_call|>`. FunctionGemma:
`<start_function_call>call:f{city:<escape>Paris<escape>,days:[1,2]}<end_function_call>`. One call follows another.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import NamedTuple

from pilotfish.server.formats.base import ChatFormat, ReasoningMarks, Tool, arguments_rule, quoted
from pilotfish.server.formats.reasoning import Parser, Steps


class _Marks(NamedTuple):
    begin: str
    end: str
    quote: str


_MARKS: dict[str, _Marks] = {
    "functiongemma": _Marks("<start_function_call>", "<end_function_call>", "<escape>"),
    "gemma4": _Marks("<|tool_call>", "<tool_call|>", '<|"|>'),
}
_WORD = "call:"
_AS_JSON = {"None": "null", "True": "true", "False": "false"}  # as the chat templates write them
_BY_BEGIN = {marks.begin: marks for marks in _MARKS.values()}
_KEY_ENDS = (*":,{}[]", *(mark for marks in _MARKS.values() for mark in marks))  # of keys without quotes


class _GemmaParser(Parser):
    """Writes arguments as JSON. It also reads JSON."""

    begins = tuple(_BY_BEGIN)
    _end_of_broken = re.compile("|".join(re.escape(marks.end) for marks in _MARKS.values()))
    _reads_on_at_openings = False

    def _call(self, marker: str) -> Steps[bool]:
        yield from self._space()
        word = yield from self._expect(_WORD)
        name = yield from self._expect(*self._names)
        if not (word and name and (yield from self._expect("{"))):
            return False
        self._start_call(name)
        marks = _BY_BEGIN[marker]
        return (yield from self._members(marks.quote)) and (yield from self._ended(marks.end))

    def _members(self, quote: str) -> Steps[bool]:
        """Write the arguments after the opening brace; return whether they were complete."""
        self._add_arguments("{")
        closing, separator = ["}"], ""
        while closing:
            yield from self._space()
            if (yield from self._expect(closing[-1])):
                self._add_arguments(closing.pop())
                separator = ", "
                continue
            if separator and not (yield from self._expect(",")):
                return False
            yield from self._space()
            before = separator
            if closing[-1] == "}":
                key = yield from self._key_of(quote)
                if not key:
                    return False
                before += f"{key}: "
            separator = ", "
            opening = yield from self._expect("{", "[", quote)
            if opening == quote:
                self._add_arguments(f'{before}"')
                if not (yield from self._string(quote)):
                    return False
            elif opening:
                self._add_arguments(before + opening)
                closing.append("}" if opening == "{" else "]")
                separator = ""
            elif not (value := (yield from self._scalar())):
                return False
            else:
                self._add_arguments(before + value)
        return True

    def _key_of(self, quote: str) -> Steps[str]:
        """Take the name of a member, and the colon; return the name as JSON, "" if it is none."""
        if (yield from self._expect(quote)):
            text, end = yield from self._until(quote)
            name = json.dumps(text, ensure_ascii=False) if end else ""
        elif (yield from self._sees('"')):
            name = yield from self._value()
        else:
            text, end = yield from self._until(*_KEY_ENDS)
            name = json.dumps(text.strip(), ensure_ascii=False) if text.strip() and end == ":" else ""
            yield from self._space()
            return name
        yield from self._space()
        colon = yield from self._expect(":")
        yield from self._space()
        return name if colon else ""

    def _string(self, quote: str) -> Steps[bool]:
        """Write a string after its opening mark; return whether it was complete."""
        while True:
            text, mark = self._scanner.until(quote)
            self._add_arguments(json.dumps(text, ensure_ascii=False)[1:-1] + ('"' if mark else ""))
            if mark or self._scanner.is_over:
                self._ran_out |= not mark
                return mark is not None
            yield

    def _scalar(self) -> Steps[str]:
        """Take a number, a JSON string or a constant; return it as JSON, "" if there is none."""
        if constant := (yield from self._expect(*_AS_JSON)):
            return _AS_JSON[constant]
        return (yield from self._value())


class GemmaFormat(ChatFormat):
    """The format of Gemma. The variants are the models functiongemma and gemma4. The markers must be tokens."""

    name = "gemma"
    reads = _GemmaParser
    turns = (
        *("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>", "<start_function_response>", "<end_function_response>"),
        *("<|turn>", "<turn|>", "<|tool_response>", "<tool_response|>"),
    )

    def __init__(
        self, special: Mapping[str, int] | None = None, reasoning: ReasoningMarks | None = None, variant: str = "gemma4"
    ) -> None:
        super().__init__(special, reasoning, variant)
        self._marks = _MARKS[variant]
        self.trigger = self._marks.begin

    def _sequence(self, *, several: bool) -> str:
        one = f"call {self.literal(self._marks.end)}"
        return f"{one} ({self.literal(self._marks.begin)} {one})*" if several else one

    def _call(self, tool: Tool, shared: dict[str, str]) -> str:
        """Return the call as the chat templates write it, with properties sorted by name."""
        return f"{quoted(_WORD + tool.name)} {arguments_rule(tool, self.literal(self._marks.quote))}"
