"""Detects the format of a model by the markers in its chat template."""

from __future__ import annotations

from collections.abc import Mapping

from pilotfish.engine.errors import ModelError
from pilotfish.server.formats.base import ChatFormat, ReasoningMarks
from pilotfish.server.formats.deepseek import DeepSeekFormat
from pilotfish.server.formats.gemma import GemmaFormat
from pilotfish.server.formats.harmony import HarmonyFormat
from pilotfish.server.formats.json_calls import HermesFormat, LlamaFormat, MistralFormat
from pilotfish.server.formats.reasoning import PlainFormat
from pilotfish.server.formats.tagged import GlmFormat, QwenCoderFormat

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
        *(PlainFormat, HermesFormat, QwenCoderFormat, GlmFormat, LlamaFormat),
        *(MistralFormat, GemmaFormat, DeepSeekFormat, HarmonyFormat),
    )
}


def detect(template: str | None, special_tokens: Mapping[str, int], override: str | None = None) -> ChatFormat:
    """Return the format of a checkpoint with this chat template, or the one named `override`.

    `special_tokens`: the ids of all tokens that were added to its tokenizer, by text. Raises ModelError for an unknown
    name.
    """
    text = template or ""
    name = override or next((name for name, marks in _MARKS if all(mark in text for mark in marks)), "plain")
    if name not in FORMATS:
        raise ModelError(f"the chat format is {name!r}; expected one of {', '.join(FORMATS)}")
    reasoning = next((marks for mark, marks in _REASONING.items() if mark in text), None)
    variant = next((variant for mark, variant in _VARIANTS.get(name, {}).items() if mark in text), "")
    return FORMATS[name](special_tokens, reasoning, variant)
