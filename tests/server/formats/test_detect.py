"""The format of a checkpoint is found in what its chat template writes."""

from __future__ import annotations

import pytest

from pilotfish.server.formats.base import ReasoningMarks
from pilotfish.server.formats.deepseek import DeepSeekFormat
from pilotfish.server.formats.detect import FORMATS, detect
from pilotfish.server.formats.gemma import GemmaFormat
from pilotfish.server.formats.harmony import HarmonyFormat
from pilotfish.server.formats.json_calls import HermesFormat, LlamaFormat, MistralFormat
from pilotfish.server.formats.reasoning import PlainFormat
from pilotfish.server.formats.tagged import GlmFormat, QwenCoderFormat

THINK = ReasoningMarks("<think>", "</think>")
GEMMA = ReasoningMarks("<|channel>thought", "<channel|>")
CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
HERMES = CHATML + '<tool_call>\n{"name": "{{ call.name }}", "arguments": {{ call.arguments | tojson }}}\n</tool_call>'
LLAMA = "<|start_header_id|>ipython<|end_header_id|>" + '{"name": "{{ call.name }}", "parameters": {{ arguments }}}'
DEEPSEEK = "<\uff5ctool▁calls▁begin\uff5c><\uff5ctool▁call▁begin\uff5c>"


@pytest.mark.parametrize(
    ("template", "found", "reasoning"),
    [
        (None, PlainFormat, None),
        ("", PlainFormat, None),
        (CHATML, PlainFormat, None),
        (CHATML + "{{ '<think>\n' }}", PlainFormat, None),
        (CHATML + "{% if '</think>' in content %}", PlainFormat, THINK),
        (HERMES, HermesFormat, None),
        (HERMES + "<think>\n\n</think>\n\n", HermesFormat, THINK),
        (CHATML + "<tool_call>\n<function={{ f }}>\n<parameter={{ p }}>\n{{ v }}\n</parameter>", QwenCoderFormat, None),
        (CHATML + "<seed:tool_call><function={{ f }}><parameter={{ p }}></seed:tool_call>", PlainFormat, None),
        (CHATML + "<function={{ f }}>{{ arguments }}</function>", PlainFormat, None),
        ("<tool_call>{{ f }}\n<arg_key>{{ k }}</arg_key></tool_call><think></think>", GlmFormat, THINK),
        ("[TOOL_CALLS] [{{ call }}]", MistralFormat(variant="v3"), None),
        ("[TOOL_CALLS]{{ f }}[CALL_ID]{{ id }}[ARGS]", MistralFormat(variant="v11"), None),
        ("[TOOL_CALLS]{{ f }}[ARGS]", MistralFormat(variant="v13"), None),
        ("[TOOL_CALLS]{{ f }}[ARGS]{{ x }}[THINK][/THINK]", MistralFormat, ReasoningMarks("[THINK]", "[/THINK]")),
        (LLAMA, LlamaFormat, None),
        ("<|start_header_id|>user<|end_header_id|>", PlainFormat, None),
        ("<start_function_call>call:{{ f }}", GemmaFormat(variant="functiongemma"), None),
        ("<|tool_call>call:{{ f }}<tool_call|>", GemmaFormat(variant="gemma4"), None),
        ("<|tool_call>call:{{ f }}<tool_call|><|channel>thought\n<channel|>", GemmaFormat, GEMMA),
        ("<start_of_turn>user", PlainFormat, None),
        (DEEPSEEK + "function\n```json", DeepSeekFormat(variant="v3"), None),
        (DEEPSEEK, DeepSeekFormat(variant="v3.1"), None),
        (DEEPSEEK + "{% if '</think>' in content %}", DeepSeekFormat, THINK),
        ("<|start|>assistant<|channel|>final<|message|>", HarmonyFormat, HarmonyFormat().reasoning),
        ("<|tool_call_start|>[{{ calls }}]<|tool_call_end|>", PlainFormat, None),
    ],
)  # fmt: skip
def test_the_template_shows_the_family_and_the_variant(template, found, reasoning):
    detected = detect(template, {})
    assert type(detected) is (found if isinstance(found, type) else type(found))
    assert detected.reasoning == reasoning
    assert isinstance(found, type) or vars(detected) == vars(found) | {"reasoning": reasoning}


def test_tokens_are_those_of_the_tokenizer():
    found = detect(HERMES, {"<tool_call>": 7, "<|im_end|>": 8})
    assert found.literal("<tool_call>") == "<[7]>"
    assert found.literal("</tool_call>") == '"</tool_call>"'
    assert found.literal("a<|im_end|>\n<tool_call>") == '("a" <[8]> "\\n" <[7]>)'
    assert found.parser(())._dropped == ("<|im_end|>",)


@pytest.mark.parametrize("name", FORMATS)
def test_a_format_may_be_chosen_by_its_name(name):
    found = detect(CHATML + "</think>", {}, name)
    assert found.name == name
    assert type(found) is FORMATS[name]
    if name != "harmony":
        assert found.reasoning == THINK
