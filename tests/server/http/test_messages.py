"""What is peculiar to `/v1/messages`, as Anthropic's clients and Claude Code call it; `test_agents` has the rest."""

from __future__ import annotations

import json

import httpx

from pilotfish.server.formats.reasoning import PlainFormat
from tests.server.http.agents import ASKED, DIALECTS, REASONING, SAID, USER, prompt_of, talking, without_ids
from tests.server.http.interfaces import on_the_shared_server
from tests.server.test_security import ALICE

pytestmark = on_the_shared_server

MESSAGES = DIALECTS["messages"]
TOOL = MESSAGES.tool


async def test_blocks_have_what_clients_need(planning):
    made = await MESSAGES.answer(planning, tools=[TOOL])
    thinking, _, call = made["content"]
    assert thinking["signature"], "clients drop what has none"
    assert (call["type"], call["name"], call["input"]) == ("tool_use", "weather", ASKED)
    assert (made["type"], made["role"], made["stop_sequence"]) == ("message", "assistant", None)


async def test_a_stop_sequence_is_named(saying):
    stopped = await MESSAGES.answer(saying, stop_sequences=["zzz", "look"])
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", "look")
    assert stopped["content"] == [{"type": "text", "text": SAID[: SAID.index("look")]}]
    events = await MESSAGES.events(saying, stop_sequences=["look"])
    assert without_ids(MESSAGES.assembled(events)) == without_ids(stopped)


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
    await MESSAGES.answer(saying, messages=messages, system=system)
    calls = '[t1 {"name": "weather", "arguments": {"city": "Oslo"}}][t2 {"name": "weather", "arguments": {}}]'
    assert prompt_of(saying) == (
        f"<system>you\n\nare it\n\nearly<user>one\n\ntwo<assistant>(hm)I{calls}<tool t2 weather>cold"
        "<tool t1 weather>warm<user>three\n\n<system-reminder>\nlate\n</system-reminder>"
        "<assistant>four<user>five<go>"
    )


async def test_an_answer_can_be_sent_back_as_it_is(planning):
    made = await MESSAGES.answer(planning, tools=[TOOL])
    call_id = made["content"][2]["id"]
    result = {"type": "tool_result", "tool_use_id": call_id, "content": "cold"}
    turns = [*USER, {"role": "assistant", "content": made["content"]}, {"role": "user", "content": [result]}]
    await MESSAGES.answer(planning, messages=turns)
    call = json.dumps({"name": "weather", "arguments": ASKED})
    said = f"<user>hi<assistant>({REASONING}){SAID}[{call_id} {call}]<tool {call_id} weather>cold<go>"
    assert prompt_of(planning) == said


THINKING = [
    ({"thinking": {"type": "enabled", "budget_tokens": 2000}}, "[enable_thinking True]<user>hi<go>"),
    ({"thinking": {"type": "disabled"}}, "[enable_thinking False]<user>hi<go>"),
    ({"thinking": {"type": "adaptive"}, "output_config": {"effort": "high"}}, "[effort high]<user>hi<go>"),
    ({"messages": [*USER, {"role": "assistant", "content": "Well,"}]}, "<user>hi<assistant>Well,"),
]


async def test_template_variables_for_thinking_and_continuation():
    async with talking(model_format=PlainFormat()) as server:  # a budget would be a structure, if marks were known
        for fields, said in THINKING:
            await MESSAGES.answer(server, **fields)
            assert prompt_of(server) == said


async def test_counted_tokens_are_those_of_the_prompt(saying):
    fields = {"model": "fake", "messages": USER, "tools": [TOOL], "system": "you", "thinking": {"type": "disabled"}}
    counted = await saying.http.post("/v1/messages/count_tokens", json=fields)
    assert counted.status_code == 200, counted.text
    assert not saying.engine.requests
    made = await MESSAGES.answer(saying, **fields)
    assert counted.json() == {"input_tokens": MESSAGES.counted(made).prompt}
    for wrong, told in (
        ({**MESSAGES.body, "messages": []}, "max_tokens is 300; this field is not supported"),
        ({"model": "fake", "messages": []}, "messages is []; expected at least one message"),
    ):
        refused = await saying.http.post("/v1/messages/count_tokens", json=wrong)
        assert told in refused.json()["error"]["message"]


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
        "messages[0].content[0] is of type 'image', which is not supported; expected text or",
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
    ({"tools": [TOOL, TOOL]}, "tools[1].name is 'weather', which occurs twice"),
    ({"tools": [TOOL | {"input_examples": [{}]}]}, "tools[0].input_examples is [{}]; this field is not supported"),
    ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "f"}}, "tool_choice.name is 'f', which is not in tools"),
    ({"tool_choice": {"type": "tool"}}, "tool_choice is of type 'tool'; name goes with the type tool"),
    ({"tool_choice": {"type": "any"}}, "tool_choice.type requires a call, but there are no tools"),
    ({"tools": [TOOL | {"input_schema": {"type": "x"}, "strict": True}]}, "tools[0].input_schema "),
    ({"prompt": "a"}, "prompt is 'a'; this field is not supported"),
    ({"guided_json": "["}, "guided_json is '['"),
    ({"stop": [""]}, "stop[0] has 0 characters"),
    ({"max_tokens": 0}, "max_tokens is 0; expected 1"),
    ({"max_tokens": None}, "max_tokens is missing"),
    ({"stop_sequences": [""]}, "stop_sequences[0] has 0 characters"),
]


async def test_fields_without_effect_are_taken(saying):
    whole = await MESSAGES.answer(saying)
    assert without_ids(await MESSAGES.answer(saying, **NO_EFFECT)) == without_ids(whole)
    headers = {"anthropic-version": "2023-06-01", "anthropic-beta": "x,y"}
    assert (await saying.http.post("/v1/messages?beta=true", json=MESSAGES.body, headers=headers)).status_code == 200


async def test_what_is_not_served_is_refused_by_name(saying):
    await MESSAGES.check_refusals(saying, REFUSED)


async def test_a_prompt_that_is_too_long_is_called_so(saying):
    saying.engine.max_model_len = 100
    told = await MESSAGES.refusal(saying, messages=[{"role": "user", "content": "x" * 200}])
    assert told == "prompt is too long: 210 tokens > 99 maximum"


async def test_a_key_is_a_token(tokens):
    async with talking(token_file=tokens) as server:
        assert "authorization is missing" in await MESSAGES.refusal(server, status=401)
        for headers, status in [
            ({"x-api-key": ALICE}, 200),
            ({"authorization": f"Bearer {ALICE}"}, 200),
            ({"authorization": f"Bearer {ALICE}", "x-api-key": "nobody-has-this-key"}, 200),
            ({"x-api-key": "nobody-has-this-key"}, 401),
            ({"authorization": "Bearer nobody-has-this-token", "x-api-key": ALICE}, 401),
        ]:
            answered = await server.http.post("/v1/messages", json=MESSAGES.body, headers=headers)
            assert answered.status_code == status, headers
        twice = httpx.Headers([("x-api-key", ALICE), ("x-api-key", ALICE)])
        assert (await server.http.post("/v1/messages", json=MESSAGES.body, headers=twice)).status_code == 401
        assert (await server.http.get("/v1/models", headers={"x-api-key": ALICE})).status_code == 200
