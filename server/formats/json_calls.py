"""Calls whose arguments, and often names, are written as JSON: those of Hermes and Qwen, Llama, and Mistral."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace

from pilotfish.engine.text.guided import json_rule
from pilotfish.engine.text.schemas.patterns import escaped
from pilotfish.engine.text.stops import Asides, StopStrings
from pilotfish.server.formats.base import ChatFormat, Tool, arguments_rule, choices, quoted
from pilotfish.server.formats.reasoning import Parser, Steps


def _head(tool: Tool, key: str) -> str:
    """Return a call up to its arguments, with the name first, so that they can be streamed."""
    return quoted(f'{{"name": {json.dumps(tool.name, ensure_ascii=False)}, "{key}": ')


_HERMES_CALL, _HERMES_END = "<tool_call>", "</tool_call>"


class _HermesParser(Parser):
    begins = (_HERMES_CALL,)
    _end_of_broken = re.compile(_HERMES_END)

    def _call(self, marker: str) -> Steps[bool]:
        yield from self._space()
        return (yield from self._json_call(_HERMES_END))


class HermesFormat(ChatFormat):
    r"""Calls of Hermes 2 Pro, Qwen 2.5 and Qwen 3: a JSON object between two markers, one after another.

    `<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>`
    """

    name = "hermes"
    reads = _HermesParser
    trigger = _HERMES_CALL
    turns = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")

    def _sequence(self, *, several: bool) -> str:
        one = f'"\\n" call "}}\\n" {self.literal(_HERMES_END)}'
        return f'{one} ("\\n" {self.literal(_HERMES_CALL)} {one})*' if several else one

    def _call(self, tool: Tool, shared: dict[str, str]) -> str:
        return f"{_head(tool, 'arguments')} {arguments_rule(tool)}"


_TAG, _SEPARATOR = "<|python_tag|>", "; "
_NEXT_LLAMA = (_SEPARATOR + "{", ";{", "\n{")  # call


class _LlamaParser(Parser):
    """Reads calls from the beginning of the answer. After a call, even a malformed one, the next one may begin."""

    begins = (_TAG,)
    _end_of_broken = re.compile(r"\}(?=(?:; ?|\n)\{)")

    def _content(self) -> Steps[None]:
        if self._names:
            yield from self._try_call("")
        yield from super()._content()

    def _call(self, marker: str) -> Steps[bool]:
        if marker in _NEXT_LLAMA:
            self._scanner.rewind(len(marker) - 1)
        yield from self._space()
        if not marker:
            yield from self._expect(_TAG)
            yield from self._space()
        while (yield from self._json_call()):
            self._openings = (_TAG, *_NEXT_LLAMA)
            yield from self._surplus(";", "{")
            yield from self._expect(";")
            yield from self._space()
            if not (yield from self._sees("{")):
                return False
        if self._name:
            self._openings = (_TAG, *_NEXT_LLAMA)
        return False


class LlamaFormat(ChatFormat):
    """Calls of Llama 3.1, 3.2 and 3.3: the whole answer is JSON, without markers, or all after `<|python_tag|>`.

    `{"name": "f", "parameters": {"x": 1}}`; `; ` or white space separates several calls.
    """

    name = "llama"
    reads = _LlamaParser
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
        names = "|".join(escaped(json.dumps(tool.name)) for tool in tools)
        like_calls = rf'\s*\{{(?s:.*)"name"\s*:\s*({names})'
        others = "" if unlike is None else rf" & ~/\s*{escaped(unlike)}(?s:.*)/"
        return "\n".join([
            f"auto: TEXT | {self.literal(_TAG)}? rest",
            rf"TEXT: /(?s:.*)/ & ~/{like_calls}(?s:.*)/ & ~/(?s:.*){escaped(_TAG)}(?s:.*)/{others}",
            f"rest: {self._sequence(several=several)}",
            # The head of a call is one lexeme, because the lexer does not backtrack into text.
            *choices(f'{_head(tool, "parameters")} {arguments_rule(tool)} "}}"' for tool in tools),
        ])  # fmt: skip


_CALLS, _ID, _ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
_NEXT_MISTRAL = (", {", ",{")  # call in an array
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
        self._openings = (_CALLS, *_NEXT_MISTRAL)
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
    """Calls of Mistral's models, marked with `[TOOL_CALLS]`. The variants are the versions of the tokenizer.

    v3: `[TOOL_CALLS][{"name": "f", "arguments": {"x": 1}, "id": "abcdefghi"}]`, all calls in one array. v11:
    `[TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS]{"x": 1}`, each call with its own marker. v13: the same without the id.
    """

    name = "mistral"
    reads = _MistralParser
    newest = "v13"
    trigger = _CALLS

    def _sequence(self, *, several: bool) -> str:
        if self._variant == "v3":
            call = f'call ", \\"id\\": \\"" {_CALL_ID} "\\"}}"'
            return f'"[" {call} (", " {call})* "]"' if several else f'"[" {call} "]"'
        return f"call ({self.literal(_CALLS)} call)*" if several else "call"

    def _call(self, tool: Tool, shared: dict[str, str]) -> str:
        if self._variant == "v3":
            head = _head(tool, "arguments")
        else:
            call_id = f"{self.literal(_ID)} {_CALL_ID} " if self._variant == "v11" else ""
            head = f"{quoted(tool.name)} {call_id}{self.literal(_ARGUMENTS)}"
        return f"{head} {arguments_rule(tool)}"
