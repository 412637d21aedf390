"""Calls of DeepSeek's models, in a list of calls; all markers are written with full-width bars: `<|tool▁sep|>`.

V3 and R1: `<|tool▁call▁begin|>function<|tool▁sep|>f`, a line "```json", the arguments, a line "```" and
`<|tool▁call▁end|>`. V3.1: `<|tool▁call▁begin|>f<|tool▁sep|>{"x": 1}<|tool▁call▁end|>`.
"""

from __future__ import annotations

import re

from pilotfish.server.formats.base import ChatFormat, Tool, arguments_rule, quoted
from pilotfish.server.formats.reasoning import Parser, Steps


def _mark(name: str) -> str:
    return f"<\uff5c{name}\uff5c>"


_BEGIN, _END = _mark("tool▁calls▁begin"), _mark("tool▁calls▁end")
_CALL, _SEPARATOR, _CALL_END = _mark("tool▁call▁begin"), _mark("tool▁sep"), _mark("tool▁call▁end")
_TYPE, _FENCE, _FENCE_END = "function", "```json", "```"
_LINES = f"\n{_FENCE}\n"


class _DeepSeekParser(Parser):
    begins = (_BEGIN, _CALL)
    _end_of_broken = re.compile(_CALL_END)

    def _call(self, marker: str) -> Steps[bool]:
        if marker == _BEGIN:
            yield from self._space()
            marker = yield from self._expect(_CALL)
        while marker == _CALL:
            name = yield from self._head()
            if not name or not (yield from self._call_of(name, _FENCE_END, _CALL_END, has_end=True)):
                return False
            yield from self._space()
            yield from self._expect(_FENCE_END)
            if not (yield from self._ended(_CALL_END)):
                return False
            yield from self._space()
            marker = yield from self._expect(_CALL, _END)
        return marker == _END

    def _head(self) -> Steps[str]:
        """Take the text before the arguments; return the name of the function, "" if it is malformed."""
        name = yield from self._expect(_TYPE, *self._names)
        if not name or not (yield from self._expect(_SEPARATOR)):
            return ""
        yield from self._space()
        if name in self._names and (name != _TYPE or (yield from self._sees("{", _CALL_END))):
            return name
        name = yield from self._expect(*self._names)
        line_end = yield from self._expect("\n")
        fence = yield from self._expect(_FENCE)
        is_empty = yield from self._sees(_CALL_END)
        return name if (line_end and fence) or is_empty else ""


class DeepSeekFormat(ChatFormat):
    """The format of DeepSeek's models. The variants are the models v3 and v3.1."""

    name = "deepseek"
    reads = _DeepSeekParser
    trigger = _BEGIN
    newest = "v3.1"
    turns = tuple(map(_mark, ("begin▁of▁sentence", "end▁of▁sentence", "User", "Assistant")))

    @property
    def _is_fenced(self) -> bool:
        return self._variant == "v3"

    def _sequence(self, *, several: bool) -> str:
        close = quoted(f"\n{_FENCE_END}") if self._is_fenced else ""
        one = f"{self.literal(_CALL)} call {close} {self.literal(_CALL_END)}"
        more = f"({quoted(chr(10)) if self._is_fenced else ''} {one})*" if several else ""
        return f"{one} {more} {self.literal(_END)}"

    def _call(self, tool: Tool, shared: dict[str, str]) -> str:
        if self._is_fenced:
            head = f'"{_TYPE}" {self.literal(_SEPARATOR)} {quoted(tool.name + _LINES)}'
        else:
            head = f"{quoted(tool.name)} {self.literal(_SEPARATOR)}"
        return f"{head} {arguments_rule(tool)}"
