"""Two tenants of one server with default settings: one has 200 endless streams, the other one request at a time."""

from __future__ import annotations

import asyncio
import statistics

import grpc
import pytest

from pilotfish.v1 import generation_pb2 as pb
from tests.server.test_life import read_to_end
from tests.serving import serving_embedded, until

HOG, MEEK = ([("authorization", f"Bearer {name}-0123456789abcdef")] for name in ("hog", "meek"))
PLACES = 64


def asked(prompt, max_tokens):
    return pb.GenerateRequest(prompt=prompt, stopping=pb.StoppingParams(max_tokens=max_tokens, ignore_eos=True))


@pytest.mark.slow  # tests/engine/test_shares.py holds the law, and tests/server/test_callers.py the order of callers
async def test_one_at_a_time_beside_two_hundred_endless_ones(tmp_path):
    (tmp_path / "tokens").write_text("hog hog-0123456789abcdef\nmeek meek-0123456789abcdef\n")
    num_tokens = 0

    async def endless(server, i):
        nonlocal num_tokens
        while True:
            call = server.inference.GenerateStream(asked(f"def f{i}(", 600), metadata=HOG)
            try:
                async for message in call:
                    num_tokens += len(message.delta.token_ids)
            except grpc.aio.AioRpcError as error:
                if error.code() != grpc.StatusCode.RESOURCE_EXHAUSTED:  # it has more waiting than it could be served
                    raise
                await asyncio.sleep(0.2)

    async with serving_embedded(apart=True, token_file=tmp_path / "tokens", max_queue_seconds=10.0) as server:
        hogs = [asyncio.ensure_future(endless(server, i)) for i in range(200)]
        try:
            await until(lambda: num_tokens >= 4 * PLACES)
            beside = []
            for i in range(20):
                before = num_tokens
                call = server.inference.GenerateStream(asked(f"class C{i}:", 8), metadata=MEEK, timeout=60)
                assert len((await call.read()).delta.token_ids)
                beside.append(num_tokens - before)
                assert len(await read_to_end(call)) == 1
            assert not [hog for hog in hogs if hog.done()], "the others go on as well"
            # Those of a few steps; on a busy machine more of them are on their way. The end of a stream is 20,000 away.
            assert statistics.median(beside) <= 16 * PLACES
        finally:
            for hog in hogs:
                hog.cancel()
            await asyncio.gather(*hogs, return_exceptions=True)
