"""OpenAI's official client against the embedded pair: what it gets over HTTP is what gRPC gives, drafts or none."""

from __future__ import annotations

import asyncio
import json
import math
from contextlib import asynccontextmanager
from dataclasses import replace

import jsonschema
import openai
import pytest

from pilotfish.v1 import generation_pb2 as pb
from server.chat import ChatTemplate
from server.model import ServedModel
from tests.serving import serving_embedded, until

PROMPT = "def mean(values):\n    "
TURNS = [{"role": "system", "content": "import math\n"}, {"role": "user", "content": PROMPT}]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "size": {"type": "integer"}},
    "required": ["name", "size"],
    "additionalProperties": False,
}
MODEL = "pilotfish-embedded"
OFF = {"extra_body": {"speculation": {"mode": "off"}}}


def load(config, progress):
    """The embedded pair, and a template that it does not have."""
    template = ChatTemplate("{% for turn in messages %}{{ turn.content }}{% endfor %}", {})
    return replace(ServedModel.load(config, progress), chat=template)


@asynccontextmanager
async def talking():
    async with serving_embedded(load=load, max_model_len=512) as server:
        url = f"http://127.0.0.1:{server.app.http_port}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
            yield client, server
            await until(lambda: not server.app.driver.live())
            engine = server.app.driver.model.engine
            assert engine.free_pages == engine.total_pages


async def collected(stream):
    """Texts by index, finish reasons by index, and the usage of a stream."""
    texts, reasons, usage = {}, {}, None
    async for event in stream:
        usage = event.usage or usage
        for choice in event.choices:
            text = choice.text if hasattr(choice, "text") else choice.delta.content
            texts[choice.index] = texts.get(choice.index, "") + (text or "")
            reasons[choice.index] = choice.finish_reason
    return texts, reasons, usage


async def test_completions_and_chats_are_what_grpc_gives():
    async with talking() as (client, server):
        asked = {"model": MODEL, "max_tokens": 24, "n": 2, "seed": 7, "temperature": 0.8, "top_p": 0.9, "stop": ["zz"]}
        sampling = pb.SamplingParams(n=2, seed=7, temperature=0.8, top_p=0.9)
        stopping = pb.StoppingParams(max_tokens=24, stop=["zz"])
        messages = pb.ChatMessages(messages=[pb.ChatMessage(**turn) for turn in TURNS])
        for create, given, as_message in (
            (client.completions.create, {"prompt": PROMPT}, {"prompt": PROMPT}),
            (client.chat.completions.create, {"messages": TURNS}, {"messages": messages}),
        ):
            message = pb.GenerateRequest(sampling=sampling, stopping=stopping, **as_message)
            wanted = [output.text for output in (await server.inference.Generate(message)).outputs]
            whole, plain = await create(**asked, **given), await create(**asked, **given, **OFF)
            for done in (whole, plain):
                texts = [c.text if hasattr(c, "text") else c.message.content for c in done.choices]
                assert texts == wanted
                assert done.usage.completion_tokens == 48
            assert wanted[0] != wanted[1]
            stream = await create(**asked, **given, stream=True, stream_options={"include_usage": True})
            texts, reasons, usage = await collected(stream)
            assert [texts[0], texts[1]] == wanted
            assert set(reasons.values()) == {"length"}
            counts = [(u.prompt_tokens, u.completion_tokens, u.total_tokens) for u in (usage, whole.usage)]
            assert counts[0] == counts[1]
        again = await client.completions.create(**asked | {"n": 1, "seed": whole.choices[1].seed}, prompt=PROMPT)
        by_grpc = pb.GenerateRequest(
            prompt=PROMPT,
            stopping=stopping,
            sampling=pb.SamplingParams(seed=again.choices[0].seed, temperature=0.8, top_p=0.9),
        )
        assert again.choices[0].text == (await server.inference.Generate(by_grpc)).outputs[0].text


