"""OpenAI's fields on the embedded pair: what is required comes, and what is only a hint changes no text."""

from __future__ import annotations

import json

import httpx
import openai
import pytest
import pytest_asyncio

from tests.serving import serving_embedded

# `make test` has the same over gRPC (`formats/test_conversations`), and these fields around a fake engine.
pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

PARAMETERS = {
    "type": "object",
    "properties": {"city": {"enum": ["Kiel", "Bonn"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS = [{"type": "function", "function": {"name": "weather", "description": "d", "parameters": PARAMETERS}}]
ASK = {
    "messages": [{"role": "user", "content": "What is the weather in Kiel?"}],
    "tools": TOOLS,
    "max_tokens": 500,
    "temperature": 0.5,
}
CODE = "def f(x):\n    return"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client():
    """OpenAI's client of a server with the embedded pair."""
    async with serving_embedded() as server:
        url = f"http://127.0.0.1:{server.app.http_port}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
            client.served = server.app.driver.model
            client.named = {"model": server.app.driver.model.name}
            yield client


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}], ids=str)
async def test_a_required_call_has_the_arguments_of_its_schema(client, choice):
    for seed in range(2):
        asked = ASK | client.named | {"tool_choice": choice, "parallel_tool_calls": False, "seed": seed}
        [made] = (await client.chat.completions.create(**asked)).choices
        [call] = made.message.tool_calls
        arguments = json.loads(call.function.arguments)
        assert (call.function.name, arguments.keys()) == ("weather", {"city", "days"})
        assert arguments["city"] in ("Kiel", "Bonn")
        assert 1 <= arguments["days"] <= 9
        assert made.message.content is None
        assert made.finish_reason == ("tool_calls" if choice == "required" else "stop")
        events = [event async for event in await client.chat.completions.create(**asked, stream=True)]
        pieces = [piece for event in events for piece in event.choices[0].delta.tool_calls or ()]
        assert "".join(piece.function.arguments for piece in pieces) == call.function.arguments
        assert events[-1].choices[0].finish_reason == made.finish_reason


async def test_a_conversation_with_a_call_and_its_result_is_read(client):
    arguments = '{"city": "Kiel", "days": 1}'
    call = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    messages = [
        *ASK["messages"],
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "rain"},
    ]
    done = await client.chat.completions.create(**ASK | client.named | {"messages": messages, "max_tokens": 5})
    assert done.usage.completion_tokens == 5
    messages[1]["tool_calls"][0]["function"]["arguments"] = "no JSON"
    with pytest.raises(openai.BadRequestError, match=r"messages\[1\].*'no JSON'"):
        await client.chat.completions.create(**ASK | client.named | {"messages": messages})


async def test_a_prediction_changes_no_text_and_is_counted(client):
    asked = client.named | {"prompt": CODE, "max_tokens": 24, "temperature": 0}
    plain = await client.completions.create(**asked)
    text = plain.choices[0].text
    assert plain.usage.completion_tokens_details.rejected_prediction_tokens == 0
    for prediction, least, is_right in ((text, 20, True), (text[:30] + " something else", 4, False)):
        done = await client.completions.create(**asked, extra_body={"prediction": prediction})
        assert done.choices[0].text == text
        details = done.usage.completion_tokens_details
        assert details.accepted_prediction_tokens >= least
        assert is_right or details.rejected_prediction_tokens > 0


async def test_a_text_is_scored_as_when_it_was_generated(client):
    asked = client.named | {"temperature": 0, "logprobs": 1, "echo": True}
    ids = list(client.served.codec.encode(CODE))
    body = {"prompt": CODE, "max_new_tokens": 8, "stream": True}
    raw = (await client.post("../generate", body=body, cast_to=httpx.Response)).text
    events = [json.loads(line[6:]) for line in raw.splitlines() if line.startswith("data: {")]
    new = [token["id"] for event in events for token in event.get("tokens", ())]
    [made] = (await client.completions.create(**asked, prompt=ids, max_tokens=8)).choices
    [scored] = (await client.completions.create(**asked, prompt=ids + new, max_tokens=0)).choices
    assert scored.text == made.text
    assert (scored.logprobs.tokens, scored.logprobs.text_offset) == (
        made.logprobs.tokens,
        made.logprobs.text_offset,
    )
    assert len(scored.logprobs.tokens) == len(ids) + 8
    assert scored.logprobs.token_logprobs[1:] == pytest.approx(made.logprobs.token_logprobs[1:], abs=1e-3)
