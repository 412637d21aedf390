"""Hostile connections: late bodies, tiny chunks, large heads, and pages that pretend to be this machine."""

from __future__ import annotations

import asyncio
import contextlib
import time

import pytest

from pilotfish.server.http.gateway import ANSWER_SECONDS, MAX_CHUNKS, MIN_CHUNK
from tests.pauses import pauses
from tests.server.http.interfaces import on_the_shared_server
from tests.server.test_security import ALICE
from tests.serving import http_client, serving, until

HEAD = b"POST %s HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
MOST_PAUSE = 4.0  # seconds, on a machine that does other things too


@contextlib.asynccontextmanager
async def connected(server):
    reader, writer = await asyncio.open_connection("127.0.0.1", server.app.http_port)
    try:
        async with asyncio.timeout(30):
            yield reader, writer
    finally:
        writer.close()


# ------------------------------------------------------------------------------------------------------- late bodies


async def trickled(server, head, piece):
    """What comes back while `piece` is sent again and again; and for how long the connection lasted."""
    start, answer = time.monotonic(), bytearray()
    async with connected(server) as (reader, writer):

        async def read():
            with contextlib.suppress(ConnectionError):
                while data := await reader.read(1000):
                    answer.extend(data)

        reading = asyncio.ensure_future(read())
        writer.write(head)
        while not reading.done():
            writer.write(piece)
            await asyncio.sleep(0.02)
    return answer, time.monotonic() - start


LENGTH, CHUNKED = b"Content-Length: 100000\r\n\r\n", b"Transfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(("rest", "piece"), [(LENGTH, b" "), (CHUNKED, b"1\r\n \r\n")], ids=["length", "chunked"])
@pytest.mark.parametrize(
    ("path", "method", "status"),
    [(b"/generate", b"POST", b"408"), (b"/nothing", b"POST", b"404"), (b"/health", b"GET", b"200")],
    ids=["late", "unknown", "unread"],
)
async def test_who_trickles_a_body_is_answered_and_loses_the_connection(rest, piece, path, method, status):
    async with serving(body_seconds=0.3) as server:
        answer, lasted = await trickled(server, HEAD.replace(b"POST", method) % path + rest, piece)
        assert answer.startswith(b"HTTP/1.1 " + status)
        assert lasted < 20
        await until(lambda: not server.app._http.server_state.connections)


async def test_who_may_not_send_that_and_goes_on_loses_the_connection(tokens):
    for options, piece, status in (
        ({"token_file": tokens}, b" ", b"401"),
        ({"max_message_bytes": 5000}, b" " * 500, b"413"),
    ):
        async with serving(**options) as server:
            answer, lasted = await trickled(server, HEAD % b"/generate" + LENGTH, piece)
            assert answer.startswith(b"HTTP/1.1 " + status)
            assert lasted < 20 < server.app.config.body_seconds, "long before a body is late"


async def test_a_body_that_arrives_soon_after_its_answer_leaves_the_connection_open(tokens):
    body = b'{"prompt":"a"}'
    async with serving(token_file=tokens) as server, connected(server) as (reader, writer):
        writer.write(HEAD % b"/generate" + b"Content-Length: %d\r\n\r\n" % len(body) + body[:5])
        assert (await reader.readuntil(b"authentication_error")).startswith(b"HTTP/1.1 401")
        known = b"Authorization: Bearer %s\r\nContent-Length: %d\r\n\r\n" % (ALICE.encode(), len(body))
        writer.write(body[5:] + HEAD % b"/generate" + known + body)
        assert b"HTTP/1.1 200" in await reader.readuntil(b"generated_text")
        await asyncio.sleep(1.2 * ANSWER_SECONDS)
        writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert await reader.readuntil(b"uptime_seconds")


# ------------------------------------------------------------------------------------------------------------ chunks


def chunk(data):
    return b"%x\r\n%s\r\n" % (len(data), data)


async def test_a_body_of_tiny_chunks_is_refused_after_the_first_thousand():
    async with serving() as server, connected(server) as (reader, writer):
        async with pauses() as seen:
            writer.write(HEAD % b"/generate" + CHUNKED + chunk(b" ") * (1 << 20))
            answer = await reader.readuntil(b"bytes")
        assert answer.startswith(b"HTTP/1.1 400")
        allowed = MAX_CHUNKS + MAX_CHUNKS // MIN_CHUNK
        assert answer.endswith(b"the body has %d chunks for %d bytes" % (allowed + 1, allowed + 1))
        assert seen.longest < MOST_PAUSE
        await until(lambda: not server.app._http.server_state.connections)


async def test_after_its_answer_tiny_chunks_close_the_connection_without_a_fault(tokens, caplog):
    async with serving(token_file=tokens) as server, connected(server) as (reader, writer):
        writer.write(HEAD % b"/generate" + CHUNKED)
        assert await reader.readuntil(b"authentication_error")
        writer.write(chunk(b" ") * 5000)
        await until(lambda: not server.app._http.server_state.connections)
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


