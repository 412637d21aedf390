"""What a router is told of a prompt: the tokens that the same request is run with, or the error that it would get."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from tests.server.http.interfaces import on_the_shared_server
from tests.server.test_control import ALICE, BOB, LONG, bearer, held, holding
from tests.server.test_control import tokens as tokens  # noqa: PLC0414  # a fixture
from tests.server.test_life import metric
from tests.serving import http_client, serving

pytestmark = on_the_shared_server

TURNS = [{"role": "user", "content": "the quick"}, {"role": "assistant", "content": "fox"}]
PATHS = ("/v1/completions", "/v1/chat/completions")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "the quick brown fox"}),
        ("/v1/completions", {"prompt": [5, 6, 7]}),
        ("/v1/completions", {"prompt": "a" * 3000, "stream": True, "priority": 3}),
        ("/v1/chat/completions", {"messages": TURNS, "cache_salt": "mine", "temperature": 0.5}),
    ],
)
async def test_the_tokens_are_those_of_the_same_request(server, path, body):
    body = {"model": "fake", "max_tokens": 3, **body}
    told = await server.http.post(f"{path}/render", json=body)
    assert told.status_code == 200
    assert not server.engine.requests, "it only asked"
    [rendered] = told.json() if path == "/v1/completions" else [told.json()]
    await server.http.post(path, json=body)
    assert tuple(rendered["token_ids"]) == server.engine.requests[-1].token_ids
    prefix, _, number = rendered.pop("request_id").partition("-")
    assert (prefix, len(number)) == ("cmpl" if path == "/v1/completions" else "chatcmpl", 24)
    assert rendered == {
        "model": "fake",
        "token_ids": rendered["token_ids"],
        "features": None,
        "cache_salt": body.get("cache_salt"),
        "priority": body.get("priority", 0),
    }


async def test_each_of_several_prompts_is_rendered(server):
    body = {"prompt": ["the quick", "brown fox jumps"], "max_tokens": 3}
    told = (await server.http.post("/v1/completions/render", json=body)).json()
    assert len({rendered["request_id"] for rendered in told}) == 2
    await server.http.post("/v1/completions", json=body)
    assert sorted(tuple(rendered["token_ids"]) for rendered in told) == sorted(
        request.token_ids for request in server.engine.requests
    )


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "wrong",
    [
        {"model": "other"},
        {"temperature": -1, "top_p": 2},
        {"temperature": "hot", "priority": 1000},
        {"nonsense": 1},
        {"prompt": None, "messages": None},
        {"prompt": [10**6], "messages": []},
        {"prompt": "a" * 10**6, "messages": [{"role": "user", "content": "a" * 10**6}]},
    ],
)
async def test_what_generates_nothing_is_refused_alike(server, path, wrong):
    field = "prompt" if path == "/v1/completions" else "messages"
    body = {field: "ab" if field == "prompt" else TURNS, **wrong}
    body.pop("messages" if field == "prompt" else "prompt", None)
    told, wanted = [await server.http.post(where, json=body) for where in (f"{path}/render", path)]
    assert told.status_code == wanted.status_code >= 400
    assert told.json() == wanted.json()


async def test_a_model_without_a_template_has_no_conversations_to_render():
    async with serving() as plain, http_client(plain) as http:
        told = await http.post("/v1/chat/completions/render", json={"messages": TURNS})
    assert told.status_code == 400
    assert told.json()["error"]["message"].startswith("messages is a conversation, and the model has no chat template")


async def test_it_counts_as_a_request_of_its_caller(tokens):
    async with holding(token_file=tokens, max_requests_per_token=1) as (server, codec):
        url = f"http://127.0.0.1:{server.app.http_port}"
        async with httpx.AsyncClient(base_url=url) as http:

            def render(token, length):
                body = {"prompt": "a" * length}
                return http.post("/v1/completions/render", json=body, headers=dict(bearer(token)))

            live = await held(codec, lambda: render(ALICE, LONG))
            refused, served = await asyncio.gather(render(ALICE, 2), render(BOB, 2))
            assert refused.status_code == 429
            assert refused.json()["error"]["message"] == "alice has 1 live requests; the limit is 1"
            assert metric(server, "admission_rejected_total", reason="quota") == 1
            assert served.status_code == 200
            codec.gate.set()
            assert len((await live).json()[0]["token_ids"]) == LONG
            assert (await render(ALICE, 2)).status_code == 200
            assert (await http.post("/v1/completions/render", json={"prompt": "a"})).status_code == 401
