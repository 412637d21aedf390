"""Compare the engine on a thread with the engine in its own process: the same streams through gRPC, in turns.

python -m benchmarks.apart                             writes a table; --streams, --rounds, --tokens, --threads
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count

from client import AsyncClient
from client.options import GenerateOptions
from client.results import Delta
from models import corpus

WAYS = {"thread": "--no-engine-process", "process": "--engine-process"}
COLUMNS = (
    "streams", "engine", "tokens/s", "first token, median ms", "p95 ms", "gap, median ms", "p99 ms", "speed of both",
)  # fmt: skip
_START = "import sys; from server.cli import main; sys.exit(main())"
_WAIT_SECONDS = 180
_salts = count()


@dataclass
class LoadTurn:
    """One load on one server, as the callers measured it. Times in seconds."""

    tokens: list[tuple[int, ...]] = field(default_factory=list)
    first: list[float] = field(default_factory=list)  # from the call to the first token, one per stream
    gaps: list[float] = field(default_factory=list)  # between two messages of a stream
    seconds: float = 0.0  # from the first call to the last token

    @property
    def speed(self) -> float:
        """Return tokens per second of all streams together."""
        return sum(map(len, self.tokens)) / self.seconds


def main(arguments: Sequence[str] | None = None) -> None:
    """Start both servers, measure in turns, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=1, help="compute threads of either engine")
    parser.add_argument("--speculation", choices=["auto", "off"], default="auto")
    options = parser.parse_args(arguments)
    with contextlib.ExitStack() as servers:
        addresses = {way: servers.enter_context(_serving(flag, options.threads)) for way, flag in WAYS.items()}
        print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}")
        for streams in options.streams:
            load = partial(_load, streams=streams, tokens=options.tokens, speculation=options.speculation)
            turns = _interleaved(addresses, load, options.rounds)
            for way in WAYS:
                print(_row(streams, way, turns), flush=True)


def _interleaved(addresses: dict[str, str], load: partial[LoadTurn], rounds: int) -> dict[str, list[LoadTurn]]:
    """Measure one turn per server and round, in an order that is reversed every round; the first round is a warm-up."""
    turns: dict[str, list[LoadTurn]] = {way: [] for way in addresses}
    for number in range(rounds + 1):
        for way in sorted(addresses, reverse=bool(number % 2)):
            turn = load(addresses[way])
            if number:
                turns[way].append(turn)
    one, other = turns.values()
    assert [t.tokens for t in one] == [t.tokens for t in other], "the tokens depend on where the engine runs"
    return turns


def _row(streams: int, way: str, turns: dict[str, list[LoadTurn]]) -> str:
    mine = turns[way]
    first = [time for turn in mine for time in turn.first]
    gaps = [time for turn in mine for time in turn.gaps]
    ratio = statistics.median(a.speed / b.speed for a, b in zip(mine, turns["thread"], strict=True))
    speed = statistics.median(turn.speed for turn in mine)
    cells = [f"{1000 * value:.1f}" for value in (_at(first, 0.5), _at(first, 0.95), _at(gaps, 0.5), _at(gaps, 0.99))]
    return f"| {streams} | {way} | {speed:.0f} | {' | '.join(cells)} | {ratio:.2f} |"


def _at(values: Sequence[float], share: float) -> float:
    """Return the value that a share `share` of all values do not exceed."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def _load(address: str, streams: int, tokens: int, speculation: str) -> LoadTurn:
    return asyncio.run(_gather(address, corpus.held_out_prompts(streams), tokens, speculation))


async def _gather(address: str, prompts: Sequence[str], tokens: int, speculation: str) -> LoadTurn:
    """Run all streams at once over one connection that is already open; nothing is cached between turns."""
    turn, salt = LoadTurn([()] * len(prompts)), next(_salts)
    options: GenerateOptions = {
        "max_tokens": tokens,
        "ignore_eos": True,
        "speculation": "auto" if speculation == "auto" else "off",
    }
    async with AsyncClient(address, retry=None) as client:
        await client.health()
        start = time.perf_counter()
        async with asyncio.TaskGroup() as tasks:
            for i, prompt in enumerate(prompts):
                tasks.create_task(_stream(client, prompt, options | {"cache_salt": f"{salt}-{i}"}, turn, i))
        turn.seconds = time.perf_counter() - start
    return turn


async def _stream(client: AsyncClient, prompt: str, options: GenerateOptions, turn: LoadTurn, index: int) -> None:
    last = time.perf_counter()
    async with contextlib.aclosing(client.stream(prompt, **options)) as events:
        async for event in events:
            if isinstance(event, Delta):
                now = time.perf_counter()
                (turn.gaps if turn.tokens[index] else turn.first).append(now - last)
                turn.tokens[index] += event.token_ids
                last = now


@contextlib.contextmanager
def _serving(flag: str, threads: int) -> Iterator[str]:
    """Start a server of the embedded pair and yield its address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ports = ["--grpc-port", str(port), "--http-port", "0"]
    command = [sys.executable, "-c", _START, "serve", *ports, "--threads", str(threads), flag]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
        try:
            asyncio.run(_wait(f"127.0.0.1:{port}"))
            yield f"127.0.0.1:{port}"
        finally:
            process.terminate()


async def _wait(address: str) -> None:
    async with AsyncClient(address) as client:
        await client.wait_until_serving(deadline=_WAIT_SECONDS)


if __name__ == "__main__":
    main()
