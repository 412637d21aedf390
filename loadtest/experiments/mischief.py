"""Faulty callers, one kind per function: they cancel, die, stop reading, set short deadlines or cause faults.

`python -m loadtest.experiments.mischief ADDRESS STREAMS` reads long streams until it is killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from itertools import count
from random import Random

import grpc

from pilotfish.client import (
    AsyncClient,
    CancelledError,
    DeadlineExceededError,
    QueueFullError,
    RequestFailedError,
    ServerFaultError,
    UnavailableError,
)
from pilotfish.v1 import generation_pb2 as pb
from pilotfish.v1.generation_pb2_grpc import InferenceServiceStub

FAILING = ("tokenizer", "target", "nan", "text", "answers")  # parts whose faults end only the request at fault
OUTAGE = ("UnavailableError", "UNAVAILABLE", "503")  # how new requests are refused while an engine is restarted
HARMLESS = "draft"  # the part whose fault costs only drafts
LONG = 300  # tokens
ENDLESS = 480  # tokens: more than can be read before the process is killed; below the server's limit
STORM = 24  # requests at once
# Without these, the client's gRPC core reads ahead of its application, and no write of the server ever blocks.
_STALLING = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1024), ("grpc.use_local_subchannel_pool", 1)]
_numbers = count()


@dataclass(slots=True)
class ChaosContext:
    """The server under test, the end of the run, and the results."""

    address: str
    http_address: str
    client: AsyncClient
    end: float  # in the time of the event loop
    deeds: dict[str, int]
    strange: list[str]

    @property
    def goes_on(self) -> bool:
        """Return whether there is time left."""
        return asyncio.get_running_loop().time() < self.end

    async def pause(self, seconds: float) -> None:
        """Sleep, but no longer than until the end."""
        left = self.end - asyncio.get_running_loop().time()
        await asyncio.sleep(min(seconds, max(left, 0.0)))

    async def repeat(self, deed: Misbehaviour, random: Random) -> None:
        """Repeat the action with random pauses."""
        while self.goes_on:
            await deed(self, random)
            await asyncio.sleep(random.uniform(0, 0.3))

    def note(self, deed: str, end: str, *expected: str) -> None:
        """Count how an action ended; an end that is not expected is recorded as strange."""
        self.count(f"{deed}: {end}")
        if end not in (*expected, *OUTAGE):
            self.strange.append(f"{deed} ended with {end}; expected {', '.join(expected)}")

    def count(self, deed: str) -> None:
        """Count an action and its end."""
        self.deeds[deed] = self.deeds.get(deed, 0) + 1


Misbehaviour = Callable[[ChaosContext, Random], Awaitable[None]]


async def _read(scene: ChaosContext, **options: object) -> str:
    """Read a long stream and return how it ended."""
    try:
        async with contextlib.aclosing(scene.client.stream("def main():\n", max_tokens=LONG, **options)) as events:  # type: ignore[arg-type]
            async for _ in events:
                pass
    except (QueueFullError, DeadlineExceededError, CancelledError, ServerFaultError, UnavailableError) as error:
        return type(error).__name__
    except RequestFailedError as error:
        return str(error)
    return "served"


async def go_away(scene: ChaosContext, random: Random) -> None:
    """Cancel at a random moment."""
    try:
        async with asyncio.timeout(random.uniform(0, 0.6)):
            end = await _read(scene, ignore_eos=True)
    except TimeoutError:
        end = "left"
    scene.note("cancel", end, "left", "served", "QueueFullError")


async def hurry(scene: ChaosContext, random: Random) -> None:
    """Send many requests at once with deadlines that are too short for most."""
    reads = [_read(scene, ignore_eos=True, deadline=random.uniform(0.001, 0.4)) for _ in range(STORM)]
    for end in await asyncio.gather(*reads):
        scene.note("deadline", end, "DeadlineExceededError", "QueueFullError", "served")
    await scene.pause(random.uniform(1, 4))


async def fail(scene: ChaosContext, random: Random) -> None:
    """Send a request for which a part of the server fails."""
    part = random.choice((*FAILING, HARMLESS))
    name = f"fault-{part}"
    prompt = f"# {name}\n" if part == "tokenizer" else "def main():\n"
    try:
        request_id = f"{name}-{next(_numbers)}"
        async for _ in scene.client.stream(prompt, request_id=request_id, max_tokens=24, ignore_eos=True):
            pass
        end = "served"
    except RequestFailedError as error:
        end = type(error).__name__
    scene.note(name, end, "served" if part == HARMLESS else "ServerFaultError", "QueueFullError")


async def stall(scene: ChaosContext, random: Random) -> None:
    """Read one message, then stop reading until the server aborts the stream."""
    request = pb.GenerateRequest(prompt="x", stopping=pb.StoppingParams(max_tokens=LONG, ignore_eos=True))
    request.output.CopyFrom(pb.OutputOptions(logprobs=True, top_logprobs=20))
    async with grpc.aio.insecure_channel(scene.address, _STALLING) as channel:
        call = InferenceServiceStub(channel).GenerateStream(request)
        try:
            await call.read()
            await asyncio.sleep(random.uniform(1, 5))
            while await call.read() is not grpc.aio.EOF:
                pass
            end = (await call.code()).name
        except grpc.aio.AioRpcError as error:
            end = error.code().name
    scene.note("stall", end, "ABORTED", "OK", "RESOURCE_EXHAUSTED")


async def die(scene: ChaosContext, random: Random) -> None:
    """Start a process with open streams and kill it while it reads."""
    command = ("-m", "loadtest.experiments.mischief", scene.address, str(random.randint(1, 6)))
    process = await asyncio.create_subprocess_exec(sys.executable, *command, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None, "asked for"
    first = await process.stdout.readline()
    await asyncio.sleep(random.uniform(0, 0.5))
    with contextlib.suppress(ProcessLookupError):  # the process may have ended, if its requests were refused
        process.kill()
    await process.communicate()
    scene.note("killed", "refused" if first.startswith(b"refused") else "in the middle", "in the middle", "refused")
    await scene.pause(random.uniform(2, 6))  # starting a process costs more than its requests


async def hang_up(scene: ChaosContext, random: Random) -> None:
    """Open an HTTP stream and close the connection early."""
    host, _, port = scene.http_address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    body = json.dumps({"prompt": "import re\n", "max_tokens": LONG, "stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    status = (await reader.readline()).split()[1].decode()
    await asyncio.sleep(random.uniform(0, 0.4))
    writer.transport.abort()
    scene.note("HTTP broken off", status, "200", "429")


MISCHIEF: tuple[Misbehaviour, ...] = (go_away, go_away, hurry, fail, stall, die, hang_up)


async def _victim(address: str, streams: int) -> None:
    """Read long streams in this process, which `die` kills."""

    async def read(client: AsyncClient, number: int) -> None:
        try:
            async for _ in client.stream(f"import os  # {number}\n", max_tokens=ENDLESS, ignore_eos=True):
                print(number, flush=True)  # informs the parent process that the stream has started
        except RequestFailedError:
            print("refused", flush=True)

    async with AsyncClient(address, retry=None) as client, asyncio.TaskGroup() as tasks:
        for number in range(streams):
            tasks.create_task(read(client, number))


if __name__ == "__main__":
    asyncio.run(_victim(sys.argv[1], int(sys.argv[2])))
