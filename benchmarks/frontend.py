"""Processor time of the front-end process per streamed token: `python -m benchmarks.frontend`.

A server of the embedded target decodes plainly, one token per step and sequence, for callers in another process. The
engine has a process of its own, whose time does not count.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import grpc

from pilotfish.v1 import generation_pb2 as pb
from pilotfish.v1 import generation_pb2_grpc as services

PROMPT, TOKENS = "def add(a, b):", 400
WARM, MEASURED, READY = 3.0, 10.0, 120.0  # seconds
FRONT_ENDS = ("gRPC", "/generate", "/v1/completions", "/v1/chat/completions")


@contextlib.contextmanager
def server(streams: int) -> Iterator[tuple[int, int, int]]:
    """Run a server; yield its process and its ports."""
    grpc_port, http_port = (_free_port() for _ in range(2))
    command = [
        sys.executable,
        "-c",
        "from pilotfish.server.cli import main; main()",
        "serve",
        "--speculation",
        "off",
        "--max-batch-size",
        str(streams),
    ]
    command += ["--grpc-port", str(grpc_port), "--http-port", str(http_port)]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
        try:
            _wait_until_ready(http_port)
            yield process.pid, grpc_port, http_port
        finally:
            process.terminate()


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def _wait_until_ready(port: int) -> None:
    deadline = time.monotonic() + READY
    while True:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health"):
                return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


async def over_grpc(stub: Any, count: Callable[[], None]) -> None:
    """Read streams over gRPC for ever, and count their messages of one token."""
    stopping = pb.StoppingParams(max_tokens=TOKENS, ignore_eos=True)
    while True:
        async for message in stub.GenerateStream(pb.GenerateRequest(prompt=PROMPT, stopping=stopping)):
            if message.HasField("delta"):
                count()


async def over_http(port: int, path: str, count: Callable[[], None]) -> None:
    """Read streams of events over HTTP for ever, and count the events."""
    limit = "max_new_tokens" if path == "/generate" else "max_tokens"
    body: dict[str, Any] = {limit: TOKENS, "ignore_eos": True, "stream": True}
    body |= {"messages": [{"role": "user", "content": PROMPT}]} if "chat" in path else {"prompt": PROMPT}
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\nContent-Type: application/json\r\n"
    while True:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head.encode() + f"Content-Length: {len(data)}\r\n\r\n".encode() + data)
        while line := await reader.readline():
            if line.startswith(b"data:"):
                count()
        writer.close()


async def measure(front_end: str, streams: int, pid: int, grpc_port: int, http_port: int) -> dict[str, Any]:
    """Return what one front end costs with this number of streams."""
    counted = 0

    def count() -> None:
        nonlocal counted
        counted += 1

    async with grpc.aio.insecure_channel(f"127.0.0.1:{grpc_port}") as channel:
        stub: Any = services.InferenceServiceStub(channel)
        one: Callable[[], Awaitable[None]] = (
            (lambda: over_grpc(stub, count))
            if front_end == "gRPC"
            else (lambda: over_http(http_port, front_end, count))
        )
        tasks = [asyncio.ensure_future(one()) for _ in range(streams)]
        await asyncio.sleep(WARM)
        before, first = _seconds_of(pid), counted
        await asyncio.sleep(MEASURED)
        used, tokens = _seconds_of(pid) - before, counted - first
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    cost = round(1e6 * used / max(1, tokens), 1)
    return {
        "front_end": front_end,
        "streams": streams,
        "messages_per_second": tokens / MEASURED,
        "us_per_message": cost,
    }


def _seconds_of(pid: int) -> float:
    """Return the processor time of a process, in seconds."""
    fields = Path(f"/proc/{pid}/stat").read_text("utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    """Measure and print one line of JSON per front end and round."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=64, help="number of concurrent streams (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="number of rounds (default: %(default)s)")
    asked = parser.parse_args()
    with server(asked.streams) as (pid, *ports):
        for _ in range(asked.rounds):
            for front_end in FRONT_ENDS:
                print(json.dumps(asyncio.run(measure(front_end, asked.streams, pid, *ports))), flush=True)


if __name__ == "__main__":
    main()
