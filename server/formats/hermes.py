r"""Calls of Hermes 2 Pro, Qwen 2.5 and Qwen 3: a JSON object with name and arguments between two marks.

`<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>`, one after another.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial

from server.formats.base import ChatFormat, JsonEnd, Parser, Tool, arguments_rule, quoted
from server.formats.reasoning import Step, TextParser

_BEGIN, _END = "<tool_call>", "</tool_call>"
_NAME, _ARGUMENTS = '"name"', '"arguments"'


class HermesFormat(ChatFormat):
    """JSON objects between `<tool_call>` and `</tool_call>`."""

    name = "hermes"
    markers = (_BEGIN, _END)
    trigger = _BEGIN
    turns = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")

    def parser(self, tools: Sequence[Tool], *, starts_in_reasoning: bool = False) -> Parser:
        """Make a parser of one output."""
        if not tools:
            return TextParser(self, starts_in_reasoning=starts_in_reasoning)
        return _HermesParser(self, tools, starts_in_reasoning=starts_in_reasoning)

    def rest(self, tools: Sequence[Tool], *, several: bool) -> str:
        """As the chat templates write calls, with the name first, so that arguments can be streamed."""
        calls = [f"call_{i}" for i in range(len(tools))]
        begin, end = self.literal(_BEGIN), self.literal(_END)
        return "\n".join([
            f'rest: object ("\\n" {begin} object)*' if several else "rest: object",
            f'object: "\\n" ({" | ".join(calls)}) "}}\\n" {end}',
            *(f"{call}: {_head(tool)} {arguments_rule(tool)}" for call, tool in zip(calls, tools, strict=True)),
        ])  # fmt: skip


def _head(tool: Tool) -> str:
    return quoted(f'{{"name": {json.dumps(tool.name)}, "arguments": ')


class _HermesParser(TextParser):
    """Reads an object key by key. Arguments before the name are kept until the name has come."""

    def __init__(self, chat_format: ChatFormat, tools: Sequence[Tool], *, starts_in_reasoning: bool) -> None:
        super().__init__(chat_format, (_BEGIN,), starts_in_reasoning=starts_in_reasoning)
        self._names: dict[str, Step] = {}  # as JSON, with the steps that take them
        for tool in tools:
            take = partial(self._take_name, tool.name)
            self._names |= {json.dumps(tool.name): take, json.dumps(tool.name, ensure_ascii=False): take}
        self._name: str | None = None
        self._early: list[str] = []  # arguments before the name
        self._has_started = False
        self._end = JsonEnd()

    def _open(self, marker: str) -> None:
        self._name, self._early, self._has_started = None, [], False
        self._step = self._begin_object

    def _cut_call(self) -> None:
        if self._name is None:
            self._no_call()
        elif not self._has_started:
            self._start_call(self._name)

    def _begin_object(self) -> bool:
        return self._go({"{": self._read_key})

    def _read_key(self) -> bool:
        steps: dict[str, Step] = {}
        if self._name is None:
            steps[_NAME] = lambda: self._go({":": lambda: self._go(self._names)})
        if not (self._has_started or self._early):
            steps[_ARGUMENTS] = lambda: self._go({":": lambda: self._go({"{": self._begin_value})})
        return self._go(steps)

    def _take_name(self, name: str) -> bool:
        self._name, self._step = name, self._end_value
        if self._early:
            self._begin_arguments()
            self._add_arguments("".join(self._early))
        return True

    def _begin_arguments(self) -> None:
        assert self._name is not None, "arguments of a call without a name"
        self._has_started = True
        self._start_call(self._name)

    def _begin_value(self) -> bool:
        self._end, self._step = JsonEnd(), self._read_value
        self._end.length("{")
        if self._name is not None:
            self._begin_arguments()
            self._add_arguments("{")
        else:
            self._early = ["{"]
        return True

    def _read_value(self) -> bool:
        text = self._scanner.take_value(self._end)
        if self._has_started:
            self._add_arguments(text)
        else:
            self._early.append(text)
            self._raw.append(text)
        if self._end.is_over:
            self._step = self._end_value
        return self._end.is_over

    def _end_value(self) -> bool:
        return self._go({",": self._read_key, "}": self._end_object})

    def _end_object(self) -> bool:
        if self._name is None:
            return self._no_call()
        if not self._has_started:
            self._begin_arguments()
            self._add_arguments("{}")
        self._step = lambda: self._close(_END)
        return True
