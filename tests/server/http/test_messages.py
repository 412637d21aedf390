"""`/v1/messages` as Anthropic's clients and Claude Code call it: answers, streams of events, conversations, counts."""

from __future__ import annotations

import json

import httpx
import pytest

from server.formats.reasoning import PlainFormat
from server.http.messages.answers import MessagesAnswer
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
from tests.server.test_security import ALICE
from tests.serving import until

pytestmark = on_the_shared_server

TOOL = {"name": "weather", "description": "Tells it.", "input_schema": WEATHER}
USER = [{"role": "user", "content": "hi"}]
BODY = {"model": "fake", "messages": USER, "max_tokens": 300, "stop_token_ids": [END_ID]}


async def answer(server, **fields):
    answered = await server.http.post("/v1/messages", json=BODY | fields)
    assert answered.status_code == 200, answered.text
    return answered.json()


async def streamed(server, **fields):
    return events_in((await server.http.post("/v1/messages", json=BODY | fields | {"stream": True})).text)


async def refusal(server, path="/v1/messages", status=400, kind="invalid_request_error", **fields):
    answered = await server.http.post(path, json=BODY | fields)
    assert answered.status_code == status, answered.text
    told = answered.json()
    assert (told["type"], told["error"]["type"]) == ("error", kind)
    return told["error"]["message"]


def assembled(events):
    """The message that the events of a stream make, put together as the API's documentation says."""
    message = None
    partial = {}
    for event in events:
        match event["type"]:
            case "message_start":
                message = event["message"] | {"content": []}
            case "content_block_start":
                assert event["index"] == len(message["content"])
                message["content"].append(dict(event["content_block"]))
            case "content_block_delta":
                block, delta = message["content"][event["index"]], dict(event["delta"])
                kind = delta.pop("type")
                [(field, text)] = delta.items()
                if kind == "input_json_delta":
                    partial[event["index"]] = partial.get(event["index"], "") + text
                else:
                    block[field] += text
            case "message_delta":
                message |= event["delta"] | {"usage": message["usage"] | event["usage"]}
            case other:
                assert other in ("content_block_stop", "message_stop", "ping")
    for index, text in partial.items():
        try:
            message["content"][index]["input"] = json.loads(text)
        except ValueError:
            assert message["stop_reason"] == "max_tokens"
    return message


def without_ids(message):
    """Compare messages of two requests, whose ids differ."""
    content = [{name: value for name, value in block.items() if name != "id"} for block in message["content"]]
    return message | {"id": "", "content": content}


# ---------------------------------------------------------------------------------------------------------- answers