async def test_log_probabilities_are_those_of_the_tokens():
    async with talking() as (client, _):
        asked = {"model": MODEL, "max_tokens": 12, "temperature": 0}
        done = await client.completions.create(**asked, prompt=PROMPT, logprobs=3)
        found = done.choices[0].logprobs
        assert "".join(found.tokens) == done.choices[0].text
        assert found.text_offset == [sum(map(len, found.tokens[:i])) for i in range(len(found.tokens))]
        for token, logprob, top in zip(found.tokens, found.token_logprobs, found.top_logprobs, strict=True):
            assert len(top) == 3
            assert top[token] == logprob == max(top.values()) < 0  # greedy: the likeliest
            assert sum(map(math.exp, top.values())) <= 1 + 1e-6
        chat = await client.chat.completions.create(
            **asked, messages=[{"role": "user", "content": PROMPT}], logprobs=True, top_logprobs=2
        )
        assert [entry.token for entry in chat.choices[0].logprobs.content] == found.tokens
        for entry in chat.choices[0].logprobs.content:
            assert bytes(entry.bytes).decode() == entry.token
            assert entry.top_logprobs[0].token == entry.token


async def test_a_response_format_is_kept():
    async with talking() as (client, _):
        named = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA, "strict": True}}
        asked = {"model": MODEL, "messages": TURNS, "max_tokens": 120, "temperature": 1, "seed": 3}
        done = await client.chat.completions.create(**asked, response_format=named)
        jsonschema.validate(json.loads(done.choices[0].message.content), SCHEMA)
        assert done.choices[0].finish_reason == "stop"
        stream = await client.chat.completions.create(**asked, response_format=named, stream=True)
        assert (await collected(stream))[0][0] == done.choices[0].message.content
        plain = await client.chat.completions.create(**asked, response_format=named, **OFF)
        assert plain.choices[0].message.content == done.choices[0].message.content


async def test_a_stream_that_is_closed_ends_its_request():
    async with talking() as (client, server):
        stream = await client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=400, stream=True)
        await anext(stream)
        await stream.close()
        await until(lambda: not server.app.driver.live())


async def test_errors_have_the_classes_of_the_client():
    async with talking() as (client, server):
        assert [model.id async for model in client.models.list()] == [MODEL]
        ask = {"model": MODEL, "prompt": PROMPT}
        with pytest.raises(openai.BadRequestError) as error:
            await client.completions.create(**ask, temperature=-1, top_p=7, extra_body={"n": "2", "temprature": 1})
        assert error.value.code == "invalid"
        assert error.value.type == "invalid_request_error"
        for said in ("n is '2'", "temprature is 1", "temperature is -1.0", "top_p is 7.0"):
            assert said in error.value.message
        with pytest.raises(openai.NotFoundError, match="gpt") as error:
            await client.completions.create(model="gpt", prompt=PROMPT)
        assert error.value.code == "model_not_found"
        with pytest.raises(openai.BadRequestError, match="proposer"):
            await client.completions.create(**ask, extra_body={"speculation": {"proposer": "oracle"}})
        with pytest.raises(openai.InternalServerError) as error:
            await client.completions.create(**ask, max_tokens=400, extra_body={"timeout": 0.01, "ignore_eos": True})
        assert (error.value.status_code, error.value.code) == (504, "deadline")
        server.app.driver.queue.max_requests = 0
        with pytest.raises(openai.RateLimitError) as error:
            await client.completions.create(**ask)
        assert (error.value.code, error.value.type) == ("queue_full", "rate_limit_error")


async def test_its_synchronous_client_too():
    async with talking() as (_, server):
        url = f"http://127.0.0.1:{server.app.http_port}/v1"

        def call():
            with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
                ask = {"model": MODEL, "prompt": PROMPT, "max_tokens": 8, "temperature": 0}
                whole = client.completions.create(**ask).choices[0].text
                with client.completions.create(**ask, stream=True) as stream:
                    return whole, "".join(event.choices[0].text for event in stream)

        whole, streamed = await asyncio.to_thread(call)
        assert whole == streamed != ""
