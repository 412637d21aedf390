"""`/v1/responses` as OpenAI's official client and Codex call it: answers, streams of events, conversations."""

from __future__ import annotations

import json
import re

import openai
import pytest
from pydantic import BaseModel

from server.formats.reasoning import PlainFormat
from tests.server.fake_grammar import FakeCompiler
from tests.server.http.agents import (
    ASKED,
    CALL,
    END_ID,
    PLAN,
    REASONING,
    SAID,
    WEATHER,
    planned,
    prompt_of,
    talking,
)
from tests.server.http.interfaces import events_in, on_the_shared_server
from tests.server.test_life import metric

pytestmark = on_the_shared_server

TOOL = {"type": "function", "name": "weather", "description": "Tells it.", "parameters": WEATHER, "strict": False}
BODY = {"model": "fake", "input": "hi", "max_output_tokens": 300, "stop_token_ids": [END_ID]}
STOP = {"stop_token_ids": [END_ID]}


async def answer(server, **fields):
    answered = await server.http.post("/v1/responses", json=BODY | fields)
    assert answered.status_code == 200, answered.text
    return answered.json()


async def refusal(server, **fields):
    answered = await server.http.post("/v1/responses", json=BODY | fields)
    assert answered.status_code == 400, answered.text
    return answered.json()["error"]["message"]


def without_ids(value):
    """Compare answers of two requests: their ids and their times differ."""
    if isinstance(value, list):
        return [without_ids(entry) for entry in value]
    if isinstance(value, dict):
        return {k: without_ids(v) for k, v in value.items() if k not in ("id", "call_id", "item_id", "created_at")}
    return value


# ---------------------------------------------------------------------------------------------------------- answers


async def test_an_answer_has_reasoning_a_message_and_a_call(planning):
    made = await planning.client.responses.create(
        model="fake", input="hi", tools=[TOOL], max_output_tokens=300, extra_body=STOP
    )
    reasoning, message, call = made.output
    assert [item.type for item in made.output] == ["reasoning", "message", "function_call"]
    assert [part.text for part in reasoning.content] == [REASONING]
    assert made.output_text == SAID
    assert (call.name, json.loads(call.arguments)) == ("weather", ASKED)
    assert {item.status for item in made.output} == {made.status} == {"completed"}
    assert len({made.id, message.id, reasoning.id, call.id, call.call_id}) == 5
    assert re.fullmatch("[0-9a-z]{9}", call.call_id), "some templates take no other ids"
    [asked] = planning.engine.requests
    assert asked.sampling.temperature == 1.0
    assert made.usage.input_tokens == len(asked.token_ids)
    assert made.usage.input_tokens_details.cached_tokens == 1
    assert made.usage.total_tokens == made.usage.input_tokens + made.usage.output_tokens
    assert len(REASONING) < made.usage.output_tokens_details.reasoning_tokens < made.usage.output_tokens
    assert (made.incomplete_details, made.error, made.model, made.object) == (None, None, "fake", "response")
    assert prompt_of(planning).startswith('[{"name": "weather", "description": "Tells it.", "parameters": {')


@pytest.mark.parametrize("burst", [1, pytest.param(7, marks=pytest.mark.slow), 300])
async def test_a_stream_tells_how_the_same_answer_grows(burst):
    async with talking(planned(PLAN, burst=burst)) as server:
        whole = await answer(server, tools=[TOOL])
        raw = (await server.http.post("/v1/responses", json=BODY | {"tools": [TOOL], "stream": True})).text
        events = events_in(raw)
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        created, in_progress, *_, completed = events
        assert [event["type"] for event in (created, in_progress)] == ["response.created", "response.in_progress"]
        assert (created["response"]["status"], created["response"]["output"]) == ("in_progress", [])
        assert completed["type"] == "response.completed"
        assert without_ids(completed["response"]) == without_ids(whole)
        done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
        assert done == completed["response"]["output"]
        deltas = {}
        for event in events:
            if event["type"].endswith(".delta"):
                name = (event["item_id"], event["output_index"], event["type"])
                deltas[name] = deltas.get(name, "") + event["delta"]
        reasoning, message, call = done
        assert deltas == {
            (reasoning["id"], 0, "response.reasoning_text.delta"): REASONING,
            (message["id"], 1, "response.output_text.delta"): SAID,
            (call["id"], 2, "response.function_call_arguments.delta"): json.dumps(ASKED),
        }


