"""OpenAI's official client against the embedded pair: what it gets over HTTP is what gRPC gives, drafts or none."""

from __future__ import annotations

from dataclasses import replace

import openai

from pilotfish.server.chat import ChatTemplate
from pilotfish.v1 import generation_pb2 as pb
from tests.server.worker.in_process import load_models
from tests.serving import serving_embedded, until

PROMPT = "def mean(values):\n    "
TURNS = [{"role": "system", "content": "import math\n"}, {"role": "user", "content": PROMPT}]
MODEL = "pilotfish-embedded"
OFF = {"extra_body": {"speculation": {"mode": "off"}}}


def load(config, progress):
    """The embedded pair, and a template that it does not have."""
    template = ChatTemplate("{% for turn in messages %}{{ turn.content }}{% endfor %}", {})
    return replace(load_models(config, progress), chat=template)


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
    async with (
        serving_embedded(load=load, max_model_len=512) as server,
        openai.AsyncOpenAI(
            base_url=f"http://127.0.0.1:{server.app.http_port}/v1", api_key="none", max_retries=0
        ) as client,
    ):
        asked = {"model": MODEL, "max_tokens": 16, "n": 2, "seed": 7, "temperature": 0.8, "top_p": 0.9, "stop": ["zz"]}
        sampling = pb.SamplingParams(n=2, seed=7, temperature=0.8, top_p=0.9)
        stopping = pb.StoppingParams(max_tokens=16, stop=["zz"])
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
                assert done.usage.completion_tokens == 32
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
        await until(lambda: not server.app.driver.live())
        engine = server.app.driver.model.engine
        assert engine.load.free_pages == engine.facts.total_pages
