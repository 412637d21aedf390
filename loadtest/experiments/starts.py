"""Cold starts: a server begins with nothing learned, drafts at once, and says what every start before it said.

A drafter that is loaded wrongly now and then (memory that was never written, a race of two loaders) serves right tokens
slowly: its drafts are never accepted, and no test of tokens shows it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from client import Client, GenerateOptions, RequestFailedError
from loadtest.process import ServerProcess

_EAGLE = Path(__file__).parents[2] / "models" / "eagle"
CACHE = "cache"  # folder of what servers learn, in that of the results
HEAD = ("--eagle", str(_EAGLE), "--proposer", "eagle", "--speculation", "fixed", "--num-draft-tokens", "4")
_PROMPT = "def parse(self, text):\n    lines = text.split("
_ASKED: GenerateOptions = {"max_tokens": 64, "ignore_eos": True}


@dataclass(frozen=True, slots=True)
class ColdStart:
    """One start, and the first output after it."""

    seconds: float  # until it serves
    token_ids: Sequence[int]
    drafted: int
    accepted: int


@dataclass(frozen=True, slots=True)
class ColdStarts:
    """All starts; one that failed is a message."""

    started: Sequence[ColdStart]
    failed: Sequence[str]

    def lines(self) -> list[str]:
        """Return the results as Markdown lines."""
        total, rates = (
            len(self.started) + len(self.failed),
            [one.accepted / max(one.drafted, 1) for one in self.started],
        )
        if not rates:
            return [f"Cold starts: {total}, {total} failed."]
        seconds = [one.seconds for one in self.started]
        took, accepted = (f"{min(values):.3g} to {max(values):.3g}" for values in (seconds, rates))
        return [f"Cold starts: {total}, {len(self.failed)} failed; {took} s; share of drafts accepted {accepted}."]

    def problems(self) -> Iterator[str]:
        """Yield each violated expectation."""
        yield from self.failed
        for number, one in enumerate(self.started):
            if not one.accepted:
                yield f"start {number} accepted none of {one.drafted} drafts"
            if (one.token_ids, one.accepted) != (self.started[0].token_ids, self.started[0].accepted):
                yield f"start {number} gave other tokens, or accepted other drafts, than the first"


def cold_starts(server: ServerProcess, cache: Path, runs: int, tell: Callable[[str], None]) -> ColdStarts:
    """Start the server, whose `cache` has what it learned, again `runs` times with nothing learned, and ask it once."""
    started, failed = [], []
    for run in range(runs):
        server.stop()
        _forget(cache)
        try:
            started.append(_start(server))
        except (RuntimeError, TimeoutError, RequestFailedError) as error:
            failed.append(f"start {run}: {error}")
            tell(failed[-1])
        else:
            tell(f"start {run}: {started[-1].accepted} of {started[-1].drafted} drafts accepted")
    return ColdStarts(started, failed)


def _start(server: ServerProcess) -> ColdStart:
    begin = time.monotonic()
    server.start()
    seconds = time.monotonic() - begin
    with Client(server.address) as client:
        (output,) = client.generate(_PROMPT, **_ASKED).outputs
    stats = output.finished.speculation_stats
    return ColdStart(seconds, output.token_ids, stats.drafted, stats.accepted)


def _forget(cache: Path) -> None:
    """Empty the cache but for the compiled code, which the first start of a machine makes and all others find."""
    for path in cache.rglob("*"):
        if path.is_file() and not path.match("native-*.so"):
            path.unlink()