async def test_the_official_client_reads_the_stream(planning):
    fields = {"input": "hi", "tools": [TOOL], "max_output_tokens": 300, "extra_body": STOP}
    async with planning.client.responses.stream(model="fake", **fields) as stream:
        seen = [event async for event in stream]
        final = await stream.get_final_response()
    assert "".join(event.delta for event in seen if event.type == "response.output_text.delta") == SAID
    assert final.output_text == SAID
    assert [item.type for item in final.output] == ["reasoning", "message", "function_call"]
    assert json.loads(final.output[2].arguments) == ASKED


async def test_an_answer_that_is_cut_short_says_so_and_keeps_what_was_said():
    async with talking(planned(PLAN, burst=50)) as server:
        for cut in range(1, (await answer(server, tools=[TOOL]))["usage"]["output_tokens"], 5):
            fields = {"tools": [TOOL], "max_output_tokens": cut}
            whole = await answer(server, **fields)
            events = events_in((await server.http.post("/v1/responses", json=BODY | fields | {"stream": True})).text)
            assert without_ids(events[-1]["response"]) == without_ids(whole)
            assert (events[-1]["type"], whole["status"]) == ("response.incomplete", "incomplete")
            assert whole["incomplete_details"] == {"reason": "max_output_tokens"}
            statuses = [item["status"] for item in whole["output"]]
            assert statuses == ["completed"] * (len(statuses) - 1) + ["incomplete"] * bool(statuses)
            assert whole["usage"]["output_tokens"] == cut
            texts = [
                item["arguments"] if "arguments" in item else item["content"][0]["text"] for item in whole["output"]
            ]
            assert all(text.rstrip("\ufffd") in PLAN for text in texts), (
                texts
            )  # half a mark is text, half a letter that


async def test_parsed_text_has_the_structure_that_was_asked_for():
    class Empty(BaseModel):
        pass

    compiler = FakeCompiler()
    async with talking(model_format=PlainFormat(), compile_grammar=compiler) as server:
        parsed = await server.client.responses.parse(model="fake", input="hi", text_format=Empty)
        assert parsed.output_parsed == Empty()
        assert json.loads(compiler.asked[-1].json_schema)["type"] == "object"
        await answer(server, text={"format": {"type": "json_object"}})
        assert json.loads(compiler.asked[-1].json_schema) == {"type": "object"}
        told = await refusal(server, text={"format": {"type": "json_object"}}, guided_regex="a")
        assert "guided_regex and text.format" in told


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
    await answer(saying, input=items, instructions="you are it")
    one = '{"name": "weather", "arguments": {"city": "Oslo"}}'
    assert prompt_of(saying) == (
        "<system>you are it\n\nbe brief<user>one\n\ntwo"
        f'<assistant>(hm)I[c1 {one}][c2 {{"name": "weather", "arguments": {{}}}}]'
        "<tool c2 weather>cold<tool c1 weather>warm"
        "<user><system-reminder>\nlate\n</system-reminder>"
        "<assistant>(sum)done<go>"
    )


