"""The pause of a stream when the engine dies, on an otherwise idle server."""

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
from loadtest.process import ServerProcess, engine_of

LONGEST = 2.0  # seconds, in the median
_PROMPT = (1, 5, 9, 12)  # token ids, because a checkpoint may have no tokenizer


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
            yield f"the median pause is {median(self.seconds):.2f} s; expected at most {LONGEST:g} s"


async def restarts(server: ServerProcess, deaths: int, random: Random, tell: Callable[[str], None]) -> Pauses:
    """Kill the engine once in each of `deaths` streams; return their pauses."""
    pauses = []
    async with AsyncClient(server.address) as client:
        for _ in range(deaths):
            pauses.append(await _pause(client, server, random.randint(2, 10)))
            tell(f"{pauses[-1]:.2f} s")
    return Pauses(pauses)


async def _pause(client: AsyncClient, server: ServerProcess, events: int) -> float:
    """Kill the engine after `events` events of a stream; return the longest pause after that, in seconds."""
    engine = engine_of(server.pid)
    if engine is None:
        raise RuntimeError("the server has no engine")
    arrivals: list[float] = []
    async for event in client.stream(_PROMPT, max_tokens=256, ignore_eos=True, deadline=120):
        arrivals.append(time.monotonic())
        if len(arrivals) == events:
            os.kill(engine, signal.SIGKILL)
        if isinstance(event, Finished) and not event.interruptions:
            raise RuntimeError("the engine was killed, but the stream was not interrupted")
    return max(later - earlier for earlier, later in pairwise(arrivals[events - 1 :]))