async def test_an_answer_has_thinking_text_and_a_call(planning):
    made = await answer(planning, tools=[TOOL])
    thinking, text, call = made["content"]
    assert (thinking["type"], thinking["thinking"]) == ("thinking", REASONING)
    assert thinking["signature"], "clients drop what has none"
    assert text == {"type": "text", "text": SAID}
    assert (call["type"], call["name"], call["input"]) == ("tool_use", "weather", ASKED)
    assert (made["stop_reason"], made["stop_sequence"]) == ("tool_use", None)
    assert (made["type"], made["role"], made["model"]) == ("message", "assistant", "fake")
    [asked] = planning.engine.requests
    assert asked.sampling.temperature == 1.0
    usage = made["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == len(asked.token_ids)
    assert (usage["cache_read_input_tokens"], usage["cache_creation_input_tokens"]) == (1, 0)
    assert len(REASONING) < usage["output_tokens_details"]["thinking_tokens"] < usage["output_tokens"]
    assert prompt_of(planning).startswith('[{"name": "weather", "description": "Tells it.", "parameters": {')


@pytest.mark.parametrize("burst", [1, pytest.param(7, marks=pytest.mark.slow), 300])
async def test_a_stream_tells_how_the_same_answer_grows(burst):
    async with talking(planned(PLAN, burst=burst)) as server:
        whole = await answer(server, tools=[TOOL])
        events = await streamed(server, tools=[TOOL])
        assert [event["type"] for event in events[:2]] == ["message_start", "ping"]
        assert events[-1]["type"] == "message_stop"
        assert events[0]["message"]["usage"]["input_tokens"] == len(server.engine.requests[-1].token_ids)
        assert without_ids(assembled(events)) == without_ids(whole)
        borders = [(e["type"], e["index"]) for e in events if e["type"].endswith(("block_start", "block_stop"))]
        assert borders == [(f"content_block_{kind}", i) for i in range(3) for kind in ("start", "stop")]
        if burst == 300:
            deltas = [event["delta"]["type"] for event in events if event["type"] == "content_block_delta"]
            assert deltas == ["thinking_delta", "signature_delta", "text_delta", "input_json_delta"], "one a round"


async def test_an_answer_that_is_cut_short_says_so_and_keeps_what_was_said():
    async with talking(planned(PLAN, burst=50)) as server:
        for cut in range(1, (await answer(server, tools=[TOOL]))["usage"]["output_tokens"], 5):
            whole = await answer(server, tools=[TOOL], max_tokens=cut)
            made = assembled(await streamed(server, tools=[TOOL], max_tokens=cut))
            assert without_ids(made) == without_ids(whole)
            assert (whole["stop_reason"], whole["usage"]["output_tokens"]) == ("max_tokens", cut)
            for block in whole["content"]:
                said = block.get("thinking", block.get("text", ""))
                assert said.rstrip("\ufffd") in PLAN  # half a mark is text, half a letter that
                assert block.get("input", {}) in ({}, ASKED)


async def test_why_an_answer_ended():
    async with talking(planned(SAID)) as server:
        assert (await answer(server))["stop_reason"] == "end_turn"
        stopped = await answer(server, stop_sequences=["zzz", "look"])
        assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", "look")
        assert stopped["content"] == [{"type": "text", "text": SAID[: SAID.index("look")]}]
        events = await streamed(server, stop_sequences=["look"])
        assert events[-2]["delta"] == {"stop_reason": "stop_sequence", "stop_sequence": "look"}


async def test_text_has_the_structure_that_was_asked_for():
    compiler = FakeCompiler()
    async with talking(model_format=PlainFormat(), compile_grammar=compiler) as server:
        made = await answer(server, output_config={"format": {"type": "json_schema", "schema": WEATHER}})
        assert made["content"] == [{"type": "text", "text": "{}"}]
        assert json.loads(compiler.asked[-1].json_schema) == WEATHER


# ---------------------------------------------------------------------------------------------------- conversations


async def test_a_conversation_of_every_kind_of_block(saying):
    cached = {"cache_control": {"type": "ephemeral"}}
    use = {"type": "tool_use", "name": "weather"}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"} | cached]},
        {"role": "system", "content": "early"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "s"},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "I"},
                use | {"id": "t1", "input": {"city": "Oslo"}},
                use | {"id": "t2", "input": {}} | cached,
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t2", "content": [{"type": "text", "text": "cold"}]} | cached,
                {"type": "tool_result", "tool_use_id": "t1", "content": "warm", "is_error": False},
                {"type": "text", "text": "three"},
            ],
        },
        {"role": "system", "content": [{"type": "text", "text": "late"}]},
        {"role": "assistant", "content": "four"},
        {"role": "user", "content": "five"},
    ]
    system = [{"type": "text", "text": "you"} | cached, {"type": "text", "text": "are it"}]
    await answer(saying, messages=messages, system=system)
    calls = '[t1 {"name": "weather", "arguments": {"city": "Oslo"}}][t2 {"name": "weather", "arguments": {}}]'
    assert prompt_of(saying) == (
        f"<system>you\n\nare it\n\nearly<user>one\n\ntwo<assistant>(hm)I{calls}<tool t2 weather>cold"
        "<tool t1 weather>warm<user>three\n\n<system-reminder>\nlate\n</system-reminder>"
        "<assistant>four<user>five<go>"
    )


