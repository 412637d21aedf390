"""Faulty callers of all kinds at random, while engines and a replica die.

Well-behaved callers, whose client has the addresses of both replicas, must not be affected.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Any

from loadtest.experiments.mischief import MISCHIEF, ChaosContext
from loadtest.process import ProcessUsage, ServerProcess, engine_of
from pilotfish.client import AsyncClient, Delta, GenerateOptions, QueueFullError, RequestFailedError

PROGRAM = ("-m", "loadtest.experiments.faulty_server")
OPTIONS = (
    *("--stall-seconds", "2", "--max-batch-size", "16", "--max-model-len", "512", "--page-size", "16"),
    *("--max-engine-crashes", "10000"),
)
OWN_ENGINE, OTHER_ENGINE = "engine killed: SIGKILL", "the replica's engine killed: SIGKILL"
ENGINE_SECONDS, SERVER_SECONDS = 15.0, 30.0  # from one failure to the next
CALLERS = 6  # well-behaved callers
MOST_GROWTH = 0.02  # of resident memory
_PROMPTS = ("def mean(values):\n", "import os\n\n", "class Queue:\n    def push(self, item):\n", "for i in range(")
_WAYS: tuple[GenerateOptions, ...] = (
    {"max_tokens": 48, "ignore_eos": True},
    {"max_tokens": 96, "ignore_eos": True, "temperature": 0.9, "seed": 5},
    {"max_tokens": 64, "ignore_eos": True, "temperature": 0.7, "top_p": 0.9, "seed": 6, "repetition_penalty": 1.1},
    {"max_tokens": 64, "ignore_eos": True, "proposer": "model", "speculation": "fixed"},
)
_COUNTED = ("free_pages", "total_pages", "live", "queued", "tasks", "objects")
Job = tuple[str, int]  # a prompt and the index of a way in `_WAYS`


@dataclass(frozen=True, slots=True)
class IdleResources:
    """The resources of an idle server."""

    usage: ProcessUsage
    census: Mapping[str, Any]

    @property
    def leaks(self) -> Iterator[str]:
        """Yield each resource that an idle server should not hold."""
        census = self.census
        if census["free_pages"] != census["total_pages"]:
            yield f"{census['total_pages'] - census['free_pages']} pages are in use"
        if census["live"] or census["queued"]:
            yield f"{census['live']} requests are live, {census['queued']} are queued"


@dataclass(slots=True)
class Notes:
    """The results that the callers saw."""

    right: int = 0  # streams of well-behaved callers with the same tokens as when run alone
    wrong: list[str] = field(default_factory=list)
    refused: int = 0  # requests of well-behaved callers that the server had no capacity for
    interruptions: int = 0  # of those with the right tokens
    failed: dict[str, int] = field(default_factory=dict)  # of well-behaved callers, without a valid reason
    deeds: dict[str, int] = field(default_factory=dict)  # the actions of faulty callers and how they ended
    strange: list[str] = field(default_factory=list)  # actions of faulty callers with an unexpected end


@dataclass(frozen=True, slots=True)
class Chaos:
    """The results of the experiment. Of the warm-up, only errors count."""

    warm_up: Notes
    notes: Notes
    before: IdleResources
    after: IdleResources
    restarts: float  # of the engine of the surviving replica

    @property
    def growth(self) -> float:
        """Return the relative growth of resident memory."""
        return self.after.usage.resident / self.before.usage.resident - 1

    def problems(self, *, timed: bool = True) -> Iterator[str]:
        """Yield each violated expectation; `timed` includes memory, which a short run cannot measure reliably."""
        for notes in (self.warm_up, self.notes):
            yield from notes.wrong
            yield from notes.strange
            yield from (f"{count} well-behaved callers received {status}" for status, count in notes.failed.items())
        yield from self.after.leaks
        if not self.notes.right:
            yield "no request was served"
        kills = sum(notes.deeds.get(OWN_ENGINE, 0) for notes in (self.warm_up, self.notes))
        if self.restarts != kills:
            yield f"{self.restarts:g} restarts of an engine that was killed {kills} times"
        tasks = self.after.census["tasks"] - self.before.census["tasks"]
        descriptors = self.after.usage.descriptors - self.before.usage.descriptors
        if tasks > 0 or descriptors > 0:
            yield f"{tasks} tasks and {descriptors} descriptors more than before"
        if timed and self.growth > MOST_GROWTH:
            yield f"memory grew by {self.growth:.1%}; at most {MOST_GROWTH:.0%}"


def chaos_lines(found: Chaos) -> list[str]:
    """Return the results as Markdown lines."""
    notes = found.notes
    verdict = (
        f"{notes.right} streams of well-behaved callers had the same tokens as on an idle server, "
        f"{len(notes.wrong)} had other tokens, {notes.refused} were refused with a time to retry. "
        f"Those with the same tokens were interrupted {notes.interruptions} times."
    )
    head = ["", "| action, and how it ended | times |", "|---|---|"]
    deeds = [f"| {deed} | {times} |" for deed, times in sorted(notes.deeds.items())]
    held = ["", "| the idle server held | before | after |", "|---|---|---|"]
    rows = [f"| {name} | {found.before.census[name]} | {found.after.census[name]} |" for name in _COUNTED]
    first, last = found.before.usage, found.after.usage
    rows.append(f"| descriptors | {first.descriptors} | {last.descriptors} |")
    rows.append(
        f"| resident memory, MiB | {first.resident / 2**20:.0f} | {last.resident / 2**20:.0f} ({found.growth:+.1%}) |"
    )
    return [verdict, *head, *deeds, *held, *rows]


async def _tokens(client: AsyncClient, job: Job) -> tuple[tuple[int, ...], int]:
    """Return the tokens of a stream, and how often it was interrupted."""
    prompt, way = job
    tokens: tuple[int, ...] = ()
    interruptions = 0
    async for event in client.stream(prompt, deadline=120, **_WAYS[way]):
        if isinstance(event, Delta):
            tokens += event.token_ids
        else:
            interruptions = event.interruptions
    return tokens, interruptions


async def holding(server: ServerProcess, client: AsyncClient, patience: float = 30.0) -> IdleResources:
    """Wait until the server has no requests, then read its resources."""
    async with asyncio.timeout(patience):
        while (load := await client.load()).running_requests or load.waiting_requests:  # noqa: ASYNC110  # a process
            await asyncio.sleep(0.1)
    await asyncio.sleep(1.0)  # for connections that are about to close
    server.process.send_signal(signal.SIGUSR1)
    assert server.process.stdout is not None, "the census comes from there"
    line = await asyncio.to_thread(server.process.stdout.readline)
    return IdleResources(server.usage(), json.loads(line))


async def chaos(
    server: ServerProcess, replica: ServerProcess, warm_up: float, seconds: float, progress: Callable[[str], None]
) -> Chaos:
    """Warm up first, for which only errors count, then run the experiment for `seconds`."""
    async with (
        AsyncClient([server.address, replica.address]) as both,
        AsyncClient(server.address, retry=None) as client,
    ):
        jobs = [(prompt, way) for prompt in _PROMPTS for way in range(len(_WAYS))]
        progress(f"{len(jobs)} requests, one at a time")
        alone = {job: (await _tokens(both, job))[0] for job in jobs}
        progress(f"warming up for {warm_up:g} s")
        storm = partial(_storm, server, replica, client, both, alone)
        first = await storm(warm_up, Random(0))
        before = await holding(server, client)
        progress(f"chaos for {seconds:g} s")
        notes = await storm(seconds, Random(1))
        after = await holding(server, client)
        return Chaos(first, notes, before, after, server.metrics().total("engine_restarts_total"))


async def _storm(
    server: ServerProcess, replica: ServerProcess, client: AsyncClient, both: AsyncClient,
    alone: Mapping[Job, tuple[int, ...]], seconds: float, random: Random,
) -> Notes:  # fmt: skip
    found = Notes()
    end = asyncio.get_running_loop().time() + seconds
    scene = ChaosContext(server.address, server.http_address, client, end, found.deeds, found.strange)
    async with asyncio.TaskGroup() as tasks:
        for _ in range(CALLERS):
            tasks.create_task(_behave(scene, both, found, alone, Random(random.random())))
        for deed in MISCHIEF:
            tasks.create_task(scene.repeat(deed, Random(random.random())))
        replica_starts = asyncio.Lock()
        for one, starts, name in ((server, asyncio.Lock(), OWN_ENGINE), (replica, replica_starts, OTHER_ENGINE)):
            tasks.create_task(_kill_engines(scene, one, starts, name, Random(random.random())))
        tasks.create_task(_lose_replicas(scene, replica, replica_starts, Random(random.random())))
    return found


async def _kill_engines(
    scene: ChaosContext, server: ServerProcess, starts: asyncio.Lock, name: str, random: Random
) -> None:
    """Kill the engine of a server about every `ENGINE_SECONDS`, and count it under `name`.

    The lock `starts` is held while the server is restarted.
    """
    while scene.goes_on:
        await scene.pause(ENGINE_SECONDS * random.uniform(0.5, 1.5))
        async with starts:  # a server ends if its first engine dies while loading
            pid = engine_of(server.pid)
            if pid is not None and scene.goes_on:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                    scene.count(name)


async def _lose_replicas(scene: ChaosContext, replica: ServerProcess, starts: asyncio.Lock, random: Random) -> None:
    """Kill or roll the replica alternately, about every `SERVER_SECONDS`, and restart it, holding `starts`."""
    rolls = False
    while scene.goes_on:
        await scene.pause(SERVER_SECONDS * random.uniform(0.8, 1.2))
        if scene.goes_on:
            async with starts:
                await asyncio.to_thread(replica.stop if rolls else replica.kill)
                scene.count(f"replica ended: {'SIGTERM, drained' if rolls else 'SIGKILL'}")
                await asyncio.to_thread(replica.start)
            rolls = not rolls


async def _behave(
    scene: ChaosContext, both: AsyncClient, found: Notes, alone: Mapping[Job, tuple[int, ...]], random: Random
) -> None:
    """Send one request after the other; after a refusal, wait for the retry delay."""
    jobs = list(alone)
    while scene.goes_on:
        job = random.choice(jobs)
        try:
            tokens, interruptions = await _tokens(both, job)
        except RequestFailedError as error:
            if isinstance(error, QueueFullError):
                found.refused += 1
            else:
                found.failed[str(error)] = found.failed.get(str(error), 0) + 1
            await asyncio.sleep(error.retry_seconds or 0.1)
            continue
        if tokens == alone[job]:
            found.right += 1
            found.interruptions += interruptions
        else:
            found.wrong.append(f"{job}: {tokens}, alone {alone[job]}")
