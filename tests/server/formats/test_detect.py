"""The format of a checkpoint is found in what its chat template writes."""

from __future__ import annotations

import pytest

from pilotfish.engine.errors import ModelError
from pilotfish.server.chat import ChatTemplate
from pilotfish.server.formats.base import ReasoningMarks
from pilotfish.server.formats.deepseek import DeepSeekFormat
from pilotfish.server.formats.detect import FORMATS, detect, format_in
from pilotfish.server.formats.gemma import GemmaFormat
from pilotfish.server.formats.generic import GenericFormat
from pilotfish.server.formats.harmony import HarmonyFormat
from pilotfish.server.formats.json_calls import HermesFormat, LlamaFormat, MistralFormat
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
        ("", GenericFormat, None),
        (CHATML, GenericFormat, None),
        (CHATML + "{{ '<think>\n' }}", GenericFormat, None),
        (CHATML + "{% if '</think>' in content %}", GenericFormat, THINK),
        (HERMES, HermesFormat, None),
        (HERMES + "<think>\n\n</think>\n\n", HermesFormat, THINK),
        (CHATML + "<tool_call>\n<function={{ f }}>\n<parameter={{ p }}>\n{{ v }}\n</parameter>", QwenCoderFormat, None),
        (CHATML + "<seed:tool_call><function={{ f }}><parameter={{ p }}></seed:tool_call>", GenericFormat, None),
        (CHATML + "<function={{ f }}>{{ arguments }}</function>", GenericFormat, None),
        ("<tool_call>{{ f }}\n<arg_key>{{ k }}</arg_key></tool_call><think></think>", GlmFormat, THINK),
        ("[TOOL_CALLS] [{{ call }}]", MistralFormat(variant="v3"), None),
        ("[TOOL_CALLS]{{ f }}[CALL_ID]{{ id }}[ARGS]", MistralFormat(variant="v11"), None),
        ("[TOOL_CALLS]{{ f }}[ARGS]", MistralFormat(variant="v13"), None),
        ("[TOOL_CALLS]{{ f }}[ARGS]{{ x }}[THINK][/THINK]", MistralFormat, ReasoningMarks("[THINK]", "[/THINK]")),
        (LLAMA, LlamaFormat, None),
        ("<|start_header_id|>user<|end_header_id|>", GenericFormat, None),
        ("<start_function_call>call:{{ f }}", GemmaFormat(variant="functiongemma"), None),
        ("<|tool_call>call:{{ f }}<tool_call|>", GemmaFormat(variant="gemma4"), None),
        ("<|tool_call>call:{{ f }}<tool_call|><|channel>thought\n<channel|>", GemmaFormat, GEMMA),
        ("<start_of_turn>user", GenericFormat, None),
        (DEEPSEEK + "function\n```json", DeepSeekFormat(variant="v3"), None),
        (DEEPSEEK, DeepSeekFormat(variant="v3.1"), None),
        (DEEPSEEK + "{% if '</think>' in content %}", DeepSeekFormat, THINK),
        ("<|start|>assistant<|channel|>final<|message|>", HarmonyFormat, HarmonyFormat().reasoning),
        ("<|tool_call_start|>[{{ calls }}]<|tool_call_end|>", GenericFormat, None),
    ],
)  # fmt: skip
def test_the_template_shows_the_family_and_the_variant(template, found, reasoning):
    detected = format_in(template, {})
    assert type(detected) is (found if isinstance(found, type) else type(found))
    assert detected.reasoning == reasoning
    assert isinstance(found, type) or vars(detected) == vars(found) | {"reasoning": reasoning}


def test_tokens_are_those_of_the_tokenizer():
    found = format_in(HERMES, {"<tool_call>": 7, "<|im_end|>": 8})
    assert found.literal("<tool_call>") == "<[7]>"
    assert found.literal("</tool_call>") == '"</tool_call>"'
    assert found.literal("a<|im_end|>\n<tool_call>") == '("a" <[8]> "\\n" <[7]>)'
    assert found.parser(())._dropped == ("<|im_end|>",)


