"""The overhead of the server: the same requests through gRPC streams and through the engine alone."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import count

from benchmarks.harness.lab import Lab, Row, Section
from benchmarks.harness.synthetic import int8_of
from benchmarks.harness.timing import AUTO
from benchmarks.harness.turns import Clock, Turn, foreign, interleave, median_speed
from benchmarks.peers.catalogue import PEERS, Peer, PeerSetting, pythons
from benchmarks.peers.remote import Remote
from pilotfish.client import AsyncClient
from pilotfish.client.options import GenerateOptions
from pilotfish.client.results import Delta
from pilotfish.engine.machine.threads import cores

BATCHES = (16,)
AIM = 0.05
_SPARE = 64  # tokens beyond prompt and output
_START = "import sys; from pilotfish.server.cli import main; sys.exit(main())"
_salts = count()


def measure(lab: Lab) -> list[Row]:
    """Measure plain decoding and AUTO, each through the server and offline; the client runs on the same machine."""
    batches = lab.options.batches or BATCHES
    plain, auto = (next(p for p in PEERS if p.is_ours and p.auto is is_auto) for is_auto in (False, True))
    ours: dict[int | str, Peer] = {0: plain, AUTO: auto}
    length = lab.options.prompt + lab.options.tokens + _SPARE
    logs = lab.options.models / "logs"
    setting = PeerSetting(lab.pair, pythons(()), lab.options.threads or cores(), max(batches), length, logs)
    with contextlib.ExitStack() as processes:
        offline = {k: processes.enter_context(peer.start(setting)) for k, peer in ours.items()}
        for remote in offline.values():
            remote.ready()
        address = processes.enter_context(_serving(setting))
        return [row for batch in batches for row in _batch(lab, address, offline, batch)]


def _batch(lab: Lab, address: str, offline: dict[int | str, Remote], batch: int) -> Iterator[Row]:
    prompts = lab.pair.rule.prompts(batch, lab.options.prompt)
    ways = {}
    for k, remote in offline.items():
        ways[f"offline, K {k}"] = partial(remote.run, prompts, lab.options.tokens, k)
        ways[f"gRPC, K {k}"] = partial(_streams, address, prompts, lab.options.tokens, k)
    turns = interleave(ways, lab.options.rounds, lambda text: lab.tell(f"server, batch {batch}, {text}"))
    for k in offline:
        alone, served = turns[f"offline, K {k}"], turns[f"gRPC, K {k}"]
        added = [b.seconds / a.seconds - 1 for a, b in zip(alone, served, strict=True)]
        yield {
            "batch": batch,
            "k": k,
            "offline": median_speed(alone),
            "served": median_speed(served),
            "seconds": statistics.median(turn.seconds for turn in alone),
            "added": statistics.median(added),
            "all_added": added,
            "foreign": foreign(alone),
        }


@contextlib.contextmanager
def _serving(setting: PeerSetting) -> Iterator[str]:
    """Start a server in its own process and yield its address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    pair = setting.pair
    options = {
        "draft": int8_of(pair.draft),
        "dtype": "bfloat16",
        "proposer": "model",
        "num-draft-tokens": 16,
        "max-batch-size": setting.batch,
        "max-model-len": setting.length,
        "kv-memory": 4,
        "threads": setting.threads,
        "grpc-port": port,
        "http-port": 0,
    }
    flags = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    command = [sys.executable, "-c", _START, "serve", str(int8_of(pair.target)), *flags]
    setting.logs.mkdir(parents=True, exist_ok=True)
    with (setting.logs / "server.log").open("w") as log, subprocess.Popen(command, stderr=log, stdout=log) as process:
        address = f"127.0.0.1:{port}"
        try:
            asyncio.run(_wait(address))
            yield address
        finally:
            process.terminate()


async def _wait(address: str) -> None:
    async with AsyncClient(address) as client:
        await client.wait_until_serving(deadline=120)


def _streams(address: str, prompts: Sequence[tuple[int, ...]], tokens: int, k: int | str) -> Turn:
    return asyncio.run(_gather(address, prompts, tokens, k))


async def _gather(address: str, prompts: Sequence[tuple[int, ...]], tokens: int, k: int | str) -> Turn:
    """Run all streams at once over one connection that is already open."""
    options: GenerateOptions = {"max_tokens": tokens, "ignore_eos": True, "speculation": "auto" if k else "off"}
    async with AsyncClient(address) as client:
        await client.health()
        clock, salt = Clock.of(len(prompts)), next(_salts)
        async with asyncio.TaskGroup() as tasks:
            for i, prompt in enumerate(prompts):
                tasks.create_task(_stream(client, prompt, options | {"cache_salt": f"{salt}-{i}"}, clock, i))
        return clock.turn()


async def _stream(
    client: AsyncClient, prompt: tuple[int, ...], options: GenerateOptions, clock: Clock, index: int
) -> None:
    async with contextlib.aclosing(client.stream(prompt, **options)) as events:
        async for event in events:
            if isinstance(event, Delta):
                clock.tokens[index] += event.token_ids
                clock.tick()


def verdict(rows: Sequence[Row]) -> Sequence[str]:
    """Return a sentence about the server's overhead."""
    added = ", ".join(f"{r['added']:+.1%} (batch {r['batch']}, K {r['k']})" for r in rows)
    return [f"Through gRPC the same requests take {added}; the aim is at most {AIM:+.0%}."]


SECTION = Section(
    "server",
    "What the server adds",
    measure,
    "Time from the first request until the last token, prompts included, through gRPC streams over the engine alone in "
    "the same round, median over rounds. Speeds are of the decoding part, in tokens/s. Server and client are processes "
    "of their own on the same cores; text is made of all tokens.",
    {
        "batch": "{batch}",
        "K": "{k}",
        "offline tokens/s": "{offline:.1f}",
        "gRPC tokens/s": "{served:.1f}",
        "offline seconds": "{seconds:.2f}",
        "added by gRPC": "{added:+.1%}",
        "foreign cores": "{foreign:.2f}",
    },
    verdict=verdict,
)
