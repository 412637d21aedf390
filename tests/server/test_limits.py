"""The limits of a request: the same over gRPC and HTTP, all told at once, and errors that fit where they travel."""

from __future__ import annotations

import asyncio

import pytest
from google.rpc import error_details_pb2

from pilotfish.client import InvalidRequestError
from pilotfish.server.admission.status import MAX_MESSAGE, clipped
from pilotfish.v1 import generation_pb2 as pb
from tests.server.fake_engine import FakeEngine
from tests.server.http.interfaces import talking
from tests.server.test_generate import detail, error_of
from tests.serving import grpc_client, until

BIAS = dict.fromkeys(range(3), 1.0)
LOWERED = {
    "max_prompt_tokens": 3,
    "max_output_tokens": 9,
    "max_n": 2,
    "max_stops": 1,
    "max_stop_length": 2,
    "max_logprobs": 2,
    "max_total_logprobs": 10,
    "max_logit_bias": 2,
    "max_structure_bytes": 3,
    "max_choices": 1,
}
# For each bound a request that goes beyond it, in the words of each door; and what both say of it.
BEYOND = [
    ({"prompt": "qxqx"}, {"prompt": "qxqx"}, "prompt has 4 tokens; the limit is 3"),
    ({"stopping": {"max_tokens": 10}}, {"max_tokens": 10}, "max_tokens is 10; expected 1 to 9"),
    ({"sampling": {"n": 3}}, {"n": 3}, "n is 3; expected 1 to 2"),
    ({"stopping": {"stop": ["x", "y"]}}, {"stop": ["x", "y"]}, "stop has 2 strings; the limit is 1"),
    (
        {"stopping": {"stop_token_ids": [1, 2]}},
        {"stop_token_ids": [1, 2]},
        "stop_token_ids has 2 ids; the limit is 1",
    ),
    ({"stopping": {"stop": ["xyz"]}}, {"stop": "xyz"}, "stop[0] has 3 characters; expected 1 to 2"),
    (
        {"output": {"logprobs": True, "top_logprobs": 3}, "stopping": {"max_tokens": 2}},
        {"logprobs": 3, "max_tokens": 2},
        "logprobs is 3; expected 0 to 2",
    ),
    (
        {"output": {"logprobs": True, "top_logprobs": 1}, "stopping": {"max_tokens": 3}, "sampling": {"n": 2}},
        {"logprobs": 1, "max_tokens": 3, "n": 2},
        "logprobs requests 12 log-probabilities; the limit is 10",
    ),
    (
        {"sampling": {"logit_bias": BIAS}},
        {"logit_bias": {str(token): bias for token, bias in BIAS.items()}},
        "logit_bias has 3 tokens; the limit is 2",
    ),
    ({"guided": {"regex": "abcd"}}, {"guided_regex": "abcd"}, "guided_regex has 4 bytes; the limit is 3"),
    (
        {"guided": {"choice": {"choices": ["a", "b"]}}},
        {"guided_choice": ["a", "b"]},
        "guided_choice has 2 texts; expected 1 to 1",
    ),
]


async def violations_of(server, **fields):
    """What is wrong with a request, as the details of its error tell it."""
    error = await error_of(server.inference.Generate(pb.GenerateRequest(**{"prompt": "ab"} | fields)))
    assert error.code().name == "INVALID_ARGUMENT"
    return detail(error, error_details_pb2.BadRequest).field_violations


async def test_a_context_that_is_too_short_has_a_reason_too(server):
    server.engine.max_model_len = 100
    reason = "CONTEXT_LENGTH_EXCEEDED"
    too_long = [("x" * 200, {}, reason), ([1] * 200, {}, reason), ("ab", {"max_tokens": 100}, reason)]
    async with grpc_client(server) as client:
        for prompt, options, expected in (*too_long, ("ab", {"max_tokens": 0}, None)):
            with pytest.raises(InvalidRequestError) as error:
                await client.generate(prompt, **options)
            assert error.value.reason == expected


