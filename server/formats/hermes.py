r"""Calls of Hermes 2 Pro, Qwen 2.5 and Qwen 3: a JSON object with name and arguments between two markers.

`<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>`, one after another.
"""

from __future__ import annotations

import json
import re

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

    def _sequence(self, *, several: bool) -> str:
        one = f'"\\n" call "}}\\n" {self.literal(_END)}'
        return f'{one} ("\\n" {self.literal(_BEGIN)} {one})*' if several else one

    def _call(self, tool: Tool, shared: dict[str, str]) -> str:
        """Return the call as the chat templates write it, with the name first, so that arguments can be streamed."""
        head = f'{{"name": {json.dumps(tool.name, ensure_ascii=False)}, "arguments": '
        return f"{quoted(head)} {arguments_rule(tool)}"
