"""`timeout` of an HTTP body is what a deadline is to gRPC: it refuses, it orders, it cuts; 504 in each case."""

from __future__ import annotations

import asyncio
import json

import openai
import pytest

from server.driver import PATIENCE_SECONDS
from tests.engine.text.test_codec import CODEC
from tests.server.fake_engine import FakeEngine
from tests.server.http.test_gateway import CHAT, talking
from tests.server.test_life import metric
from tests.server.test_order import served_for
from tests.serving import until

pytestmark = pytest.mark.slow

ASK = {"prompt": "ab"}
PATHS = [("/generate", ASK), ("/v1/completions", ASK), ("/v1/chat/completions", CHAT)]


def held(**options):
    engine = FakeEngine(batch=1, **options)
    engine.gate.clear()
    return engine


async def is_all_free(server):
    await until(lambda: not server.app.driver.live())
    return server.engine.free_pages == server.engine.total_pages


@pytest.mark.parametrize(("path", "body"), PATHS)
@pytest.mark.parametrize("stream", [False, True])
async def test_what_cannot_be_done_in_time_is_refused_before_it_begins(path, body, stream):
    engine = FakeEngine(batch=1)
    async with talking(engine) as server:
        for _ in range(50):
            served_for(server.app.driver.estimates, 100.0)
        engine.gate.clear()
        running = asyncio.ensure_future(server.http.post("/generate", json=ASK))
        await until(lambda: engine.num_running == 1)
        answer = await server.http.post(path, json=body | {"timeout": 20, "stream": stream})
        assert answer.status_code == 504
        assert answer.json()["error"]["code"] == "deadline"
        assert "by now's estimate it takes" in answer.json()["error"]["message"]
        assert answer.headers["x-should-retry"] == "false"
        assert metric(server, "admission_rejected_total", reason="deadline") == 1
        engine.gate.set()
        assert (await running).status_code == 200


async def test_a_near_timeout_goes_first():
    engine = held()
    async with talking(engine) as server:
        calls = [asyncio.ensure_future(server.http.post("/generate", json=ASK))]
        await until(lambda: engine.num_running == 1)
        for i, timeout in enumerate([None, 9, 10 * PATIENCE_SECONDS, 5.5]):
            body = ASK | {"timeout": timeout, "seed": i}
            calls.append(asyncio.ensure_future(server.http.post("/generate", json=body)))
            await until(lambda: len(server.app.driver.queue) == i + 1)  # noqa: B023  # awaited before i moves on
        engine.gate.set()
        assert {answer.status_code for answer in await asyncio.gather(*calls)} == {200}
        assert [request.sampling.seed for request in engine.requests[1:]] == [3, 1, 0, 2]


def endless(path):
    return {"max_new_tokens" if path == "/generate" else "max_tokens": 3000}


@pytest.mark.parametrize(("path", "body"), PATHS)
async def test_an_answer_that_is_late_is_cut_and_its_pages_are_freed(path, body):
    async with talking(FakeEngine(step_seconds=0.01)) as server:
        answer = await server.http.post(path, json=body | endless(path) | {"timeout": 0.2})
        assert answer.status_code == 504
        assert answer.json()["error"]["code"] == "deadline"
        assert await is_all_free(server)
        assert metric(server, "requests_total", finish_reason="deadline") == 1
        assert metric(server, "client_disconnects_total") == 0


@pytest.mark.parametrize(("path", "body"), PATHS)
async def test_a_stream_that_is_late_ends_with_that_error(path, body):
    async with talking(FakeEngine(step_seconds=0.01)) as server:
        answer = await server.http.post(path, json=body | endless(path) | {"timeout": 0.3, "stream": True})
        assert answer.status_code == 200
        events = [json.loads(line.removeprefix("data: ")) for line in answer.text.split("\n\n") if line]
        assert events[-1]["error"]["code"] == "deadline"
        text = "".join(text_of(event) for event in events[:-1])
        assert text == CODEC.decode(server.engine.expected(3000))[: len(text)] != ""
        assert await is_all_free(server)
        assert metric(server, "requests_total", finish_reason="deadline") == 1
        assert metric(server, "client_disconnects_total") == 0


def text_of(event):
    if "choices" not in event:
        return event["text"]
    [choice] = event["choices"]
    return choice["text"] if "text" in choice else choice["delta"].get("content", "")


async def test_what_is_late_in_the_queue_is_forgotten():
    engine = held()
    async with talking(engine) as server:
        running = asyncio.ensure_future(server.http.post("/generate", json=ASK))
        await until(lambda: engine.num_running == 1)
        answer = await server.http.post("/generate", json=ASK | {"timeout": 0.1})
        assert answer.status_code == 504
        assert not server.app.driver.queue
        engine.gate.set()
        assert (await running).status_code == 200
        assert len(engine.requests) == 1


async def test_one_that_is_in_time_is_served_as_ever():
    async with talking() as server:
        answers = [(await server.http.post("/generate", json=ASK | more)).json() for more in ({}, {"timeout": 60})]
        assert answers[0]["generated_text"] == answers[1]["generated_text"] != ""


@pytest.mark.parametrize("seconds", [0, -1, "5", True, [1]])
async def test_what_is_no_time_is_refused(seconds):
    async with talking() as server:
        answer = await server.http.post("/generate", json=ASK | {"timeout": seconds})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "timeout")


async def test_openais_client_does_not_send_it_again():
    async with talking(FakeEngine(step_seconds=0.01)) as server:
        client = server.client.with_options(max_retries=2)
        with pytest.raises(openai.InternalServerError, match="timeout passed") as error:
            await client.completions.create(model="fake", max_tokens=3000, extra_body={"timeout": 0.1}, **ASK)
        assert error.value.status_code == 504
        assert len(server.engine.requests) == 1
