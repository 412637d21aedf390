"""What is peculiar to `/v1/responses`, as OpenAI's official client and Codex call it; `test_agents` has the rest."""

from __future__ import annotations

import json
import re

import openai
import pytest

from pilotfish.server.formats.reasoning import PlainFormat
from tests.server.fake_grammar import FakeCompiler
from tests.server.http.agents import (
    ASKED,
    DIALECTS,
    END_ID,
    PARTS,
    REASONING,
    SAID,
    prompt_of,
    say,
    talking,
    without_ids,
)
from tests.server.http.interfaces import on_the_shared_server

pytestmark = on_the_shared_server

RESPONSES = DIALECTS["responses"]
TOOL = RESPONSES.tool


async def test_the_official_client_reads_an_answer_and_its_stream(planning):
    fields = {"model": "fake", "input": "hi", "tools": [TOOL], "extra_body": {"stop_token_ids": [END_ID]}}
    made = await planning.client.responses.create(**fields)
    reasoning, message, call = made.output
    assert (made.output_text, call.name) == (SAID, "weather")
    assert len({made.id, message.id, reasoning.id, call.id, call.call_id}) == 5
    assert re.fullmatch("[0-9a-z]{9}", call.call_id), "some templates take no other ids"
    assert (made.incomplete_details, made.error, made.object) == (None, None, "response")
    async with planning.client.responses.stream(**fields) as stream:
        seen = [event async for event in stream]
        final = await stream.get_final_response()
    assert "".join(event.delta for event in seen if event.type == "response.output_text.delta") == SAID
    assert RESPONSES.parts(final.model_dump()) == PARTS


async def test_text_may_be_any_object():
    compiler = FakeCompiler()
    async with talking(model_format=PlainFormat(), compile_grammar=compiler) as server:
        await RESPONSES.answer(server, text={"format": {"type": "json_object"}})
        assert json.loads(compiler.asked[-1].json_schema) == {"type": "object"}


# ---------------------------------------------------------------------------------------------------- conversations


async def test_a_conversation_of_every_kind_of_item(saying):
    items = [
        {"role": "developer", "content": "be brief"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "one"}], "id": "msg_1"},
        {"role": "user", "content": "two"},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I", "annotations": []}]},
        {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"city": "Oslo"}', "id": "fc_1"},
        {"type": "function_call", "call_id": "c2", "name": "weather", "arguments": "{}", "status": "completed"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "cold"}]},
        {"type": "function_call_output", "call_id": "c1", "output": "warm"},
        {"role": "system", "content": "late"},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "sum"}], "encrypted_content": "gAAA"},
        {"role": "assistant", "content": "done"},
    ]
    await RESPONSES.answer(saying, input=items, instructions="you are it")
    one = '{"name": "weather", "arguments": {"city": "Oslo"}}'
    assert prompt_of(saying) == (
        "<system>you are it\n\nbe brief<user>one\n\ntwo"
        f'<assistant>(hm)I[c1 {one}][c2 {{"name": "weather", "arguments": {{}}}}]'
        "<tool c2 weather>cold<tool c1 weather>warm"
        "<user><system-reminder>\nlate\n</system-reminder>"
        "<assistant>(sum)done<go>"
    )


async def test_an_answer_can_be_sent_back_as_it_is(planning):
    made = await RESPONSES.answer(planning, tools=[TOOL], include=["reasoning.encrypted_content"])
    [call_id] = [item["call_id"] for item in made["output"] if item["type"] == "function_call"]
    result = {"type": "function_call_output", "call_id": call_id, "output": "cold"}
    history = [{"role": "user", "content": "hi"}, *made["output"], result]
    await RESPONSES.answer(planning, input=history)
    call = json.dumps({"name": "weather", "arguments": ASKED})
    said = f"<user>hi<assistant>({REASONING}){SAID}[{call_id} {call}]<tool {call_id} weather>cold<go>"
    assert prompt_of(planning) == said
    for item in history:
        item.pop("content") if item.get("type") == "reasoning" else None
    await RESPONSES.answer(planning, input=history)
    assert prompt_of(planning) == said, "reasoning comes back from encrypted_content, too"
    for item in history:
        item.pop("encrypted_content", None)
    await RESPONSES.answer(planning, input=history)
    assert prompt_of(planning) == said.replace(f"({REASONING})", "")


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"reasoning": {"effort": "high", "summary": "auto"}}, "[effort high]"),
        ({"reasoning": {"effort": "none"}}, "[enable_thinking False][effort none]"),
        ({"text": {"verbosity": "low"}}, "[verbosity low]"),
        ({"tools": [{"type": "web_search", "external_web_access": False}]}, ""),
    ],
    ids=["effort", "no effort", "verbosity", "a search of the web"],
)
async def test_template_variables_and_no_foreign_tools(saying, fields, said):
    await RESPONSES.answer(saying, **fields)
    assert prompt_of(saying) == f"{said}<user>hi<go>"


# ------------------------------------------------------------------------------------------------------------ tools


