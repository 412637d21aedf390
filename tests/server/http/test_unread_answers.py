"""Answers that nobody reads: they count, and their connections end. Each test asserts what is gone, and no time."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
from contextlib import asynccontextmanager

import pytest

from tests.server.fake_engine import FakeEngine
from tests.server.http.interfaces import CHAT, INTERFACES, talking
from tests.server.test_life import metric
from tests.server.test_security import ALICE
from tests.serving import serving, until

SMALL = 4096  # bytes of a socket's buffer, so that little of an answer leaves the server
LARGE = CHAT | {"max_tokens": 300, "logprobs": True, "top_logprobs": 20}  # its answer has about 300 kB
STALL_SECONDS = 0.2


def post(body, *headers, path="/v1/chat/completions"):
    data = json.dumps(body).encode()
    head = [f"POST {path} HTTP/1.1", "Host: localhost", "Content-Type: application/json", *headers]
    return "\r\n".join([*head, f"Content-Length: {len(data)}\r\n\r\n"]).encode() + data


GET = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"


@asynccontextmanager
async def deaf(server):
    """A connection whose reader takes nothing by itself."""
    server.app._http._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SMALL)  # connections inherit it
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL)
        connection.setblocking(False)
        await asyncio.get_running_loop().sock_connect(connection, ("127.0.0.1", server.app.http_port))
        yield connection


def writing(server):
    """The connections that wait for their readers."""
    return [one for one in server.app._http.server_state.connections if one.transport.get_write_buffer_size() > 0]


@pytest.mark.parametrize(
    ("asked", "num_served"),
    [
        (post(LARGE), 1),
        (post(LARGE | {"max_tokens": 100}, "Connection: close"), 1),
        (post(LARGE | {"stream": True}), 1),
        (GET * 2000, 0),
        (GET * 50, 0),
    ],
    ids=["large", "less than pauses", "stream", "pipelined", "few pipelined"],
)
async def test_a_connection_whose_reader_takes_nothing_ends_with_its_tasks(asked, num_served):
    # What is small waits for the next head until then; it is closed, and its rest has the reader's time again.
    async with (
        talking(FakeEngine(burst=40), stall_seconds=STALL_SECONDS, body_seconds=0.5) as server,
        deaf(server) as c,
    ):
        await asyncio.get_running_loop().sock_sendall(c, asked)
        await until(lambda: writing(server), 10)
        assert len(server.engine.requests) == num_served
        state = server.app._http.server_state
        await until(lambda: not state.connections, 20)
        await until(lambda: not state.tasks, 10)


async def test_the_same_with_tls_which_has_a_buffer_of_its_own_and_a_farewell(papers):
    files = {"tls_cert": papers.server_cert, "tls_key": papers.server_key}

    def sent(port):
        plain = socket.socket()
        plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL)
        plain.connect(("127.0.0.1", port))
        secured = ssl.create_default_context(cafile=papers.authority).wrap_socket(plain, server_hostname="127.0.0.1")
        secured.sendall(GET * 50)
        return secured

    async with serving(stall_seconds=STALL_SECONDS, body_seconds=0.5, **files) as server:
        server.app._http._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SMALL)
        with await asyncio.to_thread(sent, server.app.http_port):
            state = server.app._http.server_state
            await until(lambda: state.total_requests, 10)
            await until(lambda: not state.connections and not state.tasks, 20)


@pytest.mark.parametrize("name", ["chat", "messages"])
async def test_a_stream_whose_reader_takes_nothing_is_counted_as_stalled_and_its_pages_are_freed(name):
    about = INTERFACES[name]
    async with talking(FakeEngine(burst=1), stall_seconds=STALL_SECONDS) as server, deaf(server) as connection:
        asked = post(about.asking(stream=True), path=about.path)
        await asyncio.get_running_loop().sock_sendall(connection, asked)
        await until(lambda: server.app._http.server_state.connections, 10)
        await until(lambda: not server.app._http.server_state.connections, 20)
        assert metric(server, "stream_stalls_total") == 1
        await until(lambda: not server.app.driver.live())
        assert server.engine.load.free_pages == server.engine.facts.total_pages


async def test_a_stream_that_has_nothing_more_to_write_is_counted_as_stalled_when_its_connection_is_aborted():
    async with talking(FakeEngine(burst=40), stall_seconds=STALL_SECONDS) as server, deaf(server) as connection:
        server.engine.gate.clear()
        await asyncio.get_running_loop().sock_sendall(connection, post(LARGE | {"stream": True}))
        await until(lambda: server.app._http.server_state.connections, 10)
        [protocol] = server.app._http.server_state.connections
        protocol.pause_writing()  # as if the buffer were full; the engine waits, so no event does
        await until(lambda: protocol._is_lost, 20)
        server.engine.gate.set()
        await until(lambda: not server.app.driver.live(), 10)
        assert metric(server, "stream_stalls_total") == 1


async def taken(connection, size=1 << 20):
    """One answer, which its reader takes after all."""
    loop, found = asyncio.get_running_loop(), b""
    while b"\r\n\r\n" not in found:
        found += await loop.sock_recv(connection, size)
    head, _, body = found.partition(b"\r\n\r\n")
    [length] = [int(line[16:]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length: ")]
    while len(body) < length:
        body += await loop.sock_recv(connection, size)
    assert len(body) == length
    return json.loads(body)


async def test_an_answer_that_is_read_after_all_is_whole_and_its_connection_stays():
    async with talking(FakeEngine(burst=40)) as server, deaf(server) as connection:
        await asyncio.get_running_loop().sock_sendall(connection, post(LARGE))
        await until(lambda: writing(server), 10)
        [protocol] = writing(server)
        assert protocol._unread is not None
        answer = await taken(connection)
        assert len(answer["choices"][0]["logprobs"]["content"]) == LARGE["max_tokens"]
        await until(lambda: not writing(server), 10)
        assert protocol._unread is None
        await asyncio.get_running_loop().sock_sendall(connection, GET)
        assert "uptime_seconds" in await taken(connection)


async def test_an_answer_counts_against_its_callers_quota_until_it_is_written_or_its_reader_is_gone(tokens):
    known = f"Authorization: Bearer {ALICE}"
    async with talking(FakeEngine(burst=40), token_file=tokens, max_requests_per_token=1) as server:

        async def status():
            return (await server.http.post("/generate", json={"prompt": "a"}, headers=[known.split(": ")])).status_code

        for is_read, asked in ((True, LARGE), (False, LARGE), (False, LARGE | {"stream": True})):
            async with deaf(server) as connection:
                server.engine.requests.clear()
                await asyncio.get_running_loop().sock_sendall(connection, post(asked, known))
                await until(lambda: writing(server) and server.engine.requests and not server.app.driver.live(), 20)
                assert await status() == 429
                if is_read:
                    await taken(connection)
                    await until(lambda: not server.app._http.server_state.tasks, 10)
                    assert await status() == 200
            await until(lambda: not writing(server), 20)
        await until(lambda: not server.app._http.server_state.tasks, 10)
        assert await status() == 200