async def test_an_answer_can_be_sent_back_as_it_is(planning):
    made = await answer(planning, tools=[TOOL])
    call_id = made["content"][2]["id"]
    result = {"type": "tool_result", "tool_use_id": call_id, "content": "cold"}
    turns = [*USER, {"role": "assistant", "content": made["content"]}, {"role": "user", "content": [result]}]
    await answer(planning, messages=turns)
    call = json.dumps({"name": "weather", "arguments": ASKED})
    said = f"<user>hi<assistant>({REASONING}){SAID}[{call_id} {call}]<tool {call_id} weather>cold<go>"
    assert prompt_of(planning) == said


async def test_the_last_message_of_the_assistant_is_continued(saying):
    await answer(saying, messages=[*USER, {"role": "assistant", "content": "Well,"}])
    assert prompt_of(saying) == "<user>hi<assistant>Well,"


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"thinking": {"type": "enabled", "budget_tokens": 2000}}, "[enable_thinking True]"),
        ({"thinking": {"type": "disabled"}}, "[enable_thinking False]"),
        ({"thinking": {"type": "adaptive"}, "output_config": {"effort": "high"}}, "[effort high]"),
        ({}, ""),
    ],
    ids=str,
)
async def test_the_template_is_told_how_to_think(fields, said):
    async with talking(model_format=PlainFormat()) as server:
        await answer(server, **fields)
        assert prompt_of(server) == f"{said}<user>hi<go>"


async def test_a_limit_that_is_too_large_is_the_room_of_the_context():
    async with talking() as server:
        server.engine.max_model_len = 500
        await answer(server, max_tokens=32000)
        [request] = server.engine.requests
        assert request.sampling.max_tokens == 500 - len(request.token_ids)


async def test_without_a_choice_of_tools_calls_are_text():
    async with talking(planned(CALL)) as server:
        made = await answer(server, tools=[TOOL], tool_choice={"type": "none"})
        assert made["content"] == [{"type": "text", "text": CALL}]
        assert made["stop_reason"] == "end_turn"
        assert prompt_of(server) == "<user>hi<go>"


# ----------------------------------------------------------------------------------------------------------- counts


async def test_counted_tokens_are_those_of_the_prompt(saying):
    fields = {"model": "fake", "messages": USER, "tools": [TOOL], "system": "you", "thinking": {"type": "disabled"}}
    counted = await saying.http.post("/v1/messages/count_tokens", json=fields)
    assert counted.status_code == 200, counted.text
    assert not saying.engine.requests
    made = await answer(saying, **fields)
    assert counted.json() == {"input_tokens": len(saying.engine.requests[0].token_ids)}
    usage = made["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == counted.json()["input_tokens"]
    told = await refusal(saying, "/v1/messages/count_tokens", messages=[])
    assert "max_tokens is 300; this field is not served" in told
    refused = await saying.http.post("/v1/messages/count_tokens", json={"model": "fake", "messages": []})
    assert refused.json()["error"]["message"] == "messages is []; expected at least one message"


# --------------------------------------------------------------------------------------------------------- refusals

IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "x"}}
RESULT = {"type": "tool_result", "tool_use_id": "t9", "content": "x"}
NO_EFFECT = {
    "metadata": {"user_id": "u"},
    "service_tier": "auto",
    "cache_control": {"type": "ephemeral"},
    "context_management": {"edits": []},
    "thinking": {"type": "adaptive", "display": "omitted"},
    "tools": [],
}
REFUSED = [
    (
        {"messages": [{"role": "user", "content": [IMAGE]}]},
        "messages[0].content[0] is of type 'image', which is not served; expected text or",
    ),
    (
        {"messages": [{"role": "user", "content": [RESULT | {"content": [IMAGE]}]}]},
        "content[0] is of type 'image', which",
    ),
    ({"messages": [{"role": "user", "content": [RESULT]}]}, "messages[0].content[0].tool_use_id is 't9'; no call"),
    ({"messages": [{"role": "assistant", "content": [RESULT]}]}, "a block of type 'tool_result' in a message of role"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role is 'tool'"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text is missing"),
    ({"messages": []}, "messages is []; expected at least one message"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0] is of type 'web_search_20250305'"),
    ({"tools": [TOOL, TOOL]}, "tools[1].name is 'weather', which is there twice"),
    ({"tools": [TOOL | {"input_examples": [{}]}]}, "tools[0].input_examples is [{}]; this field is not served"),
    ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "f"}}, "tool_choice.name is 'f', which is none"),
    ({"tool_choice": {"type": "tool"}}, "tool_choice is of type 'tool'; a name goes with the type tool"),
    ({"tool_choice": {"type": "any"}}, "requires a call, and there are no tools"),
    ({"max_tokens": 0}, "max_tokens is 0; expected 1"),
    ({"max_tokens": None}, "max_tokens is missing"),
    ({"stop_sequences": [""]}, "stop_sequences[0] has 0 characters"),
    ({"mcp_servers": [{}]}, "mcp_servers is [{}]; this field is not served"),
    ({"container": "c"}, "container is 'c'; this field is not served"),
]


