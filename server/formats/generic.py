"""The generic form of tools, for chat templates that render none: functions, calls and results are text of turns."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from pilotfish.server.formats.base import Tool, Turn
from pilotfish.server.formats.json_calls import HermesFormat

_BEFORE = "You can call these functions:\n<tools>"
_AFTER = """</tools>
To call one, answer with a JSON object of its name and arguments:
<tool_call>
{"name": "<function>", "arguments": {"<parameter>": <value>}}
</tool_call>
Several calls follow one another. Their results are in the next message, each between <tool_response> and
</tool_response>; then answer. If no function helps, answer without a call."""


class GenericFormat(HermesFormat):
    """The format of Hermes, for a chat template that renders no tools. The variants are the turn with the functions.

    system: the system message, which is added if there is none. user: the first turn of the user, for templates that
    refuse or drop a system message.
    """

    name = "generic"
    newest = "system"
    is_guided = True

    def rendered(self, turns: Iterable[Turn], tools: Sequence[Tool]) -> tuple[Iterable[Turn], Sequence[Tool]]:
        """Return turns that have these functions, calls and results as text, and no functions.

        Results become a turn of the user, joined with the user's turn after it, so that roles alternate.
        """
        found, has_results = list[Turn](), False  # whether the last turn has results
        for turn in turns:
            is_result, written = turn["role"] == "tool", _as_text(turn)
            if has_results and written["role"] == "user":
                found[-1] = _joined(found[-1], written, "\n" if is_result else "\n\n")
            else:
                found.append(written)
            has_results = is_result or (has_results and written["role"] == "user")
        return self._with_functions(found, tools) if tools else found, ()

    def _with_functions(self, turns: list[Turn], tools: Sequence[Tool]) -> list[Turn]:
        declared = (json.dumps(tool.declaration, ensure_ascii=False) for tool in tools)
        functions = "\n".join([_BEFORE, *declared, _AFTER])
        at = next((i for i, turn in enumerate(turns) if turn["role"] == self._variant), None)
        if at is None or (at and self._variant == "system"):  # a later one is not at the beginning of the prompt
            return [{"role": self._variant, "content": functions}, *turns]
        if self._variant == "system":
            merged = _joined(turns[at], {"content": functions}, "\n\n")
        else:
            merged = turns[at] | {"content": f"{functions}\n\n{turns[at]['content']}"}
        return [*turns[:at], merged, *turns[at + 1 :]]


def _as_text(turn: Turn) -> Turn:
    """Return a turn with its calls as text, and a result as a turn of the user."""
    if turn["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{turn['content']}\n</tool_response>"}
    if not turn.get("tool_calls"):
        return turn
    calls = "\n".join(_written(call["function"]) for call in turn["tool_calls"])
    content = f"{turn['content']}\n{calls}" if turn["content"] else calls
    return {key: value for key, value in turn.items() if key != "tool_calls"} | {"content": content}


def _joined(first: Turn, second: Turn, between: str) -> Turn:
    return first | {"content": f"{first['content']}{between}{second['content']}"}


def _written(function: dict[str, Any]) -> str:
    """Return a call as the rules of `HermesFormat` have it."""
    call = {"name": function["name"], "arguments": function["arguments"]}
    return f"<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>"
