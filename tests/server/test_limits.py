"""The limits of a request: the same over gRPC and HTTP, all told at once, and errors that fit where they travel."""

from __future__ import annotations

import asyncio
import json

import grpc
import pytest
from google.rpc import error_details_pb2

from pilotfish.v1 import generation_pb2 as pb
from server.admission.status import MAX_MESSAGE, clipped
from tests.server.fake_engine import FakeEngine
from tests.server.http.test_gateway import talking
from tests.server.test_generate import detail
from tests.serving import until

pytestmark = pytest.mark.slow

BIAS = dict.fromkeys(range(3), 1.0)
# Each bound, lowered; a request that goes beyond it, in the words of each door; and what both say of it.
CASES = [
    ({"max_prompt_tokens": 3}, {"prompt": "qxqx"}, {"prompt": "qxqx"}, "prompt has 4 tokens; the limit is 3"),
    (
        {"max_output_tokens": 9},
        {"stopping": pb.StoppingParams(max_tokens=10)},
        {"max_tokens": 10},
        "max_tokens is 10; expected 1 to 9",
    ),
    ({"max_n": 2}, {"sampling": pb.SamplingParams(n=3)}, {"n": 3}, "n is 3; expected 1 to 2"),
    (
        {"max_stops": 1},
        {"stopping": pb.StoppingParams(stop=["x", "y"])},
        {"stop": ["x", "y"]},
        "stop has 2 strings; the limit is 1",
    ),
    (
        {"max_stops": 1},
        {"stopping": pb.StoppingParams(stop_token_ids=[1, 2])},
        {"stop_token_ids": [1, 2]},
        "stop_token_ids has 2 ids; the limit is 1",
    ),
    (
        {"max_stop_length": 2},
        {"stopping": pb.StoppingParams(stop=["xyz"])},
        {"stop": "xyz"},
        "stop[0] has 3 characters; expected 1 to 2",
    ),
    (
        {"max_logprobs": 2},
        {"output": pb.OutputOptions(logprobs=True, top_logprobs=3)},
        {"logprobs": 3},
        "top_logprobs is 3; expected 0 to 2",
    ),
    (
        {"max_total_logprobs": 100},
        {"output": pb.OutputOptions(logprobs=True, top_logprobs=1), "stopping": pb.StoppingParams(max_tokens=51)},
        {"logprobs": 1, "max_tokens": 51},
        "logprobs asks for 102 log-probabilities; the limit is 100",
    ),
    (
        {"max_logit_bias": 2},
        {"sampling": pb.SamplingParams(logit_bias=BIAS)},
        {"logit_bias": {str(token): bias for token, bias in BIAS.items()}},
        "logit_bias has 3 tokens; the limit is 2",
    ),
    (
        {"max_structure_bytes": 3},
        {"guided": pb.GuidedDecoding(regex="abcd")},
        {"guided_regex": "abcd"},
        "guided.regex has 4 bytes; the limit is 3",
    ),
    (
        {"max_choices": 1},
        {"guided": pb.GuidedDecoding(choice=pb.Choice(choices=["a", "b"]))},
        {"guided_choice": ["a", "b"]},
        "guided.choice has 2 texts; expected 1 to 1",
    ),
]


@pytest.mark.parametrize(("config", "fields", "body", "said"), CASES, ids=lambda value: str(value)[:40])
async def test_both_doors_refuse_alike(config, fields, body, said):
    async with talking(**config) as server:
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await server.inference.Generate(pb.GenerateRequest(**{"prompt": "ab"} | fields))
        assert error.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        [violation] = detail(error.value, error_details_pb2.BadRequest).field_violations
        assert f"{violation.field} {violation.description}".split(".", 1)[-1] == said.removeprefix("guided.")
        answer = await server.http.post("/v1/completions", json={"prompt": "ab"} | body)
        assert answer.status_code == 400
        assert answer.json()["error"]["message"] == said
        assert not server.engine.requests


async def test_the_default_length_of_an_output_keeps_the_limit_too():
    async with talking(max_output_tokens=9) as server:
        await server.inference.Generate(pb.GenerateRequest(prompt="ab"))
        asked = server.engine.requests[0]
        assert asked.max_len(4096, server.engine.config.max_output_tokens) == len(asked.token_ids) + 9


