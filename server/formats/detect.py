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

_REASONING = (ReasoningMarks("<think>", "</think>"), ReasoningMarks("[THINK]", "[/THINK]"))
_GEMMA_REASONING = ReasoningMarks("<|channel>thought", "<channel|>")
_DEEPSEEK_CALLS = "<\uff5ctool▁calls▁begin\uff5c>"


def detect(template: str | None, special_tokens: Mapping[str, int], override: str | None = None) -> ChatFormat:
    """Return the format of a checkpoint with this chat template; `override` names it if the template does not show it.

    `special_tokens` are the ids of all tokens that were added to its tokenizer, by their texts. Raises ModelError if no
    format has this name.
    """
    text = template or ""
    if override is not None and override not in FORMATS:
        raise ModelError(f"the chat format is {override!r}; expected one of {', '.join(FORMATS)}")
    return _make(FORMATS[override or _family(text)], text, special_tokens, _reasoning(text))


def _family(template: str) -> str:
    """The name of the first family all of whose marks the template contains."""
    return next((name for name, marks in _MARKS if all(mark in template for mark in marks)), "plain")


def _reasoning(template: str) -> ReasoningMarks | None:
    if "<|channel>" in template:
        return _GEMMA_REASONING
    return next((marks for marks in _REASONING if marks.end in template), None)


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


def _make(
    kind: type[ChatFormat], template: str, special: Mapping[str, int], reasoning: ReasoningMarks | None
) -> ChatFormat:
    if kind is HarmonyFormat:
        return HarmonyFormat(special)  # has marks of its own
    marks = _VARIANTS.get(kind.name, {})
    return kind(special, reasoning, next((variant for mark, variant in marks.items() if mark in template), ""))