TOOLS = "{% for t in tools or [] %}{{ t | tojson }}\n{% endfor %}"
HISTORY = """{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>{{ c | tojson }}</tool_call>{% endfor %}<|im_end|>
{% endfor %}"""
STRICT_ROLES = """{% for m in messages %}{% if m.role not in ("user", "assistant") %}{{ raise_exception("role") }}
{% endif %}{% if (m.role == "user") != (loop.index0 % 2 == 0) %}{{ raise_exception("turns") }}{% endif -%}
<{{ m.role }}>{{ m.content }}{% endfor %}"""
DROPS_SYSTEM = "{% for m in messages if m.role != 'system' %}<{{ m.role }}>{{ m.content }}{% endfor %}"


@pytest.mark.parametrize("name", FORMATS)
def test_a_format_may_be_chosen_by_its_name(name):
    found = detect(ChatTemplate(TOOLS + CHATML + "{# </think> #}", {}), {}, name)
    assert found.name == name
    assert type(found) is FORMATS[name]
    if name != "harmony":
        assert found.reasoning == THINK


@pytest.mark.parametrize(
    ("template", "found"),
    [
        (TOOLS + HISTORY, HermesFormat()),
        (CHATML, GenericFormat(variant="system")),
        (HISTORY, GenericFormat(variant="system")),  # calls, but no functions
        (TOOLS + CHATML + "{# <tool_call></tool_call> #}", GenericFormat(variant="system")),  # functions, but no calls
        (TOOLS + HISTORY.replace("tool_call>", "call>"), GenericFormat(variant="system")),  # calls of unknown notation
        (STRICT_ROLES, GenericFormat(variant="user")),
        (DROPS_SYSTEM, GenericFormat(variant="user")),
        ("{{ messages[0].role.no.such.name }}", GenericFormat(variant="user")),
    ],
)
def test_a_template_that_does_not_render_tools_gets_them_in_the_generic_form(template, found):
    detected = detect(ChatTemplate(template, {}), {})
    assert (type(detected), vars(detected)) == (type(found), vars(found) | {"calls_alone": False})


SINGLE = HISTORY.replace(
    "{% for c", "{% if (m.tool_calls or []) | length > 1 %}{{ raise_exception('one') }}{% endif %}{% for c"
)


def test_a_template_that_refuses_several_calls_in_a_turn_gets_them_one_by_one():
    assert not detect(ChatTemplate(TOOLS + HISTORY, {}), {}).calls_alone
    template = ChatTemplate(TOOLS + SINGLE, {})
    found = detect(template, {})
    assert (type(found), found.calls_alone) == (HermesFormat, True)
    first, second = ({"id": name, "function": {"name": name, "arguments": {}}} for name in "fg")
    asked, said = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Wait.", "reasoning": "Hm."}
    results = [{"role": "tool", "content": name, "tool_call_id": name} for name in "gf"]
    turns, _ = found.rendered([asked, said | {"tool_calls": [first, second]}, *results, asked], ())
    expected = [
        asked,
        said | {"tool_calls": [first]},
        results[1],
        {"role": "assistant", "content": "", "tool_calls": [second]},
        results[0],
        asked,
    ]
    assert [*turns] == expected
    assert template.render(expected)


def test_a_named_format_needs_a_template_with_functions():
    assert type(detect(ChatTemplate(CHATML, {}), {}, "hermes")) is GenericFormat
    with pytest.raises(ModelError, match="the chat format is 'llama', and the chat template renders no functions"):
        detect(ChatTemplate(CHATML, {}), {}, "llama")
    with pytest.raises(ModelError, match="the chat format is 'plain'; expected one of generic, hermes, "):
        detect(ChatTemplate(CHATML, {}), {}, "plain")
