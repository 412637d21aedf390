"""Conversations over gRPC: what the template is given, what the answer may be, and what is refused by name."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import pytest_asyncio

from pilotfish.client import InvalidRequestError
from pilotfish.engine.text.codec import Codec
from pilotfish.models import embedded_target
from pilotfish.server.chat import ChatTemplate
from pilotfish.server.formats.base import ReasoningMarks
from pilotfish.server.formats.generic import GenericFormat
from pilotfish.server.formats.json_calls import HermesFormat, LlamaFormat
from pilotfish.server.formats.tagged import QwenCoderFormat
from tests.server.fake_engine import FakeEngine
from tests.serving import grpc_client, serving, serving_embedded

CODEC = Codec.load(embedded_target())
DAYS = {
    "type": "object",
    "properties": {"days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["days"],
    "additionalProperties": False,
}
TOOL = {"name": "weather", "description": "for some days", "parameters": DAYS}
ASKED = [{"role": "user", "content": "What will the weather be?"}]
UNSERVED = {"type": "object", "properties": {"a": {"not": {"type": "string"}}}}  # the library has no `not`
NOT_WRITTEN = {"type": "object", "properties": {"a": {"enum": ["\u0001"]}}}  # no output may have a control character

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server():
    async with serving_embedded() as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(server):
    async with grpc_client(server) as connected:
        yield connected


@pytest.mark.parametrize("choice", ["required", "weather"])
async def test_a_required_call_has_the_format_and_the_schema(client, choice):
    tools = [{"name": "other", "parameters": DAYS}] * (choice == "weather") + [TOOL]
    done = await client.generate(ASKED, tools=tools, tool_choice=choice, parallel_tool_calls=False)
    start, end = '<tool_call>\n{"name": "weather", "arguments": ', "}\n</tool_call>"
    assert done.text.startswith(start)
    assert done.text.endswith(end)
    assert 1 <= json.loads(done.text[len(start) : -len(end)])["days"] <= 9
    assert done.finished.finish_reason == "stop"


async def test_tokens_of_the_prompt_are_those_of_the_template(client):
    turns = [*ASKED, {"role": "assistant", "tool_calls": [{"id": "c1", "name": "weather", "arguments": '{"days": 2}'}]}]
    turns.append({"role": "tool", "content": "sun", "tool_call_id": "c1"})
    done = await client.generate(turns, max_tokens=1, prompt_token_ids=True)
    text = CODEC.decode(done.prompt_token_ids)
    assert '{"name": "weather", "arguments": {"days": 2}}' in text
    assert "<tool_response>\nsun\n</tool_response>" in text
    assert text.endswith("<|im_start|>assistant\n")
    events = [event async for event in client.stream(turns, max_tokens=1, prompt_token_ids=True)]
    assert events[0].prompt_token_ids == done.prompt_token_ids
    assert all(event.prompt_token_ids is None for event in events[1:] if hasattr(event, "prompt_token_ids"))


async def test_the_last_message_is_continued(client):
    turns = [*ASKED, {"role": "assistant", "content": "It will "}]
    done = await client.generate(turns, max_tokens=1, prompt_token_ids=True, continue_final_message=True)
    assert CODEC.decode(done.prompt_token_ids).endswith("<|im_start|>assistant\nIt will ")
    closed = await client.generate(turns, max_tokens=1, prompt_token_ids=True, add_generation_prompt=False)
    assert CODEC.decode(closed.prompt_token_ids).endswith("It will <|im_end|>\n")


async def test_a_structure_of_the_content_leaves_calls_open(client):
    done = await client.generate(ASKED, tools=[TOOL], regex="[ab]{3}", seed=1, max_tokens=60)
    assert done.text.startswith("<tool_call>") or len(done.text) == 3
    done = await client.generate(ASKED, tools=[TOOL], tool_choice="none", regex="[ab]{3}")
    assert len(done.text) == 3


@pytest.mark.parametrize("schema", [UNSERVED, NOT_WRITTEN], ids=["unserved", "not written"])
async def test_a_schema_that_cannot_be_a_structure_lets_a_call_have_any_object(client, schema):
    """Nothing depends on it where no structure is asked for. Of a strict tool it is refused, see `REFUSED`."""
    wrong = {"name": "f", "parameters": schema}
    assert (await client.generate(ASKED, tools=[wrong], max_tokens=3)).token_ids
    done = await client.generate(ASKED, tools=[wrong], tool_choice="required", max_tokens=30)
    assert done.text.startswith('<tool_call>\n{"name": "f", "arguments": {')


def strict(schema):
    return {"name": "f", "parameters": schema, "strict": True}


REFUSED = {
    "strict": ({"tools": [TOOL, strict(UNSERVED)], "tool_choice": "required"}, r"tools\[1\]\.parameters is .*not"),
    "named": ({"tools": [TOOL, strict(UNSERVED)], "tool_choice": "f"}, r"messages\.tools\[1\]\.parameters is .*not"),
    "not written": ({"tools": [strict(NOT_WRITTEN)]}, r"messages\.tools\[0\]\.parameters is .*control character"),
    "not written, named": (
        {"tools": [TOOL, strict(NOT_WRITTEN)], "tool_choice": "f"}, r"messages\.tools\[1\]\.parameters is .*control"
    ),
    "content": ({"tools": [TOOL], "json_schema": NOT_WRITTEN}, r"guided\.json_schema is .*control character"),
    "large content": (
        {"tools": [TOOL], "json_schema": {"enum": ["x" * 70_000]}},
        r"guided\.json_schema has 7\d+ bytes; the limit is 65536",
    ),
    "no choice": ({"tools": [TOOL], "choice": []}, r"guided\.choice has 0 texts"),
    # JSON can name half of a character, and text cannot be encoded with it.
    "surrogate": (
        {"tools": [{"name": "f", "parameters": {"description": "\ud800"}}]},
        "messages contain an unpaired surrogate",
    ),
    "unknown name": ({"tools": [TOOL], "tool_choice": "other"}, r"messages\.tool_choice\.name is 'other'"),
    "required without tools": ({"tool_choice": "required"}, r"messages\.tool_choice\.mode requires a call"),
    "twice": ({"tools": [TOOL, TOOL]}, r"messages\.tools\[1\]\.name is 'weather', which occurs twice"),
    "name": ({"tools": [TOOL | {"name": "a b"}]}, r"messages\.tools\[0\]\.name is 'a b'"),
    "no schema": ({"tools": [TOOL | {"parameters": "[]"}]}, r"messages\.tools\[0\]\.parameters is '\[\]'"),
    "no JSON": ({"tools": [TOOL | {"parameters": "{"}]}, r"messages\.tools\[0\]\.parameters is '{', which is not"),
    "variables": ({"template_arguments": {"messages": 1}}, r"messages\.template_arguments has 'messages'"),
    "both": (
        {"continue_final_message": True, "add_generation_prompt": True}, r"messages\.add_generation_prompt is true"
    ),
    "budget": ({"thinking_budget": 3}, r"messages\.thinking_budget is 3; this model has no reasoning markers"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
async def test_what_is_wrong_is_named(client, name):
    options, problem = REFUSED[name]
    with pytest.raises(InvalidRequestError, match=problem):
        await client.generate(ASKED, **options)


@pytest.mark.parametrize(
    ("arguments", "given"),
    [
        *((text, {"INVALID_JSON": text}) for text in ('{"a": 2, "b', "null", "[1]", '{"a": NaN}', "\u00fc", "[" * 500)),
        *((text, {}) for text in ("", " \n")),
        (r'{"place": "C:\dir\ud800"}', {"place": "C:\\dir\ufffd"}),
    ],
)  # fmt: skip
async def test_arguments_of_earlier_calls_are_repaired_or_text(client, arguments, given):
    turns = [*ASKED, {"role": "assistant", "tool_calls": [{"name": "f", "arguments": arguments}]}]
    done = await client.generate(turns, max_tokens=1, prompt_token_ids=True)
    assert f'"arguments": {json.dumps(given, ensure_ascii=False)}}}' in CODEC.decode(done.prompt_token_ids)


async def test_predictions(client):
    source = "def add(a, b):\n    return a + b\n\n\ndef "
    plain = await client.generate(source, max_tokens=60, ignore_eos=True)
    done = await client.generate(source, max_tokens=60, ignore_eos=True, prediction=plain.text, speculation="fixed")
    assert done.token_ids == plain.token_ids
    assert done.finished.usage.accepted_prediction_tokens >= 55
    assert done.finished.speculation_stats.rounds <= 15
    assert plain.finished.usage.accepted_prediction_tokens == plain.finished.usage.rejected_prediction_tokens == 0
    ids = await client.generate(source, max_tokens=60, ignore_eos=True, prediction=[*plain.token_ids[:50], 7, 8, 9])
    assert ids.finished.usage.accepted_prediction_tokens == 50
    assert ids.finished.usage.rejected_prediction_tokens == 3
    with pytest.raises(InvalidRequestError, match=r"prediction\.token_ids\[0\] is 5000; expected 0 to 2047"):
        await client.generate(source, prediction=[5000])
    with pytest.raises(InvalidRequestError, match=r"prediction.* 1024"):
        await client.generate(source, prediction=[1] * 1025)


# ------------------------------------------------------------------------------------ models that reason, or do not


OPENED = "{% for m in messages %}{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}<think>\n{% endif %}"


async def test_reasoning_has_a_budget_and_structure_follows_it(server, client, monkeypatch):
    driver, reasoning_format = server.app.driver, HermesFormat({}, ReasoningMarks())
    reasoner = replace(driver.model, chat=ChatTemplate(OPENED, {}), format=reasoning_format)
    monkeypatch.setattr(driver, "model", reasoner)
    for how in ({}, {"regex": "[a-d]{5}"}, {"tools": [TOOL], "tool_choice": "required"}):
        asked = {"thinking_budget": 4, "max_tokens": 40} | how
        done = await client.generate(ASKED, **asked)
        assert done.starts_in_reasoning
        reasoning, _, answer = done.text.partition("</think>")
        assert len(CODEC.encode(reasoning)) <= 8
        if "regex" in how:
            assert len(answer.strip()) == 5
        if "tools" in how:
            assert answer.lstrip().startswith("<tool_call>")
        for speculation in ("off", "fixed"):
            same = await client.generate(ASKED, speculation=speculation, **asked)
            assert same.token_ids == done.token_ids
    turns = [*ASKED, {"role": "assistant", "content": "<think>so far"}]
    inside = await client.generate(turns, max_tokens=1, continue_final_message=True)
    assert inside.starts_in_reasoning
    turns[-1]["content"] += "</think>and"
    assert not (await client.generate(turns, max_tokens=1, continue_final_message=True)).starts_in_reasoning


async def test_tools_that_do_not_reach_the_model_are_refused():
    template = ChatTemplate("{% for m in messages %}<{{ m.role }}>{% endfor %}", {})
    async with serving(FakeEngine(), chat=template) as server, grpc_client(server) as client:
        with pytest.raises(InvalidRequestError, match=r"messages\.tools cannot be used: .* omits 'weather'"):
            await client.generate(ASKED, tools=[TOOL])
        assert (await client.generate(ASKED, tools=[TOOL], tool_choice="none", max_tokens=1)).token_ids


async def test_calls_in_the_generic_form_are_constrained_where_they_can_be(server, client, monkeypatch):
    driver, asked = server.app.driver, []
    model = driver.model

    async def compile_grammar(guided, received):
        asked.append(guided)
        await model.compile_grammar(guided, received)

    generic = GenericFormat(model.codec.added_tokens)
    monkeypatch.setattr(driver, "model", replace(model, format=generic, compile_grammar=compile_grammar))
    done = await client.generate(ASKED, tools=[TOOL], max_tokens=2, prompt_token_ids=True)
    assert "You can call these functions:\n<tools>\n" in CODEC.decode(done.prompt_token_ids)
    assert [guided.grammar.count("days") for guided in asked] == [1]
    assert (await client.generate(ASKED, tools=[TOOL], tool_choice="none", max_tokens=2)).token_ids
    assert (await client.generate(ASKED, tools=[TOOL], ignore_eos=True, max_tokens=2)).token_ids
    monkeypatch.setattr(model.engine, "config", model.engine.config.model_copy(update={"max_structure_bytes": 300}))
    assert (await client.generate(ASKED, tools=[TOOL], max_tokens=2)).token_ids
    assert len(asked) == 1
    with pytest.raises(InvalidRequestError, match="make a structure of"):
        await client.generate(ASKED, tools=[TOOL], tool_choice="required")


async def test_a_strict_schema_that_the_format_cannot_express_is_refused(server, client, monkeypatch):
    driver = server.app.driver
    monkeypatch.setattr(driver, "model", replace(driver.model, format=QwenCoderFormat({}, ReasoningMarks())))
    unwritten = {"type": "object", "minProperties": 1}
    with pytest.raises(InvalidRequestError, match=r"messages\.tools is not supported .*minProperties"):
        await client.generate(ASKED, tools=[strict(unwritten)], tool_choice="required")
    loose = {"name": "f", "parameters": unwritten}
    assert (await client.generate(ASKED, tools=[loose], tool_choice="required", max_tokens=3)).token_ids


async def test_the_format_is_that_of_the_template_unless_it_is_named(server):
    assert type(server.app.driver.model.format) is HermesFormat
    template = server.app.driver.model.chat
    async with serving(chat=template, chat_format="llama") as named:
        assert type(named.app.driver.model.format) is LlamaFormat
