"""Calls of maximum size, of more than fifty kinds, ten of each kind at once; no other stream may stall."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from loadtest.experiments.hostile import CALLS
from loadtest.process import ServerProcess
from pilotfish.client import AsyncClient

OBSERVERS = 2
QUIET_SECONDS = 10.0
MOST_PAUSE, MOST_GROWTH = 0.25, 200 << 20  # seconds beyond the longest pause without hostile calls; bytes


@dataclass(frozen=True, slots=True)
class KindResult:
    """The effect of ten calls of one kind on other streams."""

    name: str
    ends: str
    seconds: float
    pause: float  # longest time between two messages of a stream, in seconds
    growth: int  # maximum, of the resident memory, in bytes


@dataclass(slots=True)
class Largest:
    """The results of the experiment; memory is that of the front-end process, in bytes."""

    quiet: float = 0.0  # longest pause without hostile calls
    kinds: list[KindResult] = field(default_factory=list)
    before: int = 0
    after: int = 0

    def lines(self) -> list[str]:
        """Return the results as Markdown lines."""
        worst = max(self.kinds, key=lambda kind: kind.pause)
        memory = f"memory {self.before >> 20} MiB before, {self.after >> 20} MiB after"
        pauses = f"{self.quiet:.2f} s without them, {worst.pause:.2f} s with them ({worst.name})"
        head = [
            f"{len(self.kinds)} kinds; longest pause of a stream {pauses}; {memory}.",
            "",
            "| ten at once | ended with | seconds | longest pause | memory at most |",
            "|---|---|---|---|---|",
        ]
        rows = [
            f"| {kind.name} | {kind.ends} | {kind.seconds:.1f} | {kind.pause:.2f} | {kind.growth >> 20:+d} MiB |"
            for kind in self.kinds
        ]
        return head + rows

    def problems(self, *, timed: bool) -> Iterator[str]:
        """Yield each violated expectation; `timed` includes the pauses."""
        for kind in self.kinds:
            if timed and kind.pause > self.quiet + MOST_PAUSE:
                yield f"{kind.name}: a stream stalled for {kind.pause:.2f} s; {self.quiet:.2f} s without such calls"
            if kind.growth > MOST_GROWTH:
                yield f"{kind.name}: memory grew by {kind.growth >> 20} MiB"
            if any(code in kind.ends for code in ("500", "INTERNAL", "UNKNOWN")):
                yield f"{kind.name} ended with {kind.ends}"
        if self.after - self.before > MOST_GROWTH:
            yield f"memory was not returned: {self.after - self.before >> 20} MiB"


class Watcher:
    """Measures the longest pause of continuous streams, and the memory of the server."""

    def __init__(self, server: ServerProcess) -> None:
        self._server, self._pause, self._peak = server, 0.0, 0

    async def watch(self) -> None:
        """Read streams and the memory until cancelled."""
        async with AsyncClient(self._server.address) as client, asyncio.TaskGroup() as tasks:
            for _ in range(OBSERVERS):
                tasks.create_task(self._read(client))
            tasks.create_task(self._weigh())

    async def _read(self, client: AsyncClient) -> None:
        clock = asyncio.get_running_loop().time
        while True:
            last = None
            async for _ in client.stream("def f(x):\n", max_tokens=900, ignore_eos=True):
                now = clock()
                if last is not None:
                    self._pause = max(self._pause, now - last)
                last = now

    async def _weigh(self) -> None:
        while True:
            self._peak = max(self._peak, self._server.usage().resident)
            await asyncio.sleep(0.01)

    def take(self) -> tuple[float, int]:
        """Return the longest pause and the peak memory since the last call."""
        found = self._pause, self._peak
        self._pause, self._peak = 0.0, 0
        return found


@asynccontextmanager
async def _attacker(server: ServerProcess) -> AsyncIterator[Callable[[str], asyncio.Future[str]]]:
    command = (sys.executable, "-m", "loadtest.experiments.hostile", server.address, server.http_address)
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)
    assert process.stdin is not None, "asked for"
    assert process.stdout is not None, "asked for"
    names, answers = process.stdin, process.stdout
    await answers.readline()

    async def send(name: str) -> str:
        names.write(f"{name}\n".encode())
        counts = json.loads(await answers.readline())
        return ", ".join(f"{count} {end}" for end, count in sorted(counts.items()))

    try:
        yield lambda name: asyncio.ensure_future(send(name))
    finally:
        process.kill()
        await process.wait()


async def largest(server: ServerProcess, names: Sequence[str], progress: Callable[[str], None]) -> Largest:
    """Measure streams without hostile calls first, then send the calls, kind by kind."""
    found, watcher = Largest(), Watcher(server)
    clock = asyncio.get_running_loop().time
    watching = asyncio.ensure_future(watcher.watch())
    try:
        async with _attacker(server) as send:
            await asyncio.sleep(QUIET_SECONDS / 2)
            watcher.take()
            await asyncio.sleep(QUIET_SECONDS)
            found.quiet, found.before = watcher.take()
            for name in names or CALLS:
                before, start = server.usage().resident, clock()
                ends = await send(name)
                await asyncio.sleep(0.3)
                pause, peak = watcher.take()
                found.kinds.append(KindResult(name, ends, clock() - start, pause, peak - before))
                progress(f"{name}: {ends}; pause {pause:.2f} s, {peak - before >> 20:+d} MiB")
            await asyncio.sleep(2)
            found.after = server.usage().resident
    finally:
        watching.cancel()
    return found
