"""Calls of Llama 3.1, 3.2 and 3.3: the whole answer is a JSON object with name and parameters, without markers.

`{"name": "f", "parameters": {"x": 1}}`, optionally after `<|python_tag|>`; `; ` or white space separates several calls.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace

from engine.text.guided import json_rule
from engine.text.stops import Asides, StopStrings
from server.formats.base import ChatFormat, Tool, arguments_rule, choices, pattern, quoted
from server.formats.reasoning import Parser, Steps

_TAG, _SEPARATOR = "<|python_tag|>", "; "
_NEXT = (_SEPARATOR + "{", ";{", "\n{")  # call


class _LlamaParser(Parser):
    """Reads calls from the beginning of the answer. After a call, even a malformed one, the next one may begin."""

    begins = (_TAG,)
    _end_of_broken = re.compile(r"\}(?=(?:; ?|\n)\{)")

    def _content(self) -> Steps[None]:
        if self._names:
            yield from self._try_call("")
        yield from super()._content()

    def _call(self, marker: str) -> Steps[bool]:
        if marker in _NEXT:
            self._scanner.rewind(len(marker) - 1)
        yield from self._space()
        if not marker:
            yield from self._expect(_TAG)
            yield from self._space()
        while (yield from self._json_call()):
            self._openings = (_TAG, *_NEXT)
            yield from self._surplus(";", "{")
            yield from self._expect(";")
            yield from self._space()
            if not (yield from self._sees("{")):
                return False
        if self._name:
            self._openings = (_TAG, *_NEXT)
        return False


class LlamaFormat(ChatFormat):
    """JSON objects at the beginning of the answer, or after `<|python_tag|>`."""

    name = "llama"
    reads = _LlamaParser
    markers = (_TAG,)
    turns = ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>")

    def asides(self, tools: Sequence[Tool], *, starts_in_reasoning: bool = False) -> Asides:
        """As in the base class; a call without the tag is recognised by its name, as the template writes it."""
        found = super().asides(tools, starts_in_reasoning=starts_in_reasoning)
        names = (f'{{"name": {json.dumps(tool.name)}' for tool in tools)
        return replace(found, opens=StopStrings((_TAG, *names))) if tools else found

    def _sequence(self, *, several: bool) -> str:
        return f"call ({quoted(_SEPARATOR)} call)*" if several else "call"

    def _call(self, tool: Tool, shared: dict[str, str]) -> str:
        """Return the call as JSON, with the same lexemes as content of a JSON Schema, which is an alternative to it.

        The schema of the arguments has an identifier, so that its references stay valid.
        """
        parameters = {"$id": f"tool:{tool.name}", "type": "object"} | json.loads(tool.parameters)
        properties = {"name": {"const": tool.name}, "parameters": parameters}
        schema = {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
        return json_rule(json.dumps(schema), lenient=not tool.strict)

    def calls(self, tools: Sequence[Tool], *, several: bool) -> str:
        return f"calls: {self.literal(_TAG)}? rest\n{self.rest(tools, several=several)}"

    def auto(self, tools: Sequence[Tool], *, several: bool, unlike: str | None = None) -> str:
        """Return a text that is not an object with a function's name, or calls. After the tag only calls may follow."""
        names = "|".join(pattern(json.dumps(tool.name)) for tool in tools)
        like_calls = rf'\s*\{{(?s:.*)"name"\s*:\s*({names})'
        others = "" if unlike is None else rf" & ~/\s*{pattern(unlike)}(?s:.*)/"
        return "\n".join([
            f"auto: TEXT | {self.literal(_TAG)}? rest",
            rf"TEXT: /(?s:.*)/ & ~/{like_calls}(?s:.*)/ & ~/(?s:.*){pattern(_TAG)}(?s:.*)/{others}",
            f"rest: {self._sequence(several=several)}",
            # The head of a call is one lexeme, because the lexer does not backtrack into text.
            *choices(f'{_head(tool)} {arguments_rule(tool)} "}}"' for tool in tools),
        ])  # fmt: skip


def _head(tool: Tool) -> str:
    return quoted(f'{{"name": {json.dumps(tool.name)}, "parameters": ')
