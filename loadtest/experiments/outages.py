"""Processes that are killed on a schedule: engines, and a replica that is killed or rolled, and started again."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from dataclasses import dataclass
from pathlib import Path
from random import Random

from loadtest.experiments.mischief import ChaosContext
from loadtest.process import ServerProcess

ENGINE_SECONDS, SERVER_SECONDS = 15.0, 30.0  # from one failure to the next


def engine_of(server: int) -> int | None:
    """Return the process of a server's engine: the oldest child of its fork server. The others are standbys."""
    processes = _processes()
    children = (p for p in processes.values() if p.parent in processes and processes[p.parent].parent == server)
    engine = min(children, key=lambda process: process.started, default=None)
    return None if engine is None else engine.pid


@dataclass(frozen=True, slots=True)
class _Process:
    pid: int
    parent: int
    started: int  # in ticks of the kernel's clock


def _processes() -> dict[int, _Process]:
    """Return each process on this machine that has not ended, by its number."""
    found = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):  # it has ended meanwhile
                # After the name, which may have spaces: proc(5), fields 3 (state), 4 (parent) and 22 (start).
                about = (folder / "stat").read_text("utf-8", errors="replace").rpartition(")")[2].split()
                if about[0] != "Z":
                    found[int(folder.name)] = _Process(int(folder.name), int(about[1]), int(about[19]))
    return found


async def kill_engines(
    scene: ChaosContext, server: ServerProcess, starts: asyncio.Lock, name: str, random: Random
) -> None:
    """Kill the engine of a server about every `ENGINE_SECONDS`, and count it under `name`.

    `starts` is held by whoever ends the server and starts it again.
    """
    while scene.goes_on:
        await scene.pause(ENGINE_SECONDS * random.uniform(0.5, 1.5))
        async with starts:  # a server whose first engine dies before it is loaded ends
            pid = engine_of(server.pid)
            if pid is not None and scene.goes_on:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                    scene.count(name)


async def lose_replicas(scene: ChaosContext, replica: ServerProcess, starts: asyncio.Lock, random: Random) -> None:
    """Kill and roll the replica by turns, every `SERVER_SECONDS`, and start it again; hold `starts` meanwhile."""
    rolls = False
    while scene.goes_on:
        await scene.pause(SERVER_SECONDS * random.uniform(0.8, 1.2))
        if scene.goes_on:
            async with starts:
                await asyncio.to_thread(replica.stop if rolls else replica.kill)
                scene.count(f"replica ended: {'SIGTERM, drained' if rolls else 'SIGKILL'}")
                await asyncio.to_thread(replica.start)
            rolls = not rolls