async def test_fields_without_effect_are_taken(saying):
    assert without_ids(await answer(saying, **NO_EFFECT)) == without_ids(await answer(saying))
    headers = {"anthropic-version": "2023-06-01", "anthropic-beta": "x,y"}
    assert (await saying.http.post("/v1/messages?beta=true", json=BODY, headers=headers)).status_code == 200


async def test_what_is_not_served_is_refused_by_name():
    async with talking() as server:
        for i, (fields, said) in enumerate(REFUSED, 1):
            assert said in await refusal(server, **fields)
            assert metric(server, "admission_rejected_total", reason="invalid") == i
        assert not server.engine.requests


async def test_a_prompt_that_is_too_long_is_called_so():
    async with talking() as server:
        server.engine.max_model_len = 100
        told = await refusal(server, messages=[{"role": "user", "content": "x" * 200}])
        assert told.startswith("prompt is too long: has 210 tokens; the limit is 99")


async def test_a_key_is_a_token(tmp_path):
    tokens = tmp_path / "tokens"
    tokens.write_text(f"alice {ALICE}\n")
    async with talking(token_file=tokens) as server:
        told = await refusal(server, status=401, kind="authentication_error")
        assert "authorization is missing" in told
        for headers, status in [
            ({"x-api-key": ALICE}, 200),
            ({"authorization": f"Bearer {ALICE}"}, 200),
            ({"authorization": f"Bearer {ALICE}", "x-api-key": "nobody-has-this-key"}, 200),
            ({"x-api-key": "nobody-has-this-key"}, 401),
            ({"authorization": "Bearer nobody-has-this-token", "x-api-key": ALICE}, 401),
        ]:
            answered = await server.http.post("/v1/messages", json=BODY, headers=headers)
            assert answered.status_code == status, headers
        twice = httpx.Headers([("x-api-key", ALICE), ("x-api-key", ALICE)])
        assert (await server.http.post("/v1/messages", json=BODY, headers=twice)).status_code == 401
        assert (await server.http.get("/v1/models", headers={"x-api-key": ALICE})).status_code == 200


# ----------------------------------------------------------------------------------------------------- ends of calls


async def test_an_event_that_cannot_be_made_ends_a_stream_with_one_that_says_so(monkeypatch):
    def broken(self, piece):
        raise RuntimeError("a secret")

    monkeypatch.setattr(MessagesAnswer, "add", broken)
    async with talking() as server:
        events = await streamed(server)
        assert events[-1] == {"type": "error", "error": {"type": "api_error", "message": "internal error"}}
        await until(lambda: not server.app.driver.live())