async def test_a_custom_tool_takes_text(saying):
    patch = '*** Begin\n+"quoted"\n'
    call = json.dumps({"name": "apply_patch", "arguments": {"input": patch}})
    grammar = {"type": "grammar", "syntax": "lark", "definition": "start: /x/"}
    tool = {"type": "custom", "name": "apply_patch", "description": "Edits.", "format": grammar}
    say(saying, f"<tool_call>\n{call}\n</tool_call>")
    events = await RESPONSES.events(saying, tools=[tool])
    [item] = events[-1]["response"]["output"]
    assert (item["type"], item["name"], item["input"]) == ("custom_tool_call", "apply_patch", patch)
    named = {event["type"]: event for event in events}
    assert named["response.custom_tool_call_input.delta"]["delta"] == patch
    assert named["response.custom_tool_call_input.done"]["input"] == patch
    assert named["response.output_item.added"]["item"]["input"] == ""
    assert "Edits.\\n\\nThe input is a text of this lark grammar:\\nstart: /x/" in prompt_of(saying)
    result = {"type": "custom_tool_call_output", "call_id": item["call_id"], "output": "ok"}
    await RESPONSES.answer(saying, input=[item, result], max_output_tokens=3)
    said = f"[{item['call_id']} {call}]<tool {item['call_id']} apply_patch>ok<go>"
    assert prompt_of(saying) == f"<assistant>{said}"
    cut = await RESPONSES.answer(saying, tools=[tool], max_output_tokens=len(call))
    assert cut["output"] == []


async def test_functions_in_a_namespace_keep_it(saying):
    inner = {"type": "function", "name": "spawn", "parameters": {"type": "object"}}
    tools = [{"type": "namespace", "name": "agents", "description": "d", "tools": [inner]}, inner | {"name": "other"}]
    say(saying, '<tool_call>\n{"name": "agents.spawn", "arguments": {}}\n</tool_call>')
    [item] = (await RESPONSES.answer(saying, tools=tools))["output"]
    assert (item["name"], item["namespace"]) == ("spawn", "agents")
    result = {"type": "function_call_output", "call_id": item["call_id"], "output": ""}
    await RESPONSES.answer(saying, input=[item, result])
    assert '"name": "agents.spawn"' in prompt_of(saying)


# --------------------------------------------------------------------------------------------------------- refusals

STORED = "this server stores nothing; send the whole conversation as input"
IMAGE = {"type": "input_image", "image_url": "data:"}
NO_EFFECT = {
    "store": True,
    "metadata": {"a": "b"},
    "user": "u",
    "include": [],
    "service_tier": "auto",
    "prompt_cache_key": "k",
    "prompt_cache_retention": "24h",
    "client_metadata": {"x": "y"},
    "truncation": "disabled",
    "background": False,
    "top_logprobs": 0,
    "previous_response_id": None,
    "max_tool_calls": 3,
    "stream_options": {"include_obfuscation": False},
    "safety_identifier": "s",
}


REFUSED = [
    (
        {"input": [{"type": "function_call_output", "call_id": "c9", "output": "x"}]},
        "input[0].call_id is 'c9'; no call before it has this id",
    ),
    ({"text": {"format": {"type": "json_schema", "name": "w"}}}, "text.format is of type 'json_schema'; schema goes"),
    ({"text": {"format": {"type": "json_object"}}, "guided_regex": "a"}, "guided_regex and text.format"),
    ({"previous_response_id": "resp_1"}, f"previous_response_id is 'resp_1'; this field is not supported: {STORED}"),
    ({"conversation": {"id": "c"}}, f"conversation is set; this field is not supported: {STORED}"),
    ({"background": True}, "background is set; this field is not supported: responses are sent only on the connection"),
    ({"truncation": "auto"}, "truncation is 'auto'"),
    ({"top_logprobs": 2}, "top_logprobs is set; this field is not supported: this route sends no"),
    ({"include": ["web_search_call.results"]}, "include[0] is 'web_search_call.results'"),
    (
        {"input": [{"type": "item_reference", "id": "x"}]},
        "input[0] is of type 'item_reference', which is not supported",
    ),
    ({"input": [{"role": "user", "content": [IMAGE]}]}, "content[0] is of type 'input_image', which is not supported"),
    ({"input": [{"content": "x"}]}, "input[0] has no type; expected message or reasoning or function_call"),
    ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role is 'tool'"),
    ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0].text is missing"),
    ({"tools": [{"type": "file_search"}]}, "tools[0] is of type 'file_search', which is not supported"),
    ({"tools": [TOOL, TOOL]}, "tools has 'weather' twice"),
    ({"tools": [TOOL | {"defer_loading": True}]}, "tools[0].defer_loading is True; this field is not supported"),
    ({"tool_choice": {"type": "web_search"}}, "is of type 'web_search', which is not supported"),
    (
        {"tool_choice": {"type": "function", "name": "f"}, "tools": [TOOL]},
        "tool_choice.name is 'f', which is not in tools",
    ),
    ({"max_output_tokens": 0}, "max_output_tokens is 0; expected 1"),
    ({"max_tokens": 5}, "max_tokens is 5; this field is not supported"),
    ({"prompt": 5}, "prompt is set; this field is not supported"),
    ({"guided_json": "["}, "guided_json is '['"),
    ({"tool_choice": "required"}, "tool_choice requires a call"),
    ({"event_ids": True}, "event_ids is not supported where reasoning or calls are parsed"),
    ({"input": []}, "input has 0 messages; expected 1"),
]


async def test_fields_without_effect_are_taken(saying):
    whole = await RESPONSES.answer(saying)
    assert without_ids(await RESPONSES.answer(saying, **NO_EFFECT)) == without_ids(whole)


async def test_what_is_not_served_is_refused_by_name(saying):
    await RESPONSES.check_refusals(saying, REFUSED)


async def test_stored_answers_are_not_found(saying):
    with pytest.raises(openai.NotFoundError, match="no response has the id 'resp_1': this server stores none"):
        await saying.client.responses.retrieve("resp_1")
    with pytest.raises(openai.NotFoundError):
        await saying.client.responses.delete("resp_1")
