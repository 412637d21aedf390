"""The structure of an answer: what a reader finds in a text that it allows."""

from __future__ import annotations

import json

import pytest

from pilotfish.engine.params import Guided
from pilotfish.server.formats.base import Content, Reasoning, ReasoningMarks, Tool
from pilotfish.server.formats.deepseek import DeepSeekFormat
from pilotfish.server.formats.gemma import GemmaFormat
from pilotfish.server.formats.harmony import HarmonyFormat
from pilotfish.server.formats.json_calls import MistralFormat
from pilotfish.server.formats.reasoning import PlainFormat
from pilotfish.server.formats.structure import Answer, structure_of
from tests.server.formats.walks import Masks, markers_of

MASKS = Masks({"<think>": False, "</think>": False})
INTEGER = Guided(json_schema=json.dumps({"type": "integer"}))
END = MASKS.ids["</think>"]


def encoded(text):
    """The ordinary tokens of a text, also where it has the text of an added token."""
    return [token for char in text for token in MASKS.tokenizer.encode(char, add_special_tokens=False).ids]


@pytest.mark.parametrize("starts_in_reasoning", [True, False])
def test_other_tokens_do_not_spell_the_end_of_the_reasoning(starts_in_reasoning):
    """A reader would end the reasoning there, and find content without its structure."""
    chat_format = PlainFormat(MASKS.ids, ReasoningMarks())
    guided = structure_of(Answer(content=INTEGER, starts_in_reasoning=starts_in_reasoning), chat_format)
    begin = [] if starts_in_reasoning else [MASKS.ids["<think>"]]
    spelled = encoded("a</think> poem")
    matcher = MASKS.matcher(guided.grammar)
    assert matcher.try_consume_tokens([*begin, *spelled]) < len(begin) + len(encoded("a</think>"))
    whole = MASKS.matcher(guided.grammar)
    text = [*begin, *encoded("a</thin"), END, *encoded("5")]
    assert whole.try_consume_tokens(text) == len(text)
    assert whole.is_accepting()
    parser = chat_format.parser((), starts_in_reasoning=True)
    pieces = [*parser.push("a</thin</think>5"), *parser.finish()]
    assert "".join(p.text for p in pieces if isinstance(p, Reasoning)) == "a</thin"
    assert "".join(p.text for p in pieces if isinstance(p, Content)) == "5"


OF_TOKENS = {
    "mistral": (MistralFormat, {"variant": "v13"}),
    "gemma": (GemmaFormat, {"variant": "gemma4"}),
    "deepseek": (DeepSeekFormat, {"variant": "v3.1"}),
    "harmony": (HarmonyFormat, {}),
}


@pytest.mark.parametrize("name", OF_TOKENS)
def test_other_tokens_do_not_spell_what_begins_a_call(name):
    """A reader would find a call there, whose arguments have no structure."""
    kind, variant = OF_TOKENS[name]
    masks = Masks(dict.fromkeys(markers_of(kind), True))
    chat_format = kind(masks.ids, **variant)
    guided = structure_of(Answer(tools=(Tool("f", strict=True),)), chat_format)
    begin = masks.tokenizer.encode("<|channel|>final<|message|>", add_special_tokens=False).ids
    begin = begin if name == "harmony" else []
    trigger = "<|channel|>" if name == "harmony" else chat_format.trigger
    text = [*begin, *encoded("text ")]
    assert masks.matcher(guided.grammar).try_consume_tokens(text) == len(text)
    spelled = [*text, *encoded(trigger)]
    assert masks.matcher(guided.grammar).try_consume_tokens(spelled) < len(spelled)
