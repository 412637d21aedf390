"""Calls of Mistral's models, which its tokenizers since version 3 mark with `[TOOL_CALLS]`.

Version 3: `[TOOL_CALLS][{"name": "f", "arguments": {"x": 1}, "id": "abcdefghi"}]`, all calls in one array. Version 11:
`[TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS]{"x": 1}`, every call with its own mark. Version 13: the same without the id.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Literal, TypeAlias

from server.formats.base import ChatFormat, Parser, ReasoningMarks, Tool, arguments_rule, quoted
from server.formats.steps import CallParser, Steps

MistralVariant: TypeAlias = Literal["v3", "v11", "v13"]

_CALLS, _ID, _ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
_CALL_ID = "/[a-zA-Z0-9]{9}/"


class MistralFormat(ChatFormat):
    """What Mistral's models write. Its parser reads every variant.

    Args:
        special: see `ChatFormat`.
        reasoning: see `ChatFormat`.
        variant: the version of the tokenizer, whose calls the chat template writes.
    """

    name = "mistral"
    markers = (_CALLS, _ID, _ARGUMENTS)
    trigger = _CALLS

    def __init__(
        self, special: Mapping[str, int] | None = None, reasoning: ReasoningMarks | None = None,
        *, variant: MistralVariant = "v13",
    ) -> None:  # fmt: skip
        super().__init__(special, reasoning)
        self._variant = variant

    def parser(self, tools: Sequence[Tool], *, starts_in_reasoning: bool = False) -> Parser:
        """Make a parser of one output."""
        return _MistralParser(self, tools, (_CALLS,), starts_in_reasoning=starts_in_reasoning)

    def rest(self, tools: Sequence[Tool], *, several: bool) -> str:
        """As the chat templates write calls."""
        return "\n".join([
            f"rest: {self._whole(several=several)}",
            f"call: {' | '.join(f'call_{i}' for i in range(len(tools)))}",
            *(f"call_{i}: {self._head(tool)} {arguments_rule(tool)}" for i, tool in enumerate(tools)),
        ])  # fmt: skip

    def _whole(self, *, several: bool) -> str:
        if self._variant == "v3":
            call = f'call ", \\"id\\": \\"" {_CALL_ID} "\\"}}"'
            return f'"[" {call} (", " {call})* "]"' if several else f'"[" {call} "]"'
        return f"call ({self.literal(_CALLS)} call)*" if several else "call"

    def _head(self, tool: Tool) -> str:
        if self._variant == "v3":
            return quoted(f'{{"name": {json.dumps(tool.name)}, "arguments": ')
        call_id = f"{self.literal(_ID)} {_CALL_ID} " if self._variant == "v11" else ""
        return f"{quoted(tool.name)} {call_id}{self.literal(_ARGUMENTS)}"


class _MistralParser(CallParser):
    def _call(self, marker: str) -> Steps[bool]:
        yield from self._space()
        if (yield from self._expect("[")):
            return (yield from self._array())
        return (yield from self._named_call())

    def _array(self) -> Steps[bool]:
        while True:
            yield from self._space()
            if not (yield from self._json_call()):
                return False
            yield from self._space()
            mark = yield from self._expect(",", "]")
            if mark != ",":
                return bool(mark)

    def _named_call(self) -> Steps[bool]:
        name = yield from self._expect(*self._names)
        mark = yield from self._expect(_ID, _ARGUMENTS)
        if not (name and mark):
            return False
        has_arguments = mark == _ARGUMENTS or (yield from self._call_id())
        yield from self._space()
        if not has_arguments or not (yield from self._sees("{")):
            return self._call_without_arguments(name)
        self._start_call(name)
        yield from self._json_arguments()
        return True

    def _call_id(self) -> Steps[bool]:
        """Take the id of a call, and the mark that begins its arguments; return whether that was there."""
        while True:
            text, mark = self._scanner.until(_ARGUMENTS, " ", "\n", "{")
            self._raw += [text, mark or ""]
            if mark or self._scanner.is_over:
                return mark == _ARGUMENTS
            yield
