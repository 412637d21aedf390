"""The embedded pair with its engine in a process of its own: the tokens of a thread, and kill -9 under load."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from contextlib import asynccontextmanager

import pytest

import client
from server.lifecycle import State
from server.model import ServedModel
from tests.server.test_life import health_of, metric
from tests.serving import http_client, serving_embedded, until

SETTINGS = {
    "max_model_len": 512,
    "speculation": "fixed",
    "max_step_ms": 1e6,  # under rejection tokens hang on K, and how fast this machine is must not
}
ASKED = [
    ("def mean(values):\n", {}),
    ("import os\n\n", {"temperature": 0.9, "seed": 7, "n": 2, "logprobs": True, "top_logprobs": 2}),
    ("class Queue:\n", {"temperature": 0.7, "seed": 3, "top_p": 0.9, "stop": ["return"]}),
    ("x = ", {"regex": "[0-9]{3} [a-c]+"}),
    ("for i in range(", {"verification": "rejection", "seed": 1, "temperature": 0.8, "proposer": "model"}),
]


@asynccontextmanager
async def front_ends(**where):
    """A server, and a client at each of its doors."""
    async with serving_embedded(**where, **SETTINGS) as server, http_client(server) as http:
        address = f"127.0.0.1:{server.app.grpc_port}"
        async with client.AsyncClient(address, retry=None) as connection:
            yield server, connection, http


async def outputs_of(connection):
    """What every kind of request gets, at once."""
    calls = [connection.generate(prompt, max_tokens=20, **options) for prompt, options in ASKED]
    return [
        [(output.text, output.token_ids, output.finished.finish_reason, output.logprobs) for output in whole.outputs]
        for whole in await asyncio.gather(*calls)
    ]


async def texts_over_http(http):
    """Streamed and whole."""
    body = {"prompt": ASKED[0][0], "max_tokens": 20, "temperature": 0}
    whole = (await http.post("/v1/completions", json=body)).json()["choices"][0]["text"]
    async with http.stream("POST", "/v1/completions", json=body | {"stream": True}) as answer:
        lines = [line.removeprefix("data: ") async for line in answer.aiter_lines() if line.startswith("data: {")]
    return whole, "".join(json.loads(line)["choices"][0]["text"] for line in lines)


async def last_line_over_http(http):
    """What a stream over HTTP ends with."""
    body = {"prompt": "a", "max_tokens": 400, "temperature": 0, "stream": True, "ignore_eos": True}
    async with http.stream("POST", "/v1/completions", json=body) as answer:
        assert answer.status_code == 200
        return [line async for line in answer.aiter_lines() if line][-1]


# `make test` has kills around a fake engine, the same tokens after one without a process, and a process in the demo.
@pytest.mark.slow
async def test_the_same_tokens_and_again_after_a_kill():
    async with front_ends(load=ServedModel.load) as (_, connection, http):
        wanted, texts = await outputs_of(connection), await texts_over_http(http)
    async with front_ends(engine_process=True) as (server, connection, http):
        assert await outputs_of(connection) == wanted
        assert await texts_over_http(http) == texts
        await killed_under_load(server, connection, http)
        assert await outputs_of(connection) == wanted
        assert await texts_over_http(http) == texts
        engine = server.app.driver.model.engine
        await until(lambda: engine.free_pages == engine.total_pages)
        assert not server.app.driver.live()


async def killed_under_load(server, connection, http):
    calls = [connection.generate("a", max_tokens=400, ignore_eos=True) for _ in range(3)]
    running = [asyncio.ensure_future(call) for call in calls]
    over_http = asyncio.ensure_future(last_line_over_http(http))
    engine = server.app.driver.model.engine
    await until(lambda: engine.num_running == 4, 30)
    os.kill(server.app.host.pid, signal.SIGKILL)
    answers = await asyncio.gather(*running)
    assert "[DONE]" in await over_http
    await until(lambda: server.app.lifecycle.state is State.READY, 90)
    assert await health_of(server) == "SERVING"
    assert len({answer.token_ids for answer in answers}) == 1
    assert {answer.finished.interruptions for answer in answers} == {1}
    assert answers[0].token_ids == (await connection.generate("a", max_tokens=400, ignore_eos=True)).token_ids
    assert metric(server, "engine_restarts_total") == 1