async def test_an_answer_can_be_sent_back_as_it_is(planning):
    made = await answer(planning, tools=[TOOL], include=["reasoning.encrypted_content"])
    [call_id] = [item["call_id"] for item in made["output"] if item["type"] == "function_call"]
    result = {"type": "function_call_output", "call_id": call_id, "output": "cold"}
    history = [{"role": "user", "content": "hi"}, *made["output"], result]
    await answer(planning, input=history)
    call = json.dumps({"name": "weather", "arguments": ASKED})
    said = f"<user>hi<assistant>({REASONING}){SAID}[{call_id} {call}]<tool {call_id} weather>cold<go>"
    assert prompt_of(planning) == said
    for item in history:
        item.pop("content") if item.get("type") == "reasoning" else None
    await answer(planning, input=history)
    assert prompt_of(planning) == said, "reasoning comes back from encrypted_content, too"
    for item in history:
        item.pop("encrypted_content", None)
    await answer(planning, input=history)
    assert prompt_of(planning) == said.replace(f"({REASONING})", "")


async def test_a_result_of_no_call_is_refused():
    async with talking() as server:
        told = await refusal(server, input=[{"type": "function_call_output", "call_id": "c9", "output": "x"}])
        assert told == "input[0].call_id is 'c9'; no call before it has this id"
        assert metric(server, "admission_rejected_total", reason="invalid") == 1


async def test_without_a_limit_or_with_one_that_is_too_large_an_answer_has_the_room_of_the_context():
    async with talking() as server:
        server.engine.max_model_len = 500
        for asked in (None, 32000):
            await answer(server, max_output_tokens=asked)
            request = server.engine.requests[-1]
            assert request.sampling.max_tokens == 500 - len(request.token_ids)


# ------------------------------------------------------------------------------------------------------------ tools


async def test_a_custom_tool_takes_text():
    patch = '*** Begin\n+"quoted"\n'
    call = json.dumps({"name": "apply_patch", "arguments": {"input": patch}})
    grammar = {"type": "grammar", "syntax": "lark", "definition": "start: /x/"}
    tool = {"type": "custom", "name": "apply_patch", "description": "Edits.", "format": grammar}
    async with talking(planned(f"<tool_call>\n{call}\n</tool_call>")) as server:
        fields = {"tools": [tool], "stream": True}
        events = events_in((await server.http.post("/v1/responses", json=BODY | fields)).text)
        [item] = events[-1]["response"]["output"]
        assert (item["type"], item["name"], item["input"]) == ("custom_tool_call", "apply_patch", patch)
        named = {event["type"]: event for event in events}
        assert named["response.custom_tool_call_input.delta"]["delta"] == patch
        assert named["response.custom_tool_call_input.done"]["input"] == patch
        assert named["response.output_item.added"]["item"]["input"] == ""
        assert "Edits.\\n\\nThe input is a text of this lark grammar:\\nstart: /x/" in prompt_of(server)
        result = {"type": "custom_tool_call_output", "call_id": item["call_id"], "output": "ok"}
        await answer(server, input=[item, result], max_output_tokens=3)
        record = json.dumps({"name": "apply_patch", "arguments": {"input": patch}})
        said = f"[{item['call_id']} {record}]<tool {item['call_id']} apply_patch>ok<go>"
        assert prompt_of(server) == f"<assistant>{said}"
        cut = await answer(server, tools=[tool], max_output_tokens=len(call))
        assert cut["output"][0]["input"].startswith('{"input": "*** Be')


async def test_functions_in_a_namespace_keep_it():
    inner = {"type": "function", "name": "spawn", "parameters": {"type": "object"}}
    tools = [{"type": "namespace", "name": "agents", "description": "d", "tools": [inner]}, inner | {"name": "other"}]
    call = '{"name": "agents.spawn", "arguments": {}}'
    async with talking(planned(f"<tool_call>\n{call}\n</tool_call>")) as server:
        made = await answer(server, tools=tools)
        [item] = made["output"]
        assert (item["name"], item["namespace"]) == ("spawn", "agents")
        await answer(server, input=[item, {"type": "function_call_output", "call_id": item["call_id"], "output": ""}])
        assert '"name": "agents.spawn"' in prompt_of(server)


async def test_a_search_of_the_web_is_not_offered_to_the_model(saying):
    await answer(saying, tools=[{"type": "web_search", "external_web_access": False}])
    assert prompt_of(saying) == "<user>hi<go>"