async def test_seeds_of_clients_have_signs(server):
    async with grpc_client(server) as client:
        for asked, told in {-1: 2**64 - 1, -(2**63): 2**63, 7: 7}.items():
            assert (await client.generate("ab", seed=asked, top_p=0, max_tokens=1)).outputs[0].finished.seed == told
        with pytest.raises(ValueError, match="range"):
            await client.generate("ab", seed=-(2**63) - 1)


async def test_both_doors_refuse_alike():
    async with talking(**LOWERED) as server:
        for fields, body, said in BEYOND:
            [violation] = await violations_of(server, **fields)
            field = violation.field.split(".")[-1].removeprefix("top_")
            assert f"{field} {violation.description}" == said.removeprefix("guided_")
            answer = await server.http.post("/v1/completions", json={"prompt": "ab"} | body)
            assert answer.status_code == 400
            error = answer.json()["error"]
            is_prompt = "prompt" in fields  # told in the words that clients look for
            assert ("the limit is 3" in error["message"]) if is_prompt else (error["message"] == said)
        both = await violations_of(server, guided={"regex": "abcd"}, sampling={"temperature": -1})
        assert {violation.field for violation in both} == {"guided.regex", "sampling.temperature"}
        assert not server.engine.requests
        await server.inference.Generate(pb.GenerateRequest(prompt="ab"))
        (asked,) = server.engine.requests  # the default length keeps the limit, too
        assert asked.max_len(4096, server.engine.config.max_output_tokens) == len(asked.token_ids) + 9


async def test_an_error_fits_into_the_headers_that_carry_it():
    """Else a client with gRPC's defaults would see RESOURCE_EXHAUSTED, of its own making."""
    async with talking() as server:
        for fields in (
            {"sampling": {"logit_bias": dict.fromkeys(range(1200), 101.0)}},
            {"request_id": "é" * 10**5},
            {"speculation": {"proposer": "é" * 10**5}},
            {"model": "\n" * 10**5},
            {"guided": {"choice": {"choices": ["é"] * 10**4}}},
            {"stopping": {"stop": ["é" * 300] * 16}},
        ):
            error = await error_of(server.inference.Generate(pb.GenerateRequest(prompt="ab", **fields)))
            assert error.code().name in ("INVALID_ARGUMENT", "UNIMPLEMENTED", "NOT_FOUND")
            assert len(error.details().encode()) <= MAX_MESSAGE
            status = dict(error.trailing_metadata())["grpc-status-details-bin"]
            assert len(status) < 4096
        *found, last = await violations_of(server, sampling={"logit_bias": dict.fromkeys(range(200), 101.0)})
        assert last.field == "request"
        assert last.description == f"has {200 - len(found)} more violations"


def test_clipping_keeps_characters_whole():
    assert clipped("abc", 3) == "abc"
    assert clipped("ééé", 5) == "é…"
    assert clipped("a\ud800", 10) == "a\\ud800"


# ------------------------------------------------------------------------------------------------- the HTTP door


async def test_large_headers_are_refused():
    async with talking(max_header_bytes=4096) as server:
        for headers in ({"x-long": "x" * 5000}, {f"x-{i}": "x" * 40 for i in range(110)}):
            answer = await server.http.get("/health", headers=headers)
            assert answer.status_code == 431
            assert "4096" in answer.json()["error"]["message"]
            assert (await server.http.post("/v1/messages", headers=headers)).json()["type"] == "error"


async def raw(server, data):
    """Send bytes, and no more; what comes back until the server closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.app.http_port)
    writer.write(data)
    try:
        async with asyncio.timeout(20):
            return await reader.read()
    finally:
        writer.close()


async def test_a_head_that_does_not_arrive_is_not_waited_for_and_an_answer_may_take_longer():
    async with talking(FakeEngine(step_seconds=0.05), body_seconds=0.2) as server:
        head = b"POST /generate HTTP/1.1\r\nHost: [::1]\r\nContent-Type: application/json\r\n"
        heads = (b"", head, b"GET /health HTTP/1.1\r\nX: ")
        assert await asyncio.gather(*(raw(server, data) for data in heads)) == [b""] * 3
        answer = await server.http.post("/generate", json={"prompt": "ab", "max_new_tokens": 24})
        assert answer.status_code == 200
        await until(lambda: not server.app.driver.live())
