"""Detects the format of a model by its chat template: by markers in it, and by what it renders."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

from pilotfish.engine.errors import InvalidRequest, ModelError
from pilotfish.server.formats.base import ChatFormat, ReasoningMarks, Tool, Turn
from pilotfish.server.formats.deepseek import DeepSeekFormat
from pilotfish.server.formats.gemma import GemmaFormat
from pilotfish.server.formats.generic import GenericFormat
from pilotfish.server.formats.harmony import HarmonyFormat
from pilotfish.server.formats.json_calls import HermesFormat, LlamaFormat, MistralFormat
from pilotfish.server.formats.tagged import GlmFormat, QwenCoderFormat


class Template(Protocol):
    """A chat template, with its text; it raises InvalidRequest for a conversation that it cannot render."""

    source: str

    def render(self, messages: Iterable[Turn], tools: Iterable[Tool] = ..., /) -> str: ...


# Some contain the markers of others, so the order matters.
_MARKS = (
    ("harmony", ("<|channel|>", "<|message|>")),
    ("deepseek", (DeepSeekFormat.trigger,)),
    ("gemma", ("<|tool_call>", "<tool_call|>")),
    ("gemma", ("<start_function_call>",)),
    ("mistral", ("[TOOL_CALLS]",)),
    ("glm", ("<tool_call>", "<arg_key>")),
    ("qwen_coder", ("<tool_call>", "<function=", "<parameter=")),
    ("hermes", ("<tool_call>", "</tool_call>")),
    ("llama", ("<|start_header_id|>", '"parameters": ')),
)

# By the text by which each is detected.
_REASONING = {
    "<|channel>": ReasoningMarks("<|channel>thought", "<channel|>"),
    "</think>": ReasoningMarks("<think>", "</think>"),
    "[/THINK]": ReasoningMarks("[THINK]", "[/THINK]"),
}

# Of families with several variants: the first text that the template contains selects one.
_VARIANTS = {
    "deepseek": {"```json": "v3"},
    "gemma": {"<start_function_call>": "functiongemma", "": "gemma4"},
    "mistral": {"[CALL_ID]": "v11", "[ARGS]": "v13", "": "v3"},
}

FORMATS: dict[str, type[ChatFormat]] = {
    kind.name: kind
    for kind in (
        *(GenericFormat, HermesFormat, QwenCoderFormat, GlmFormat, LlamaFormat),
        *(MistralFormat, GemmaFormat, DeepSeekFormat, HarmonyFormat),
    )
}

# The conversation with which templates are tried. Some refuse ids other than nine letters and digits.
_TOOL, _PLACE, _RESULT = Tool("probed_function"), "probed place", "probed result"
_ASKED: list[Turn] = [{"role": "user", "content": "Hello"}]


def _answered(num_calls: int) -> list[Turn]:
    """Return a conversation with a turn of calls, and their results."""
    ids = [f"probe000{i}" for i in range(num_calls)]
    functions = [{"name": _TOOL.name, "arguments": {"place": f"{_PLACE} {i}"}} for i in range(num_calls)]
    calls = [{"id": i, "type": "function", "function": one} for i, one in zip(ids, functions, strict=True)]
    results = ({"role": "tool", "content": _RESULT, "name": _TOOL.name, "tool_call_id": i} for i in ids)
    return [*_ASKED, {"role": "assistant", "content": "", "tool_calls": calls}, *results]


def detect(template: Template, special_tokens: Mapping[str, int], override: str | None = None) -> ChatFormat:
    """Return the format of a checkpoint with this chat template, or the one named `override`.

    It is the generic one if the template does not render tools, or if its notation of calls is unknown.

    Args:
        template: the chat template.
        special_tokens: the ids of all tokens that were added to the checkpoint's tokenizer, by text.
        override: the name of a format.

    Raises:
        ModelError: the name is unknown, or the template renders no functions and the format needs them.
    """
    if override is not None and override not in FORMATS:
        raise ModelError(f"the chat format is {override!r}; expected one of {', '.join(FORMATS)}")
    has_functions = _renders(template, _ASKED, [_TOOL], _TOOL.name)
    if override not in (None, GenericFormat.name, HermesFormat.name) and not has_functions:
        problem = "the chat template renders no functions (options chat_template and chat_format)"
        raise ModelError(f"the chat format is {override!r}, and {problem}")
    has_tools = has_functions and (override is not None or _renders(template, _answered(1), [_TOOL], _RESULT, _PLACE))
    name = override if has_tools else GenericFormat.name
    found = format_in(template.source, special_tokens, name, _place(template))
    found.calls_alone = has_tools and not _renders(template, _answered(2), [_TOOL], _RESULT, f"{_PLACE} 1")
    return found


def format_in(
    text: str, special_tokens: Mapping[str, int], name: str | None = None, place: str = "system"
) -> ChatFormat:
    """Return the format, or the one with this name, whose markers the text of a template has; else the generic one.

    `place`: the variant of the generic one.
    """
    name = name or next((name for name, marks in _MARKS if all(mark in text for mark in marks)), GenericFormat.name)
    reasoning = next((marks for mark, marks in _REASONING.items() if mark in text), None)
    variants = {"": place} if name == GenericFormat.name else _VARIANTS.get(name, {})
    variant = next((variant for mark, variant in variants.items() if mark in text), "")
    return FORMATS[name](special_tokens, reasoning, variant)


def _place(template: Template) -> str:
    """Return the variant of the generic format that reaches the model."""
    return "system" if _renders(template, *GenericFormat().rendered(_ASKED, [_TOOL]), _TOOL.name) else "user"


def _renders(template: Template, turns: Iterable[Turn], tools: Iterable[Tool], *texts: str) -> bool:
    """Whether these texts are in what the template writes of a conversation."""
    try:
        written = template.render(turns, tools)
    except InvalidRequest:
        return False
    return all(text in written for text in texts)
