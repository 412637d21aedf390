"""Streams of the agents' routes that nobody reads: they end, they count, and their callers may ask again."""

from __future__ import annotations

import asyncio
import json

import pytest

from tests.server.fake_engine import FakeEngine
from tests.server.http.agents import planned, talking
from tests.server.http.test_unread_answers import STALL_SECONDS, deaf, writing
from tests.server.test_life import metric
from tests.server.test_security import ALICE
from tests.serving import until

pytestmark = pytest.mark.slow

ROUTES = {
    "/v1/responses": {"input": "hi", "max_output_tokens": 3000},
    "/v1/messages": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3000},
}


def post(path, token="", **fields):
    data = json.dumps(ROUTES[path] | fields).encode()
    head = [f"POST {path} HTTP/1.1", "Host: localhost", "Content-Type: application/json", f"x-api-key: {token}"]
    return "\r\n".join([*head, f"Content-Length: {len(data)}\r\n\r\n"]).encode() + data


@pytest.mark.parametrize("path", ROUTES)
async def test_a_stream_whose_reader_takes_nothing_is_counted_as_stalled_before_its_connection_ends(path):
    async with talking(FakeEngine(burst=1), stall_seconds=STALL_SECONDS) as server, deaf(server) as connection:
        await asyncio.get_running_loop().sock_sendall(connection, post(path, stream=True))
        await until(lambda: server.app._http.server_state.connections, 10)
        await until(lambda: not server.app._http.server_state.connections, 20)
        assert metric(server, "stream_stalls_total") == 1
        await until(lambda: not server.app.driver.live())


@pytest.mark.parametrize("path", ROUTES)
async def test_a_stream_counts_against_its_callers_quota_until_its_reader_is_gone(path, tmp_path):
    tokens = tmp_path / "tokens"
    tokens.write_text(f"alice {ALICE}\n")
    text = "abab" * 50_000  # more than the buffers of both sides
    async with talking(planned(text, burst=500), token_file=tokens, max_requests_per_token=1) as server:

        async def status():
            headers = {"authorization": f"Bearer {ALICE}"}
            return (await server.http.post("/generate", json={"prompt": "a"}, headers=headers)).status_code

        server.engine.max_model_len = 100_000
        limit = {"max_output_tokens": 60_000} if path == "/v1/responses" else {"max_tokens": 60_000}
        async with deaf(server) as connection:
            await asyncio.get_running_loop().sock_sendall(connection, post(path, ALICE, stream=True, **limit))
            await until(lambda: writing(server) and server.engine.requests and not server.app.driver.live(), 20)
            assert await status() == 429
        await until(lambda: not server.app._http.server_state.connections, 20)
        assert await status() == 200
