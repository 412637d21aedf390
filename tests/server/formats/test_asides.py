"""What of an output is no answer, in each format: there no stop string is found."""

from __future__ import annotations

import pytest

from pilotfish.engine.text.stops import StopSearch, StopStrings
from pilotfish.server.formats.base import ReasoningMarks, Tool
from pilotfish.server.formats.detect import FORMATS

TOOLS = [Tool("f")]
THOUGHT = "<think>\nreason</think>\n\n"
HARMONY = "<|channel|>analysis<|message|>reason<|end|><|start|>assistant"
CASES = [  # a format, an output, what is found in it and what is not
    ("plain", f"{THOUGHT}answer", "answer", ["reason", "think", "\n"]),
    ("hermes", f'{THOUGHT}answer<tool_call>\n{{"name": "f"}}', "answer", ["reason", "<", "name", "\n"]),
    ("qwen_coder", "answer<tool_call>\n<function=f>", "answer", ["<", "function", "\n"]),
    ("glm", f"{THOUGHT}answer<tool_call>f\n", "answer", ["<", "f", "\n"]),
    ("mistral", 'answer[TOOL_CALLS] [{"name": "f"}]', "answer", ["[", "name"]),
    ("deepseek", "answer<\uff5ctool▁calls▁begin\uff5c><\uff5ctool▁call▁begin\uff5c>f", "answer", ["<", "f", "tool"]),
    ("gemma", "answer<|tool_call>call:f{}", "answer", ["<", "call", "{"]),
    ("llama", '{"name": "f", "parameters": {"x": 1}}', None, ["{", "name", "x"]),
    ("llama", '<|python_tag|>{"name": "f"}', None, ["<", "name"]),
    ("llama", '{"name": "Ada"}', "Ada", []),
    (
        "harmony",
        f"{HARMONY}<|channel|>final<|message|>answer<|return|>",
        "answer",
        ["reason", "final", "assistant", "<"],
    ),
    (
        "harmony",
        f'{HARMONY}<|channel|>commentary to=functions.f <|constrain|>json<|message|>{{"x": 1}}',
        None,
        ["x", "f"],
    ),
    ("harmony", "<|channel|>final<|message|>answer", "answer", ["<", "final"]),
]


@pytest.mark.parametrize(
    ("name", "text", "told", "hidden"), CASES, ids=[f"{i}-{case[0]}" for i, case in enumerate(CASES)]
)
def test_only_the_answer_is_searched(name: str, text: str, told: str | None, hidden: list[str]) -> None:
    asides = FORMATS[name]({}, None if name == "harmony" else ReasoningMarks()).asides(TOOLS)
    for stop in (told or "answer", *hidden):
        search = StopSearch(StopStrings([stop]), asides)
        found = [found for char in text if (found := search.read(char, counts=True))]
        assert bool(found or search.end()) == (stop == told), stop
