"""Calls of Llama 3.1, 3.2 and 3.3: the whole answer is a JSON object with name and parameters, without marks around it.

`{"name": "f", "parameters": {"x": 1}}`, perhaps after `<|python_tag|>`; several are separated by `; ` or white space.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from server.formats.base import ChatFormat, Parser, Tool, arguments_rule, pattern, quoted
from server.formats.steps import CallParser, Steps

_TAG, _SEPARATOR = "<|python_tag|>", "; "


class LlamaFormat(ChatFormat):
    """JSON objects from the beginning of the answer on, or after `<|python_tag|>`."""

    name = "llama"
    markers = (_TAG,)
    turns = ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>")

    def parser(self, tools: Sequence[Tool], *, starts_in_reasoning: bool = False) -> Parser:
        """Make a parser of one output."""
        return _LlamaParser(self, tools, (_TAG,), starts_in_reasoning=starts_in_reasoning)

    def rest(self, tools: Sequence[Tool], *, several: bool) -> str:
        """As the chat templates write calls, with the name first."""
        return "\n".join([
            f"rest: call ({quoted(_SEPARATOR)} call)*" if several else "rest: call",
            f"call: ({' | '.join(f'call_{i}' for i in range(len(tools)))}) \"}}\"",
            *(f"call_{i}: {_head(tool)} {arguments_rule(tool)}" for i, tool in enumerate(tools)),
        ])  # fmt: skip

    def calls(self, tools: Sequence[Tool], *, several: bool) -> str:
        """Calls with the tag before them, or without."""
        return f"calls: {self.literal(_TAG)}? rest\n{self.rest(tools, several=several)}"

    def auto(self, tools: Sequence[Tool], *, several: bool, unlike: str | None = None) -> str:
        """A text that does not begin as a call does, or calls. After the tag there may be a call alone."""
        names = "|".join(pattern(tool.name) for tool in tools)
        like_calls = rf'\s*\{{\s*"name"\s*:\s*"({names})"'
        others = "" if unlike is None else rf" & ~/\s*{pattern(unlike)}(?s:.*)/"
        return "\n".join([
            "auto: TEXT | calls",
            rf"TEXT: /(?s:.*)/ & ~/{like_calls}(?s:.*)/ & ~/(?s:.*){pattern(_TAG)}(?s:.*)/{others}",
            self.calls(tools, several=several),
        ])  # fmt: skip


def _head(tool: Tool) -> str:
    return quoted(f'{{"name": {json.dumps(tool.name)}, "parameters": ')


class _LlamaParser(CallParser):
    _has_begun = False

    def _content(self) -> bool:
        if self._has_begun or not self._names:
            return super()._content()
        self._has_begun = True
        self._open("")
        return True

    def _call(self, marker: str) -> Steps[bool]:
        yield from self._space()
        if not marker:
            yield from self._expect(_TAG)
            yield from self._space()
        while (yield from self._json_call()):
            yield from self._space()
            separator = yield from self._expect(";")
            yield from self._space()
            if not separator and not (yield from self._sees("{")):
                return True
        return False
