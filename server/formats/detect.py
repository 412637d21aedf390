"""Which format a model writes is found out from its chat template, by the marks that the template itself writes."""

from __future__ import annotations

from collections.abc import Mapping

from engine.errors import ModelError
from server.formats.base import ChatFormat, ReasoningMarks
from server.formats.deepseek import DeepSeekFormat
from server.formats.gemma import GemmaFormat
from server.formats.harmony import HarmonyFormat
from server.formats.hermes import HermesFormat
from server.formats.llama import LlamaFormat
from server.formats.mistral import MistralFormat
from server.formats.reasoning import PlainFormat
from server.formats.tagged import GlmFormat, QwenCoderFormat

_DEEPSEEK_CALLS = "<\uff5ctool▁calls▁begin\uff5c>"


# Some contain the marks of others, so the order counts.
_MARKS = (
    ("harmony", ("<|channel|>", "<|message|>")),
    ("deepseek", (_DEEPSEEK_CALLS,)),
    ("gemma", ("<|tool_call>", "<tool_call|>")),
    ("gemma", ("<start_function_call>",)),
    ("mistral", ("[TOOL_CALLS]",)),
    ("glm", ("<tool_call>", "<arg_key>")),
    ("qwen_coder", ("<tool_call>", "<function=", "<parameter=")),
    ("hermes", ("<tool_call>", "</tool_call>")),
    ("llama", ("<|start_header_id|>", '"parameters": ')),
)

# By what shows which marks a template writes.
_REASONING = {
    "<|channel>": ReasoningMarks("<|channel>thought", "<channel|>"),
    "</think>": ReasoningMarks("<think>", "</think>"),
    "[/THINK]": ReasoningMarks("[THINK]", "[/THINK]"),
}

# Of the families that have several: the first mark that the template contains shows which.
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
    """Return the format of a checkpoint with this chat template; `override` names it if the template does not show it.

    `special_tokens` are the ids of all tokens that were added to its tokenizer, by their texts. Raises ModelError if no
    format has this name.
    """
    text = template or ""
    name = override or next((name for name, marks in _MARKS if all(mark in text for mark in marks)), "plain")
    if name not in FORMATS:
        raise ModelError(f"the chat format is {name!r}; expected one of {', '.join(FORMATS)}")
    if FORMATS[name] is HarmonyFormat:
        return HarmonyFormat(special_tokens)  # has marks of its own
    reasoning = next((marks for mark, marks in _REASONING.items() if mark in text), None)
    variant = next((variant for mark, variant in _VARIANTS.get(name, {}).items() if mark in text), "")
    return FORMATS[name](special_tokens, reasoning, variant)
