r"""Calls of Hermes 2 Pro, Qwen 2.5 and Qwen 3: a JSON object with name and arguments between two marks.

`<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>`, one after another.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from server.formats.base import ChatFormat, Tool, arguments_rule, quoted
from server.formats.reasoning import Parser, Steps

_BEGIN, _END = "<tool_call>", "</tool_call>"


class _HermesParser(Parser):
    begins = (_BEGIN,)
    _end_of_broken = re.compile(_END)

    def _call(self, marker: str) -> Steps[bool]:
        yield from self._space()
        return (yield from self._json_call(_END))


class HermesFormat(ChatFormat):
    """JSON objects between `<tool_call>` and `</tool_call>`."""

    name = "hermes"
    reads = _HermesParser
    markers = (_BEGIN, _END)
    trigger = _BEGIN
    turns = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")

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
    return quoted(f'{{"name": {json.dumps(tool.name, ensure_ascii=False)}, "arguments": ')
