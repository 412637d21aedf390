"""Llama 3: the whole answer is a call."""

from __future__ import annotations

import json

import pytest

from pilotfish.engine.text.guided import json_rule
from pilotfish.server.formats.base import ReasoningMarks, Tool
from pilotfish.server.formats.json_calls import LlamaFormat
from tests.schemas import Schema
from tests.server.formats.laws import FREE, SCHEMAS, Calls, Family, Spelling, called, dumped, some_calls
from tests.server.formats.walks import Masks, plain_masks

TAG = "<|python_tag|>"
TOKENS = Masks({TAG: True, "<|eom_id|>": True})


def write(calls: Calls) -> str:
    """As the chat templates write calls."""
    return "; ".join(f'{{"name": "{name}", "parameters": {dumped(given)}}}' for name, given in calls)


def write_tagged(calls: Calls) -> str:
    """As some checkpoints write calls."""
    return TAG + write(calls)


A, ONE = '{"a": 1}', write([("get", {"a": 1})])
LLAMA = Family(
    name="llama",
    spellings=(
        Spelling(
            "llama",
            LlamaFormat(TOKENS.ids, ReasoningMarks()),
            TOKENS,
            write,
            some_calls("; ", "{", '{"name": "get"'),
            TAG,
        ),
        Spelling("llama-text", LlamaFormat({}, ReasoningMarks()), plain_masks(), write_tagged, some_calls(TAG)),
    ),
    is_text_free=False,
    readings={
        f"\n {TAG} {ONE}": called(A),
        '{"name": "get", "arguments": {"a": 1}}': called(A),
        '{"type": "function", "name": "get", "parameters": {"a": 1}, "id": null}\n': called(A),
        '{ "name" : "get" ,\n"parameters" : {"a": 1} }<|eom_id|>': called(A),
        f"{ONE}; {ONE}\n{ONE}{ONE}": called(A, A, A, A),
        f"{ONE}; Bye": called(A, content="; Bye"),
        f"{ONE[:-1]}; {ONE}}}; {ONE}": called(A, A, A),
        **{
            f"{ONE}; {broken}; {ONE}": called(A, A, content=f"; {broken}")
            for broken in (ONE.replace("1}", '"x}'), ONE.replace("1", ""), ONE.replace("{", "", 1))
        },
    },
    cut=dict.fromkeys((ONE[:-3], ONE[:10], f"{TAG}{{"), called()),
    contents=(
        '{"a": 1}',
        '{"name": "other", "parameters": {}}',
        '{"name": "get", "size": 3}',
        '[{"name": "get", "parameters": {}}]',
        '{"name": "get_y", "parameters": {}}',
        "\n",
        "{",
        f"{TAG}print(1)",
    ),
    broken=('{"name": "get", "size": 3}', '{"parameters": 3, "name": "get"', f"{TAG}print(1)"),
    hostile=('{"name": "get", "parameters": {}',),
    repeated=(f"{ONE}; ", '{"name": "get", ', f"{TAG}{ONE}x", '{"id": "', '{"name":'),
)


@pytest.mark.parametrize(
    "text", ['{"a": 1}', '{"name": "other", "parameters": 3}', f'{TAG}{{"name": "get", "parameters": {{}}}}']
)
def test_an_object_without_a_call_is_allowed_and_a_call_after_the_tag(text: str) -> None:
    assert LLAMA.first.allows("auto", FREE, text)


@pytest.mark.parametrize("names", [{}, {"name": {"type": "string"}}])
def test_content_of_a_schema_may_stand_in_the_place_of_calls(names: Schema) -> None:
    content = json_rule(json.dumps({"type": "object", "properties": names}))
    calls = LLAMA.first.format.calls([Tool("get", parameters=json.dumps(SCHEMAS[0]))], several=True)
    rules = f"start: content | calls\ncontent: {content}\n{calls}"
    assert TOKENS.accepts(rules, '{"name": "getter"}')
    assert TOKENS.accepts(rules, '{"name": "get", "parameters": {"of": {}}}; {"name": "get", "parameters": {}}')
    assert not TOKENS.accepts(rules, '{"name": "get", "parameters": {}}; {"name": "get", "parameters": {"x": 1}}')
