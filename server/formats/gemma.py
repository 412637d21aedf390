"""Calls of Gemma 4 and FunctionGemma: arguments in a notation of their own, whose strings stand between marks.

Gemma 4: `<|tool_call>call:f{city:<|"|>Paris<|"|>,days:[1,2]}<tool_call|>`. FunctionGemma:
`<start_function_call>call:f{city:<escape>Paris<escape>,days:[1,2]}<end_function_call>`. One call follows another.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple, TypeAlias

from server.formats.base import ChatFormat, Parser, ReasoningMarks, Tool, quoted
from server.formats.schemas.gemma import argument_rules
from server.formats.steps import CallParser, Steps

GemmaVariant: TypeAlias = Literal["functiongemma", "gemma4"]


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


class GemmaFormat(ChatFormat):
    """What Gemma writes. Its parser reads both variants. The markers have to be tokens.

    Args:
        special: see `ChatFormat`.
        reasoning: see `ChatFormat`.
        variant: the model whose calls the chat template writes.
    """

    name = "gemma"
    markers = (*_MARKS["functiongemma"], *_MARKS["gemma4"])
    turns = (
        *("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>", "<start_function_response>", "<end_function_response>"),
        *("<|turn>", "<turn|>", "<|tool_response>", "<tool_response|>"),
    )

    def __init__(
        self, special: Mapping[str, int] | None = None, reasoning: ReasoningMarks | None = None,
        *, variant: GemmaVariant = "gemma4",
    ) -> None:  # fmt: skip
        super().__init__(special, reasoning)
        self._marks = _MARKS[variant]
        self.trigger = self._marks.begin

    def parser(self, tools: Sequence[Tool], *, starts_in_reasoning: bool = False) -> Parser:
        """Make a parser of one output."""
        return _GemmaParser(self, tools, tuple(_QUOTES), starts_in_reasoning=starts_in_reasoning)

    def rest(self, tools: Sequence[Tool], *, several: bool) -> str:
        """As the chat templates write calls, with the properties in the order of their names."""
        begin, end, quote = map(self.literal, self._marks)
        return "\n".join([
            f"rest: call ({begin} call)*" if several else "rest: call",
            f"call: ({' | '.join(f'call_{i}' for i in range(len(tools)))}) {end}",
            *(f"call_{i}: {quoted(_WORD + tool.name)} call_{i}_arguments" for i, tool in enumerate(tools)),
            *(argument_rules(f"call_{i}_arguments", tool, quote) for i, tool in enumerate(tools)),
        ])  # fmt: skip


_QUOTES = {marks.begin: marks.quote for marks in _MARKS.values()}
_ENDS = {marks.begin: marks.end for marks in _MARKS.values()}


class _GemmaParser(CallParser):
    """Writes arguments as JSON. It also reads JSON."""

    def _call(self, marker: str) -> Steps[bool]:
        yield from self._space()
        word = yield from self._expect(_WORD)
        name = yield from self._expect(*self._names)
        if not (word and name and (yield from self._expect("{"))):
            return False
        self._start_call(name)
        if not (yield from self._members(_QUOTES[marker])):
            return False
        yield from self._space()
        yield from self._expect(_ENDS[marker])
        return True

    def _members(self, quote: str) -> Steps[bool]:
        """Write the arguments after their opening brace; return whether they were complete."""
        self._add_arguments("{")
        closing, separator = ["}"], ""
        while closing:
            yield from self._space()
            if (yield from self._expect(closing[-1])):
                self._pass_on(closing.pop())
                separator = ", "
                continue
            if separator and not (yield from self._expect(",")):
                return False
            yield from self._space()
            before = separator
            if closing[-1] == "}":
                key = yield from self._key_of(quote)
                if key is None:
                    return False
                before += f"{key}: "
            separator = ", "
            opening = yield from self._expect("{", "[", quote)
            if opening == quote:
                self._pass_on(f'{before}"')
                yield from self._string(quote)
            elif opening:
                self._pass_on(before + opening)
                closing.append("}" if opening == "{" else "]")
                separator = ""
            elif (value := (yield from self._scalar())) is None:
                return False
            else:
                self._pass_on(before + value)
        return True

    def _pass_on(self, text: str) -> None:
        self._raw = []
        self._add_arguments(text)

    def _key_of(self, quote: str) -> Steps[str | None]:
        """Take the name of a member, and the colon; return the name as JSON, None if it is none."""
        if (yield from self._expect(quote)):
            first = len(self._raw)
            is_complete = yield from self._take_until(quote)
            name = json.dumps("".join(self._raw[first:-1]), ensure_ascii=False)
        elif (yield from self._sees('"')):
            name = yield from self._kept_value()
            is_complete = _is_json(name)
        else:
            return (yield from self._bare_key())
        yield from self._space()
        colon = yield from self._expect(":")
        yield from self._space()
        return name if is_complete and colon else None

    def _bare_key(self) -> Steps[str | None]:
        first = len(self._raw)
        is_complete = yield from self._take_until(":", ",", "{", "}", "[", "]")
        name = "".join(self._raw[first:-1]).strip()
        is_key = is_complete and self._raw[-1] == ":"
        yield from self._space()
        return json.dumps(name, ensure_ascii=False) if name and is_key else None

    def _take_until(self, *markers: str) -> Steps[bool]:
        while True:
            text, marker = self._scanner.until(*markers)
            self._raw += [text, marker or ""]
            if marker or self._scanner.is_over:
                return marker is not None
            yield

    def _string(self, quote: str) -> Steps[None]:
        """Write a string after its opening mark."""
        while True:
            text, mark = self._scanner.until(quote)
            self._add_arguments(json.dumps(text, ensure_ascii=False)[1:-1] + ('"' if mark else ""))
            if mark or self._scanner.is_over:
                return
            yield

    def _scalar(self) -> Steps[str | None]:
        """Take a number, a JSON string or one of the constants; return it as JSON, None if it is none."""
        text = yield from self._kept_value()
        text = _AS_JSON.get(text, text)
        return text if _is_json(text) else None


def _is_json(text: str) -> bool:
    try:
        json.loads(text, parse_constant=_refuse, parse_int=str)
    except ValueError:
        return False
    return True


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")
