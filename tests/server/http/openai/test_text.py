"""Completions of one prompt or of several, with the prompt before them, and with the usage so far."""

from __future__ import annotations

import asyncio

import httpx
import openai
import pytest

from pilotfish.engine.types import Logprob, TokenEvent
from pilotfish.server.http.openai.answers import TextAnswers
from pilotfish.server.http.openai.bodies import CompletionBody
from tests.engine.text.test_codec import CODEC
from tests.server.fake_engine import FakeEngine, logprob_of
from tests.server.http.interfaces import answering, each, ended, on_the_shared_server, talking, text_of
from tests.server.test_life import metric
from tests.serving import until

pytestmark = on_the_shared_server

PROMPTS = ["ab a", "€uro", "abab a"]
ASK = {"model": "fake", "max_tokens": 6}


async def streamed(server, **fields):
    """The choices that a client makes of a stream, by index, and the chunks."""
    events = [event async for event in await server.client.completions.create(**ASK | fields, stream=True)]
    choices = {}
    for event in events:
        for part in event.choices:
            choice = choices.setdefault(part.index, {"text": "", "finish_reason": None, "logprobs": {}})
            assert choice["finish_reason"] is None
            choice["text"] += part.text
            choice["finish_reason"] = part.finish_reason
            for name, found in (part.logprobs or {}) and part.logprobs.model_dump().items():
                choice["logprobs"].setdefault(name, []).extend(found)
    return choices, events


def same(choice, made):
    logprobs = {} if choice.logprobs is None else choice.logprobs.model_dump()
    return made == {"text": choice.text, "finish_reason": choice.finish_reason, "logprobs": logprobs}


# ----------------------------------------------------------------------------------------------------------- prompts


@pytest.mark.parametrize(
    ("prompts", "n"), [(PROMPTS, 2), ([list(CODEC.encode(prompt)) for prompt in PROMPTS], 1)], ids=["text", "ids"]
)
async def test_several_prompts_are_answered_in_their_order(prompts, n):
    async with talking(FakeEngine(batch=16)) as server:
        asked = {"prompt": prompts, "n": n, "seed": 5, "logprobs": 1}
        done = await server.client.completions.create(**ASK | asked)
        assert [choice.index for choice in done.choices] == list(range(3 * n))
        assert [choice.text for choice in done.choices] == [text_of(server.engine, 6, i) for i in range(n)] * 3
        assert [choice.seed for choice in done.choices] == list(range(5, 5 + n)) * 3
        sent = sorted(request.token_ids for request in server.engine.requests)
        assert sent == sorted(tuple(CODEC.encode(prompt)) for prompt in PROMPTS)
        assert done.usage.prompt_tokens == sum(map(len, sent))
        assert done.usage.completion_tokens == 18 * n
        assert done.usage.prompt_tokens_details.cached_tokens == 3
        choices, events = await streamed(server, **asked, stream_options={"include_usage": True})
        assert all(same(choice, choices[choice.index]) for choice in done.choices)
        assert (len(choices), events[-1].choices, events[-1].usage) == (3 * n, [], done.usage)
        assert all(event.usage is None for event in events[:-1])
        assert len({event.id for event in events}) == 1
        assert server.engine.load.free_pages == server.engine.facts.total_pages


async def test_one_refused_prompt_releases_the_others():
    engine = FakeEngine(step_seconds=0.01)
    async with talking(engine) as server:
        for prompts in (["a", "b", ""], ["a", "b", [10**6]]):
            for stream in (False, True):
                with pytest.raises(openai.BadRequestError, match=r"prompt\[2\]"):
                    await server.client.completions.create(model="fake", prompt=prompts, max_tokens=3000, stream=stream)
                await until(lambda: engine.load.free_pages == engine.facts.total_pages and not server.app.driver.live())
        assert metric(server, "client_disconnects_total") == 0
        assert metric(server, "admission_rejected_total", reason="invalid") == 4


async def test_every_prompt_takes_a_place_in_the_queue():
    engine = FakeEngine(batch=1)
    engine.gate.clear()
    async with talking(engine, max_queue_requests=2) as server:
        with pytest.raises(openai.RateLimitError, match=r"prompt\[[23]\]: "):
            await server.client.completions.create(model="fake", prompt=["a", "b", "c", "d"])
        engine.gate.set()
        await until(lambda: engine.load.free_pages == engine.facts.total_pages and not server.app.driver.live())
        assert len((await server.client.completions.create(model="fake", prompt=["a", "b"])).choices) == 2


