"""Calls of Mistral's models, marked with `[TOOL_CALLS]` since version 3 of its tokenizers.

Version 3: `[TOOL_CALLS][{"name": "f", "arguments": {"x": 1}, "id": "abcdefghi"}]`, all calls in one array. Version 11:
`[TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS]{"x": 1}`, each call with its own marker. Version 13: the same without the id.
"""

from __future__ import annotations

import json
import re

from server.formats.base import ChatFormat, Tool, arguments_rule, quoted
from server.formats.reasoning import Parser, Steps

_CALLS, _ID, _ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
_NEXT = (", {", ",{")  # call in an array
_CALL_ID = "/[a-zA-Z0-9]{9}/"


class _MistralParser(Parser):
    """Reads calls of every variant. After a malformed call of an array the next one may begin."""

    begins = (_CALLS,)
    _end_of_broken = re.compile(rf"[}}\]](?=\s*{re.escape(_CALLS)})|\}}(?=, ?\{{)")

    def _call(self, marker: str) -> Steps[bool]:
        if marker != _CALLS:
            self._scanner.rewind(len(marker) - 1)
            return (yield from self._array())
        yield from self._space()
        if (yield from self._expect("[")):
            return (yield from self._array())
        return (yield from self._named_call())

    def _array(self) -> Steps[bool]:
        self._openings = (_CALLS, *_NEXT)
        while True:
            yield from self._space()
            if not (yield from self._json_call()):
                return False
            yield from self._surplus(",", "]")
            mark = yield from self._expect(",", "]")
            if mark == "]":
                return True
            if not mark and not (yield from self._sees("{")):
                return False

    def _named_call(self) -> Steps[bool]:
        name = yield from self._expect(*self._names)
        mark = yield from self._expect(_ID, _ARGUMENTS)
        if not (name and mark):
            return False
        if mark == _ID:
            _, mark = yield from self._until(_ARGUMENTS, " ", "\n", "{", _CALLS)
        if mark != _ARGUMENTS or not (yield from self._call_of(name, _CALLS, has_end=False)):
            return False
        self._complete_call()
        self._openings = (_CALLS,)
        yield from self._surplus(_CALLS)
        return False


class MistralFormat(ChatFormat):
    """The format of Mistral's models. The variants are the versions of the tokenizer: v3, v11 and v13."""

    name = "mistral"
    reads = _MistralParser
    markers = (_CALLS, _ID, _ARGUMENTS)
    newest = "v13"
    trigger = _CALLS

    def _sequence(self, *, several: bool) -> str:
        if self._variant == "v3":
            call = f'call ", \\"id\\": \\"" {_CALL_ID} "\\"}}"'
            return f'"[" {call} (", " {call})* "]"' if several else f'"[" {call} "]"'
        return f"call ({self.literal(_CALLS)} call)*" if several else "call"

    def _call(self, tool: Tool, shared: dict[str, str]) -> str:
        if self._variant == "v3":
            head = quoted(f'{{"name": {json.dumps(tool.name, ensure_ascii=False)}, "arguments": ')
        else:
            call_id = f"{self.literal(_ID)} {_CALL_ID} " if self._variant == "v11" else ""
            head = f"{quoted(tool.name)} {call_id}{self.literal(_ARGUMENTS)}"
        return f"{head} {arguments_rule(tool)}"