@pytest.mark.parametrize("size", [1, pytest.param(30, marks=pytest.mark.slow), MIN_CHUNK, 70_000])
async def test_chunks_of_a_reasonable_number_are_served(size):
    text = b"a" * (900 * size if size <= 30 else 1_000_000)
    body = b'{"prompt":"a","metadata":"%s"}' % text
    pieces = [body[start : start + size] for start in range(0, len(body), size)]
    async with serving() as server, connected(server) as (reader, writer):
        for _ in range(2):  # each request has its own
            writer.write(HEAD % b"/generate" + CHUNKED + b"".join(map(chunk, pieces)) + b"0\r\n\r\n")
            assert (await reader.readuntil(b"generated_text")).startswith(b"HTTP/1.1 200")
            await reader.readuntil(b"}")


# ------------------------------------------------------------------------------------------------------------- heads


BIG = 15_000  # bytes; with the rest of the head that is within the limit


@on_the_shared_server
@pytest.mark.parametrize(
    "head",
    [
        b'GET /health HTTP/1.1\r\nHost: localhost\r\nCookie: a="' + b"\\" * BIG + b'"\r\n\r\n',
        b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + b"a:\r\n" * (BIG // 4) + b"\r\n",
        b"GET /health?" + b"a&" * (BIG // 2) + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET /health?" + b"%C3" * (BIG // 3) + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nAccept: " + b"a/b;q=0.1," * (BIG // 10) + b"\r\n\r\n",
        HEAD.replace(b"json", b"json" + b";a*0=b" * (BIG // 6)) % b"/generate" + b"Content-Length: 2\r\n\r\n{}",
        HEAD.replace(b"json", b'json;a="' + b"\\" * BIG) % b"/generate" + b"Content-Length: 2\r\n\r\n{}",
        HEAD % b"/generate" + b"Last-Event-ID: " + b"A" * BIG + b'\r\nContent-Length: 14\r\n\r\n{"prompt":"a"}',
        HEAD % b"/generate" + b"traceparent: " + b"0" * BIG + b'\r\nContent-Length: 14\r\n\r\n{"prompt":"a"}',
    ],
    ids=["cookie", "headers", "query", "escapes", "accept", "type", "quotes", "event", "trace"],
)
async def test_no_head_stalls_the_loop(server, head):
    start = time.process_time()
    async with asyncio.TaskGroup() as tasks:
        for _ in range(10):
            tasks.create_task(answered(server, head))
    assert time.process_time() - start < 1.5  # ten such cookies took more than three seconds


async def answered(server, head):
    async with connected(server) as (reader, writer):
        writer.write(head)
        assert (await reader.readuntil(b"\r\n\r\n"))[9:12] in (b"200", b"400")


# -------------------------------------------------------------------------------------------------------------- Host

PATHS = ["/", "/health", "/metrics", "/v1/models", "/openapi.json", "/nothing"]


@on_the_shared_server
@pytest.mark.parametrize(
    "host", ["evil.example", "127.0.0.1.evil.example:80", "localhost.evil", "[::2]", "10.0.0.1", ""]
)
async def test_a_page_that_leads_its_own_name_here_is_refused_on_all_paths(server, host):
    answers = [await server.http.get(path, headers={"host": host}) for path in PATHS]
    answers.append(await server.http.post("/generate", headers={"host": host}, json={"prompt": "a"}))
    assert {answer.status_code for answer in answers} == {403}
    message = answers[0].json()["error"]["message"]
    assert repr(host) in message
    assert "localhost" in message
    assert "token_file" in message
    assert (await server.http.post("/v1/messages", headers={"host": host})).json()["type"] == "error"
    assert not server.engine.requests


@on_the_shared_server
@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:99", "127.0.0.1", "127.1.2.3:8000", "[::1]", "[::1]:8000"])
async def test_names_of_this_machine_are_served(server, host):
    assert (await server.http.get("/metrics", headers={"host": host})).status_code == 200


async def test_a_caller_of_http_1_0_names_no_host():
    async with serving() as server, connected(server) as (reader, writer):
        writer.write(b"GET /health HTTP/1.0\r\n\r\n")
        assert (await reader.read()).startswith(b"HTTP/1.1 200")


async def test_where_tokens_are_asked_for_or_others_let_in_any_name_may_lead_here(tokens):
    headers = {"host": "public.example", "authorization": f"Bearer {ALICE}"}
    for options in ({"token_file": tokens}, {"host": "0.0.0.0"}):
        async with serving(**options) as server, http_client(server) as http:
            assert (await http.get("/metrics", headers=headers)).status_code == 200
