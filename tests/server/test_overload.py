"""Far more than there is room for: everybody is served right or told when to come again, and the sums add up."""

from __future__ import annotations

import asyncio

import grpc
from google.rpc import error_details_pb2

from tests.server.fake_engine import FakeEngine
from tests.server.http.interfaces import talking
from tests.server.test_generate import collect, detail, request
from tests.server.test_life import metric
from tests.serving import serving

MANY, ROOM = 120, 16


async def outcome(server, unary):
    """The tokens of a request, or seconds after which to come again."""
    try:
        if unary:
            return tuple((await server.inference.Generate(request())).outputs[0].token_ids)
        return tuple((await collect(server.inference.GenerateStream(request())))[1])
    except grpc.aio.AioRpcError as refusal:
        error = refusal
    assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    pushback = dict(error.trailing_metadata())["grpc-retry-pushback-ms"]
    told = detail(error, error_details_pb2.RetryInfo).retry_delay.ToMilliseconds()
    assert told == int(pushback) > 0
    return told / 1000


async def test_everybody_is_served_or_told_when_to_come_again():
    engine = FakeEngine(batch=4, step_seconds=0.002)
    async with serving(engine, max_queue_requests=ROOM) as server:
        found = []
        for _ in range(3):  # waves: estimates come from the ones before
            found += await asyncio.gather(*(outcome(server, unary=i % 2) for i in range(MANY)))
        served = [tokens for tokens in found if isinstance(tokens, tuple)]
        assert served
        assert set(served) == {engine.expected(20)}
        refused = metric(server, "admission_rejected_total", reason="queue_full")
        assert refused == len(found) - len(served) > 0
        assert metric(server, "requests_total", finish_reason="length") == len(served) == len(engine.requests)
        assert engine.free_pages == engine.total_pages
        assert not server.app.driver.queue.num_tokens


async def test_over_http_too():
    async with talking(FakeEngine(batch=4, step_seconds=0.002), max_queue_requests=ROOM) as server:
        body = {"prompt": "ab", "max_new_tokens": 20}
        answers = await asyncio.gather(*(server.http.post("/generate", json=body) for _ in range(90)))
        codes = [answer.status_code for answer in answers]
        assert set(codes) <= {200, 429}
        assert all(int(a.headers["retry-after"]) >= 1 for a in answers if a.status_code == 429)
        assert codes.count(200) == len(server.engine.requests) > 0
        assert metric(server, "admission_rejected_total", reason="queue_full") == codes.count(429)
