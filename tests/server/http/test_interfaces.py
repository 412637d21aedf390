"""Laws of all interfaces: a stream is the answer in parts, refusals have their form, and whoever leaves frees all."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from pilotfish.server.lifecycle import State
from tests.engine.text.test_codec import CODEC
from tests.server.fake_engine import FakeEngine
from tests.server.http.interfaces import INTERFACES, events_in, on_the_shared_server, talking, text_of
from tests.server.test_life import metric
from tests.serving import until

CODES = {  # of a status; the last is that of Anthropic's API
    400: ("invalid_request_error", "invalid_request_error"),
    404: ("invalid_request_error", "not_found_error"),
    413: ("invalid_request_error", "request_too_large"),
    429: ("rate_limit_error", "rate_limit_error"),
    500: ("server_error", "api_error"),
    503: ("server_error", "overloaded_error"),
    504: ("server_error", "timeout_error"),
}
each_interface = pytest.mark.parametrize("name", INTERFACES)


def refused(name, answer, status, *said):
    """Check the form of a refusal."""
    assert answer.status_code == status, answer.text
    told = answer.json()
    assert told.get("type") == ("error" if name == "messages" else None)
    assert told["error"]["type"] == CODES[status][name == "messages"]
    assert all(text in told["error"]["message"] for text in said), told


async def all_is_free(server):
    await until(lambda: not server.app.driver.live())
    assert server.engine.load.free_pages == server.engine.facts.total_pages


@on_the_shared_server
@each_interface
async def test_a_stream_joins_to_the_whole(server, name):
    about = INTERFACES[name]
    for tokens in (1, 20):
        whole = about.text((await server.http.post(about.path, json=about.asking(tokens))).json())
        assert whole == text_of(server.engine, tokens)
        raw = (await server.http.post(about.path, json=about.asking(tokens, stream=True))).text
        assert "".join(map(about.piece, events_in(raw))) == whole
        assert raw.endswith("\n\ndata: [DONE]\n\n") == (name not in ("responses", "messages"))


# ----------------------------------------------------------------------------------------------------------- refusals


# Of a context of 100 tokens: a prompt of too many, and where too long an answer is refused, prompt and answer together.
_PROMPT = "This model's maximum context length is 100 tokens. However, your {0} resulted in {1} tokens; the limit is 99"
_BOTH = "However, you requested {0} tokens ({1} in the {2}, 103 in the completion)"
EXCESS = {
    "generate": ("prompt", _PROMPT.format("prompt", 120), _BOTH.format(104, 1, "prompt")),
    "completions": ("prompt", _PROMPT.format("prompt", 120), _BOTH.format(104, 1, "prompt")),
    "chat": ("messages", _PROMPT.format("messages", 121), _BOTH.format(105, 2, "messages")),
    "responses": ("input", _PROMPT.format("messages", 121), None),
    "messages": (None, "prompt is too long: 121 tokens > 99 maximum", None),
}
LONG = {"prompt": "x" * 120, "messages": [{"role": "user", "content": "x" * 120}], "input": "x" * 120}


@on_the_shared_server
@each_interface
async def test_a_context_that_is_too_short_has_the_wording_of_the_api(server, name, monkeypatch):
    monkeypatch.setattr(server.engine, "max_model_len", 100)
    about, (param, said_of_prompt, said_of_both) = INTERFACES[name], EXCESS[name]
    asked = {field: LONG[field] for field in about.body.keys() & LONG.keys()}
    for fields, field, said in ((asked, param, said_of_prompt), ({about.limit: 103}, about.limit, said_of_both)):
        answer = await server.http.post(about.path, json=about.asking(5) | fields)
        if said is None:
            assert answer.status_code == 200
            continue
        refused(name, answer, 400, said)
        code = None if name == "messages" else "context_length_exceeded"
        assert (answer.json()["error"].get("param"), answer.json()["error"].get("code")) == (param and field, code)


@on_the_shared_server
@each_interface
async def test_seeds_have_64_bits_and_a_top_p_of_0_is_taken(server, name):
    about, seeds = INTERFACES[name], {-1: 2**64 - 1, -(2**63): 2**63, 2**64 - 1: 2**64 - 1, 0: 0}
    for asked in seeds:
        assert (await server.http.post(about.path, json=about.asking(2, seed=asked, top_p=0))).status_code == 200
    for asked in (-(2**63) - 1, 2**64):
        refused(name, await server.http.post(about.path, json=about.asking(2, seed=asked)), 400, "seed is")
    found = [request.sampling for request in server.engine.requests]
    assert [(sampling.seed, sampling.top_p) for sampling in found] == [(seed, 0.0) for seed in seeds.values()]


NUMBERS = [{"temperature": t, "top_p": p} for t, p in ((0, 0), (2, 1), (1, 0.0), (0.5, 1))]
PENALTIES = [{"presence_penalty": x, "frequency_penalty": -x} for x in (-2, 2, 0)]
ABOUT_CALLERS = {"user": "u", "metadata": {"a": "b"}, "store": True, "service_tier": "auto", "safety_identifier": "s"}
STOPS = [{"stop": stop} for stop in (None, "x", ["a", "b", "c", "d"], [])]
OF_OPENAI = [
    *NUMBERS,
    *PENALTIES,
    *STOPS,
    ABOUT_CALLERS,
    {"logit_bias": {"5": -100, "6": 100}},
    {"n": 8},
    {"stream": None},
]
DOCUMENTED = {  # what each API's documentation allows, at its bounds
    "completions": [*OF_OPENAI, {"logprobs": 0}, {"logprobs": 5}, {"best_of": 1}, {"stream_options": None}],
    "chat": [
        *OF_OPENAI,
        *({"logprobs": True, "top_logprobs": top} for top in (0, 20, None)),
        {"logprobs": False, "stream_options": None, "tools": None, "response_format": {"type": "text"}},
        {"reasoning_effort": "high", "verbosity": "low", "modalities": ["text"], "parallel_tool_calls": True},
    ],
    "responses": [*NUMBERS, ABOUT_CALLERS, {"top_logprobs": 0, "truncation": "disabled", "background": False}],
    "messages": [
        *({"temperature": t, "top_p": p, "top_k": k} for t, p, k in ((0, 0, 0), (1, 1, 500))),
        {"metadata": {"user_id": "u"}, "service_tier": "standard_only", "stop_sequences": ["a", "b"]},
    ],
}


@on_the_shared_server
@pytest.mark.parametrize("name", DOCUMENTED)
async def test_what_the_api_documents_is_taken(server, name):
    about = INTERFACES[name]
    for fields in DOCUMENTED[name]:
        answer = await server.http.post(about.path, json=about.asking(2) | fields)
        assert answer.status_code == 200, (fields, answer.text)


async def test_every_path_answers_head_as_get_and_names_its_methods():
    async with talking() as server:
        described = (await server.http.get("/openapi.json")).json()["paths"]
        paths = {path: set(map(str.upper, methods)) for path, methods in described.items()}
        paths |= {"/": {"GET"}, "/openapi.json": {"GET"}, "/v1/responses/x": {"GET", "DELETE"}}
        for path, methods in paths.items():
            path = path.replace("{name}", "fake")
            if "GET" in methods:
                whole, head = await server.http.get(path), await server.http.head(path)
                assert (head.status_code, head.content) == (whole.status_code, b""), path
                assert head.headers["content-type"] == whole.headers["content-type"], path
            wrong = await server.http.patch(path)
            assert wrong.status_code == 405, path
            allowed = methods | ({"HEAD"} if "GET" in methods else set())
            assert sorted(wrong.headers["allow"].split(", ")) == sorted(allowed), path
            assert (wrong.json().get("type") == "error") == path.startswith("/v1/messages")


@each_interface
async def test_refusals_have_the_form_of_the_interface(name):
    about = INTERFACES[name]
    async with talking(max_message_bytes=5000) as server:

        async def post(**how):
            return await server.http.post(about.path, **how)

        refused(name, await post(json=about.asking(model="other")), 404, "'other'")
        refused(name, await post(content=b"{", headers={"content-type": "application/json"}), 400, "not valid JSON")
        refused(name, await post(json=about.asking(user="a" * 6000)), 413, "5000 bytes")
        refused(name, await post(json=about.asking(temprature=1)), 400, "temprature is 1; this field is not supported")
        for seconds in (0, -1, "5", True, [1]):
            refused(name, await post(json=about.asking(timeout=seconds)), 400, "timeout is")
        assert not server.engine.requests
        server.engine.poison = set(CODEC.encode("ab u"))
        broken = await post(json=about.asking(5))
        refused(name, broken, 500, "poisoned")
        assert broken.headers["x-should-retry"] == "false"
        server.engine.poison = set()
        assert (await post(json=about.asking(5, timeout=60))).status_code == 200


@pytest.mark.parametrize("name", ["completions", "messages"])  # the code behind all is the same
async def test_a_full_queue_is_429_with_a_time_to_come_again(name):
    about, engine = INTERFACES[name], FakeEngine(batch=1)
    engine.gate.clear()
    async with talking(engine, max_queue_requests=1) as server:
        ask = about.asking(4)
        running = asyncio.ensure_future(server.http.post(about.path, json=ask))
        await until(lambda: engine.load.num_running == 1)
        queued = asyncio.ensure_future(server.http.post(about.path, json=ask))
        await until(lambda: len(server.app.driver.queue) == 1)
        for stream in (False, True):
            answer = await server.http.post(about.path, json=ask | {"stream": stream})
            refused(name, answer, 429)
            assert answer.headers["retry-after"] == "1"
        queued.cancel()  # a caller that leaves while queued is forgotten
        await until(lambda: not server.app.driver.queue)
        engine.gate.set()
        assert (await running).status_code == 200
        assert len(engine.requests) == 1


async def test_starting_and_draining_are_503():
    release, loop = asyncio.Event(), asyncio.get_running_loop()

    def load(_config, _progress):
        asyncio.run_coroutine_threadsafe(release.wait(), loop).result(20)
        raise InterruptedError

    async with talking(load=load, ready=False) as server:
        for name, about in INTERFACES.items():
            refused(name, await server.http.post(about.path, json=about.asking()), 503, "still loading")
        server.app.stop()
        release.set()
    async with talking(FakeEngine(step_seconds=0.01)) as server:
        stream = await server.client.completions.create(model="fake", prompt="a", max_tokens=300, stream=True)
        server.app.stop()
        await until(lambda: server.app.lifecycle.state is State.DRAINING)
        for name, about in INTERFACES.items():
            refused(name, await server.http.post(about.path, json=about.asking()), 503, "shutting down")
        assert [event async for event in stream][-1].choices[0].finish_reason == "length"


# ------------------------------------------------------------------------------------------- deadlines, faults, leaving


@each_interface
async def test_what_is_late_or_broken_ends_and_frees_its_pages(name):
    about = INTERFACES[name]
    async with talking(FakeEngine(step_seconds=0.01), max_engine_crashes=0) as server:
        late = await server.http.post(about.path, json=about.asking(timeout=0.2))
        refused(name, late, 504, "deadline passed")
        assert late.headers["x-should-retry"] == "false"
        await all_is_free(server)
        answer = await server.http.post(about.path, json=about.asking(timeout=0.3, stream=True))
        *pieces, end = events_in(answer.text)
        assert answer.status_code == 200
        assert "deadline passed" in about.error(end)["message"]
        text = "".join(map(about.piece, pieces))
        assert text == text_of(server.engine, 3000)[: len(text)] != ""
        await all_is_free(server)
        assert metric(server, "requests_total", finish_reason="deadline") == 2
        assert metric(server, "client_disconnects_total") == 0
        request = server.http.build_request("POST", about.path, json=about.asking(stream=True))
        broken = await server.http.send(request, stream=True)
        server.engine.fault = RuntimeError("out of memory")
        error = about.error(events_in((await broken.aread()).decode())[-1])
        assert "the engine failed" in error["message"]
        expected = "overloaded_error" if name == "messages" else "server_error"
        assert error.get("type", error.get("code")) == expected


@pytest.mark.parametrize(("name", "stream"), [(name, i % 2 == 0) for i, name in enumerate(INTERFACES)])
async def test_a_caller_that_leaves_frees_its_pages(name, stream):
    about, engine = INTERFACES[name], FakeEngine(step_seconds=0.005)
    async with talking(engine) as server:
        async with httpx.AsyncClient(base_url=server.http.base_url) as http:
            request = http.build_request("POST", about.path, json=about.asking(stream=stream))
            call = asyncio.ensure_future(http.send(request, stream=stream))
            await until(lambda: engine.load.num_running == 1 and engine.steps > 2)
            if stream:
                await call
            else:
                call.cancel()
        await until(lambda: engine.load.free_pages == engine.facts.total_pages)
        await until(lambda: metric(server, "client_disconnects_total") == 1)
        assert metric(server, "requests_total", finish_reason="cancelled") == 1