async def test_without_a_choice_of_tools_calls_are_text():
    async with talking(planned(CALL)) as server:
        [message] = (await answer(server, tools=[TOOL], tool_choice="none"))["output"]
        assert message["content"][0]["text"] == CALL
        assert prompt_of(server) == "<user>hi<go>"


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"reasoning": {"effort": "high", "summary": "auto"}}, "[effort high]"),
        ({"reasoning": {"effort": "none"}}, "[enable_thinking False][effort none]"),
        ({"text": {"verbosity": "low"}}, "[verbosity low]"),
    ],
    ids=str,
)
async def test_the_template_is_told_how_to_answer(saying, fields, said):
    await answer(saying, **fields)
    assert prompt_of(saying) == f"{said}<user>hi<go>"


# --------------------------------------------------------------------------------------------------------- refusals

STORED = "this server stores nothing, so send the whole conversation as input"
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


async def test_fields_without_effect_are_taken(saying):
    assert without_ids(await answer(saying, **NO_EFFECT)) == without_ids(await answer(saying))


REFUSED = [
    ({"previous_response_id": "resp_1"}, f"previous_response_id is 'resp_1'; this field is not served: {STORED}"),
    ({"conversation": {"id": "c"}}, f"conversation is set; this field is not served: {STORED}"),
    ({"prompt": {"id": "p"}}, f"prompt is set; this field is not served: {STORED}"),
    ({"background": True}, "background is not false"),
    ({"truncation": "auto"}, "truncation is 'auto'"),
    ({"top_logprobs": 2}, "top_logprobs is not 0"),
    ({"include": ["web_search_call.results"]}, "include[0] is 'web_search_call.results'"),
    (
        {"input": [{"type": "item_reference", "id": "x"}]},
        "input[0] is of type 'item_reference', which is not served",
    ),
    ({"input": [{"role": "user", "content": [IMAGE]}]}, "content[0] is of type 'input_image', which is not served"),
    ({"input": [{"content": "x"}]}, "input[0] has no type; expected message or reasoning or function_call"),
    ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role is 'tool'"),
    ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0].text is missing"),
    ({"tools": [{"type": "file_search"}]}, "tools[0] is of type 'file_search', which is not served"),
    ({"tools": [TOOL, TOOL]}, "tools has 'weather' twice"),
    ({"tools": [TOOL | {"defer_loading": True}]}, "tools[0].defer_loading is True; this field is not served"),
    ({"tool_choice": {"type": "web_search"}}, "is of type 'web_search', which is not served"),
    ({"tool_choice": {"type": "function", "name": "f"}, "tools": [TOOL]}, "tool_choice.name is 'f', which is none"),
    ({"max_output_tokens": 0}, "max_output_tokens is 0; expected 1"),
    ({"temperature": 101.0}, "temperature is 101.0"),
    ({"new_knob": 1}, "new_knob is 1; this field is not served"),
    ({"event_ids": True}, "event_ids is True; a stream of this route cannot be continued"),
    ({"input": []}, "input has 0 messages; expected 1"),
]


async def test_what_is_not_served_is_refused_by_name():
    async with talking() as server:
        for i, (fields, said) in enumerate(REFUSED, 1):
            assert said in await refusal(server, **fields)
            assert metric(server, "admission_rejected_total", reason="invalid") == i
        assert not server.engine.requests


async def test_other_models_and_stored_answers_are_not_found(saying):
    with pytest.raises(openai.NotFoundError, match="model is 'gpt-5'"):
        await saying.client.responses.create(model="gpt-5", input="hi")
    with pytest.raises(openai.NotFoundError, match="no response has the id 'resp_1': this server stores none"):
        await saying.client.responses.retrieve("resp_1")
    with pytest.raises(openai.NotFoundError):
        await saying.client.responses.delete("resp_1")


# ----------------------------------------------------------------------------------------------------- ends of calls