async def test_a_fault_of_one_prompt_ends_all():
    engine = FakeEngine(step_seconds=0.005)
    engine.poison = {9}
    async with talking(engine) as server:
        for stream in (False, True):
            answer = await server.http.post(
                "/v1/completions", json={"prompt": [[5], [9]], "max_tokens": 3000, "stream": stream}
            )
            assert answer.status_code == (200 if stream else 500)
            assert "poisoned" in answer.text
            assert "[DONE]" not in answer.text
            await until(lambda: engine.load.free_pages == engine.facts.total_pages and not server.app.driver.live())


@pytest.mark.parametrize("stream", [False, True])
async def test_who_leaves_frees_the_pages_of_all_prompts(stream):
    engine = FakeEngine(step_seconds=0.005)
    async with talking(engine) as server:
        body = {"prompt": ["a", "b", "c"], "max_tokens": 3000, "stream": stream}
        async with httpx.AsyncClient(base_url=server.http.base_url) as http:
            call = asyncio.ensure_future(
                http.send(http.build_request("POST", "/v1/completions", json=body), stream=stream)
            )
            await until(lambda: engine.load.num_running == 3)
            if stream:
                await call
            else:
                call.cancel()
        await until(lambda: engine.load.free_pages == engine.facts.total_pages)
        assert metric(server, "client_disconnects_total") == 3


async def test_a_continued_stream_has_one_prompt(server):
    header = {"Last-Event-ID": "fa4e-7-0-1:0000000000000000"}
    body = {"prompt": ["a", "b"], "stream": True}
    answer = await server.http.post("/v1/completions", json=body, headers=header)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "Last-Event-ID")


# -------------------------------------------------------------------------------------------------------------- echo


@pytest.mark.parametrize(("form", "n"), [("text", 2), ("ids", 1), ("texts", 2)])
async def test_an_echo_with_logprobs(form, n):
    async with talking(FakeEngine(batch=16)) as server:
        text = "abab €a a"
        ids = CODEC.encode(text)
        prompt = {"text": text, "ids": list(ids), "texts": [text, text]}[form]
        asked = {"prompt": prompt, "n": n, "echo": True, "logprobs": 2}
        done = await server.client.completions.create(**ASK | asked)
        assert len(done.choices) == n * (2 if form == "texts" else 1)
        for choice in done.choices:
            new = server.engine.expected(6, choice.index % n)
            assert choice.text == text + CODEC.decode(new)
            found = choice.logprobs
            assert len(found.tokens) == len(ids) + 6
            assert found.token_logprobs == [None, *(logprob_of(token, 0).logprob for token in (*ids[1:], *new))]
            assert found.top_logprobs[0] is None
            assert [len(top) for top in found.top_logprobs[1:]] == [2] * (len(ids) + 5)
            assert found.text_offset[len(ids) :] == [len(text) + i for i in range(6)]
            for token, offset in zip(found.tokens, found.text_offset, strict=True):
                assert token.startswith("token_id:") or choice.text[offset:].startswith(token)
        assert done.usage.completion_tokens == 6 * len(done.choices)
        choices, _ = await streamed(server, **asked)
        assert all(same(choice, choices[choice.index]) for choice in done.choices)


async def test_an_echo_without_logprobs_is_the_prompt_as_it_was_sent(server):
    done = await server.client.completions.create(**ASK, prompt="ab €", echo=True)
    assert (done.choices[0].text, done.choices[0].logprobs) == ("ab €" + text_of(server.engine, 6), None)
    choices, _ = await streamed(server, prompt="ab €", echo=True)
    assert same(done.choices[0], choices[0])


async def test_only_the_prompt_is_scored(server):
    ids = list(CODEC.encode("abab a"))
    asked = {"model": "fake", "prompt": ids, "echo": True, "max_tokens": 0, "logprobs": 1}
    done = await server.client.completions.create(**asked)
    [choice] = done.choices
    assert (choice.text, choice.finish_reason) == ("abab a", "length")
    assert choice.logprobs.token_logprobs == [None, *(logprob_of(token, 0).logprob for token in ids[1:])]
    assert (done.usage.prompt_tokens, done.usage.completion_tokens) == (len(ids), 0)
    assert done.usage.total_tokens == len(ids)
    choices, events = await streamed(server, **asked, stream_options={"include_usage": True})
    assert same(choice, choices[0])
    assert events[-1].usage == done.usage
    [plain] = (await server.client.completions.create(**asked | {"logprobs": None})).choices
    assert (plain.text, plain.logprobs) == ("abab a", None)