async def test_structure_and_numbers_are_told_together():
    async with talking(max_structure_bytes=3) as server:
        asked = {"guided": pb.GuidedDecoding(regex="abcd"), "sampling": pb.SamplingParams(temperature=-1)}
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await server.inference.Generate(pb.GenerateRequest(prompt="ab", **asked))
        found = detail(error.value, error_details_pb2.BadRequest).field_violations
        assert {v.field for v in found} == {"guided.regex", "sampling.temperature"}


@pytest.mark.parametrize(
    "fields",
    [
        {"sampling": pb.SamplingParams(logit_bias=dict.fromkeys(range(1200), 101.0))},
        {"request_id": "é" * 10**6},
        {"speculation": pb.SpeculationOptions(proposer="é" * 10**6)},
        {"model": "\n" * 10**6},
        {"guided": pb.GuidedDecoding(choice=pb.Choice(choices=["é"] * 10**5))},
        {"stopping": pb.StoppingParams(stop=["é" * 300] * 16)},
    ],
    ids=lambda fields: next(iter(fields)),
)
async def test_an_error_fits_into_the_headers_that_carry_it(fields):
    """Else a client with gRPC's defaults would see RESOURCE_EXHAUSTED, of its own making."""
    async with talking() as server:
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await server.inference.Generate(pb.GenerateRequest(prompt="ab", **fields))
        told = (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.NOT_FOUND)
        assert error.value.code() in told
        assert len(error.value.details().encode()) <= MAX_MESSAGE
        status = dict(error.value.trailing_metadata())["grpc-status-details-bin"]
        assert len(status) < 4096


async def test_what_did_not_fit_is_counted():
    async with talking() as server:
        sampling = pb.SamplingParams(logit_bias=dict.fromkeys(range(200), 101.0))
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await server.inference.Generate(pb.GenerateRequest(prompt="ab", sampling=sampling))
        *found, last = detail(error.value, error_details_pb2.BadRequest).field_violations
        assert last.field == "request"
        assert last.description == f"has {200 - len(found)} more violations"


def test_clipping_keeps_characters_whole():
    assert clipped("abc", 3) == "abc"
    assert clipped("ééé", 5) == "é…"
    assert clipped("a\ud800", 10) == "a\\ud800"


# ------------------------------------------------------------------------------------------------- the HTTP door


@pytest.mark.parametrize("headers", [{"x-long": "x" * 5000}, {f"x-{i}": "x" * 40 for i in range(110)}], ids=len)
async def test_large_headers_are_refused(headers):
    async with talking(max_header_bytes=4096) as server:
        answer = await server.http.get("/health", headers=headers)
        assert answer.status_code == 431
        assert "4096" in answer.json()["error"]["message"]


async def test_large_metadata_is_refused():
    async with talking(max_header_bytes=4096) as server:
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await server.inference.Generate(pb.GenerateRequest(prompt="ab"), metadata=[("x-long", "x" * 8000)])
        assert error.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED


async def raw(server, data):
    """Send bytes, and no more; what comes back until the server closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.app.http_port)
    writer.write(data)
    try:
        async with asyncio.timeout(20):
            return await reader.read()
    finally:
        writer.close()


@pytest.mark.parametrize(
    "data", [b"", b"POST /generate HTTP/1.1\r\nHost: localhost\r\n", b"GET /health HTTP/1.1\r\nX: "]
)
async def test_a_head_that_does_not_come_is_not_waited_for(data):
    async with talking(body_seconds=0.2) as server:
        assert await raw(server, data) == b""


async def test_a_body_that_does_not_come_is_not_waited_for():
    async with talking(body_seconds=0.2) as server:
        head = (
            b"POST /generate HTTP/1.1\r\nHost: [::1]\r\nContent-Type: application/json\r\nContent-Length: 99\r\n\r\n{"
        )
        answer = await raw(server, head)
        assert answer.startswith(b"HTTP/1.1 408")
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["message"].startswith(
            "the body took more than 0.2"
        )


async def test_the_limit_in_time_is_of_arrival_and_not_of_the_answer():
    engine = FakeEngine(step_seconds=0.05)
    async with talking(engine, body_seconds=0.2) as server:
        answer = await server.http.post("/generate", json={"prompt": "ab", "max_new_tokens": 24})
        assert answer.status_code == 200
        await until(lambda: not server.app.driver.live())
