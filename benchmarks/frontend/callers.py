"""Minimal clients: they count messages and check only the end of each stream. gRPC streams share one connection."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import grpc

from benchmarks.frontend.process import Server
from pilotfish.v1 import generation_pb2 as pb

PROMPT = "import textwrap\n"
_METHOD = "/pilotfish.v1.InferenceService/GenerateStream"

Call = Callable[[Server, int, int], Coroutine[Any, Any, int]]


@dataclass(frozen=True, slots=True)
class Streamed:
    """The results of several streams, from the first request until the last end."""

    tokens: int
    messages: int
    seconds: float


async def stream(call: Call, server: Server, streams: int, tokens: int) -> Streamed:
    """Run `streams` concurrent streams of `tokens` tokens each."""
    start = time.perf_counter()
    messages = await call(server, streams, tokens)
    return Streamed(streams * tokens, messages, time.perf_counter() - start)


async def over_grpc(server: Server, streams: int, tokens: int) -> int:
    """Return the number of messages of all streams, without the final ones."""
    request = pb.GenerateRequest(
        prompt=PROMPT, stopping=pb.StoppingParams(max_tokens=tokens, ignore_eos=True)
    ).SerializeToString()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.grpc_port}") as channel:
        method: Any = channel.unary_stream(_METHOD)

        async def one() -> int:
            count, last = 0, b""
            async for message in method(request):
                count, last = count + 1, message
            ended = pb.GenerateStreamResponse.FromString(last).finished.usage.completion_tokens
            if ended != tokens:
                raise RuntimeError(f"a stream of {tokens} tokens ended after {ended}")
            return count - 1

        return sum(await asyncio.gather(*(one() for _ in range(streams))))


def over_sse(path: str) -> Call:
    """Return a client of one of the HTTP routes; each stream has its own connection."""
    limit = "max_new_tokens" if path == "/generate" else "max_tokens"

    async def call(server: Server, streams: int, tokens: int) -> int:
        body = json.dumps({"prompt": PROMPT, limit: tokens, "ignore_eos": True, "stream": True}).encode()
        head = (
            f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
        )
        request = f"{head}\r\n\r\n".encode() + body
        connect = asyncio.get_running_loop().create_connection
        opened = (connect(lambda: _Reader(request), "127.0.0.1", server.http_port) for _ in range(streams))
        return sum([await reader.done for _, reader in await asyncio.gather(*opened)])

    return call


class _Reader(asyncio.Protocol):
    """Counts events by the empty line at the end of each; JSON contains no empty line."""

    def __init__(self, request: bytes) -> None:
        self._request, self._count, self._tail = request, 0, b""
        self.done: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the request."""
        assert isinstance(transport, asyncio.Transport), "a TCP connection"
        self._transport = transport
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        """Count events; finish at the last one."""
        self._count += (self._tail[-1:] + data).count(b"\n\n")
        self._tail = (self._tail + data)[-1000:]
        if b"data: [DONE]" in self._tail and not self.done.done():
            if b'"finish_reason": "length"' in self._tail:
                self.done.set_result(self._count - 2)  # without the final event and `[DONE]`
            else:
                self.done.set_exception(RuntimeError(f"a stream ended otherwise: {self._tail!r}"))
            self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """Fail if the stream is incomplete."""
        if not self.done.done():
            self.done.set_exception(exc or RuntimeError(f"a stream was cut: {self._tail!r}"))


FRONT_ENDS: dict[str, Call] = {
    "gRPC": over_grpc,
    "SSE /v1/completions": over_sse("/v1/completions"),
    "SSE /generate": over_sse("/generate"),
}
