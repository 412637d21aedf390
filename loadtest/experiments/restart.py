"""How long a reader waits when the engine dies: the pause in one stream, on an otherwise idle server."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from random import Random
from statistics import median

from client import AsyncClient, Finished
from loadtest.experiments.outages import engine_of
from loadtest.process import ServerProcess

LONGEST = 2.0  # seconds, in the median
_PROMPT = (1, 5, 9, 12)  # token ids: a checkpoint may have no tokenizer


@dataclass(frozen=True, slots=True)
class Pauses:
    """The longest pause of each stream after its engine was killed."""

    seconds: Sequence[float]

    def lines(self) -> list[str]:
        """Return the results as Markdown lines."""
        each = ", ".join(f"{pause:.2f}" for pause in sorted(self.seconds))
        return [f"Pause of the stream: median {median(self.seconds):.2f} s of {len(self.seconds)} deaths ({each})."]

    def problems(self, *, timed: bool) -> Iterator[str]:
        """Yield each violated expectation."""
        if timed and median(self.seconds) > LONGEST:
            yield f"the median pause is {median(self.seconds):.2f} s; at most {LONGEST:g} s were expected"


async def restarts(server: ServerProcess, deaths: int, random: Random, tell: Callable[[str], None]) -> Pauses:
    """Kill the engine once in each of `deaths` streams; return the pauses of their reader."""
    pauses = []
    async with AsyncClient(server.address) as client:
        for _ in range(deaths):
            pauses.append(await _pause(client, server, random.randint(2, 10)))
            tell(f"{pauses[-1]:.2f} s")
    return Pauses(pauses)


async def _pause(client: AsyncClient, server: ServerProcess, events: int) -> float:
    """Kill the engine when a stream has had so many events; return the longest pause from then on, in seconds."""
    engine = engine_of(server.pid)
    if engine is None:
        raise RuntimeError("the server has no engine")
    arrivals: list[float] = []
    async for event in client.stream(_PROMPT, max_tokens=256, ignore_eos=True, deadline=120):
        arrivals.append(time.monotonic())
        if len(arrivals) == events:
            os.kill(engine, signal.SIGKILL)
        if isinstance(event, Finished) and not event.interruptions:
            raise RuntimeError("the engine was killed, and its stream was not interrupted")
    return max(later - earlier for earlier, later in pairwise(arrivals[events - 1 :]))
