"""Ordinary load: callers who each send one request after another, and what they measure."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from loadtest.experiments.overload import REFUSED, SERVED, Ask, Run, Sample, Server, watching
from pilotfish.client import AsyncClient
from pilotfish.server.commands.progress import Progress


@dataclass(slots=True)
class Load:
    """The results so far. `seconds` is the time until the last answer."""

    callers: int
    seconds: float = 0.0
    calls: list[Sample] = field(default_factory=list)

    @property
    def served(self) -> list[Sample]:
        return [call for call in self.calls if call.status == SERVED]

    def lines(self) -> list[str]:
        """Return the results as Markdown lines."""
        served, tokens = self.served, sum(call.tokens for call in self.served)
        firsts = [call.first - call.sent for call in served if call.first is not None]
        # Time per token after the first one, of each answer.
        between = [(c.ended - c.first) / (c.tokens - 1) for c in served if c.first is not None and c.tokens > 1]
        seconds = self.seconds or max((call.ended for call in self.calls), default=0.0) or 1.0
        refused = sum(call.status == REFUSED for call in self.calls)
        head = (
            f"{self.callers} callers for {seconds:.0f} s: {len(self.calls)} requests, {len(served)} served, {refused} "
            f"refused; {len(served) / seconds:.1f} requests/s, {tokens / seconds:.0f} tokens/s."
        )
        return [
            head,
            "",
            "| | p50 | p90 | p99 |",
            "|---|---|---|---|",
            _row("time to first token, s", firsts),
            _row("time per further token, s", between),
            _row("whole answer, s", [call.ended - call.sent for call in served]),
        ]

    def problems(self) -> Iterator[str]:
        """Yield each violated expectation: requests are served or refused."""
        other = Counter(call.status for call in self.calls if call.status not in (SERVED, REFUSED))
        if other:
            yield f"some requests were neither served nor refused: {dict(other)}"
        if not self.served:
            yield "no request was served"


def _row(name: str, values: Sequence[float]) -> str:
    cuts = (
        statistics.quantiles(values, n=100, method="inclusive") if len(values) > 1 else [*values, *[0.0] * 99][:1] * 99
    )
    return f"| {name} | {cuts[49]:.3g} | {cuts[89]:.3g} | {cuts[98]:.3g} |"


async def load(server: Server, ask: Ask, found: Load, seconds: float, progress: Progress) -> None:
    """Let the callers of `found` send requests for `seconds`, and wait for the last answers."""
    progress.begin(f"{found.callers} callers", seconds=seconds)
    async with AsyncClient(server.address, token=server.token, retry=None) as client:
        await client.model_info()  # connect before the clock starts
        run = Run(client, ask)
        found.calls = run.calls
        async with watching(server, run.calls, progress):
            await run.closed_loop(found.callers, seconds)
        found.seconds = run.now()