async def test_other_outputs_wait_for_the_logprobs_of_the_prompt():
    """Only the first event of output 0 has them, whichever output is the first to have a token."""

    def delta(index, **fields):
        return TokenEvent(request_id="r", index=index, token_ids=(7,), texts=("x",), logprobs=(Logprob(0.0),), **fields)

    finished = ended()
    told = [delta(1), delta(1), delta(0, prompt_logprobs=(None, Logprob(0.0)))]
    told += [TokenEvent(request_id="r", index=index, finished=finished) for index in (1, 0)]
    body = CompletionBody(prompt="ab", n=2, echo=True, logprobs=0)
    answers = answering(TextAnswers, body, token_ids=CODEC.encode("ab"))
    events = [event async for some in answers.events(each(told)) for event in some]
    assert {event["id"] for event in events} == {"cmpl-r"}
    texts = {index: [e["choices"][0]["text"] for e in events if e["choices"][0]["index"] == index] for index in (0, 1)}
    assert texts == {0: ["ab", "x", ""], 1: ["ab", "x", "x", ""]}


# ------------------------------------------------------------------------------------------------------------- usage


@pytest.mark.parametrize(
    ("path", "prompt"), [("completions", "ab"), ("completions", ["ab", "b a"]), ("chat", None)], ids=str
)
async def test_every_chunk_has_the_usage_so_far(path, prompt):
    async with talking(FakeEngine(batch=16)) as server:
        options = {"include_usage": True, "continuous_usage_stats": True}
        asked = ASK | {"n": 2, "stream": True, "stream_options": options}
        if path == "chat":
            events = await server.client.chat.completions.create(**asked, messages=[{"role": "user", "content": "u"}])
        else:
            events = await server.client.completions.create(**asked, prompt=prompt)
        usages = [event.usage async for event in events]
        assert all(usages)
        counts = [usage.completion_tokens for usage in usages]
        assert counts == sorted(counts)
        assert (counts[0], counts[-1], counts[-2]) == (3, usages[-1].completion_tokens, usages[-1].completion_tokens)
        assert usages[-2].prompt_tokens == usages[-1].prompt_tokens > 0
        assert all(usage.total_tokens == usage.prompt_tokens + usage.completion_tokens for usage in usages)
        asked["stream_options"] = {"continuous_usage_stats": True}
        events = await server.client.completions.create(**asked, prompt="ab")
        assert not [event.usage async for event in events if event.usage]


# -------------------------------------------------------------------------------------------- statistics of drafting


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
async def test_statistics_of_drafting_where_they_are_asked_for(server, path):
    body = ASK | ({"prompt": "ab"} if path == "completions" else {"messages": [{"role": "user", "content": "u"}]})
    plain = (await server.http.post(f"/v1/{path}", json=body)).json()
    assert "metrics" not in plain
    assert "speculation_stats" not in plain["choices"][0]
    body["return_speculation_stats"] = True
    done = (await server.http.post(f"/v1/{path}", json=body)).json()
    assert done["choices"][0]["speculation_stats"] == {
        "rounds": 2,
        "drafted": 8,
        "accepted": 4,
        "accepted_per_position": [2, 2],
        "acceptance_length": 3.0,
        "gain_ratio": 1.5,
    }
    assert done["metrics"]["speculative_decoding"]["acceptance_histogram"] == [0, 0, 2]
    for options in ({}, {"stream_options": {"include_usage": True}}):
        raw = (await server.http.post(f"/v1/{path}", json=body | {"stream": True} | options)).text
        events = [httpx.Response(200, text=line[6:]).json() for line in raw.splitlines() if line.startswith("data: {")]
        assert [event["metrics"] for event in events if "metrics" in event] == [done["metrics"]]
        assert "metrics" in events[-1]
    two = (await server.http.post(f"/v1/{path}", json=body | {"n": 2})).json()
    assert "metrics" not in two
    assert len([choice["speculation_stats"] for choice in two["choices"]]) == 2
