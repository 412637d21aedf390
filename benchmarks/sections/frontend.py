"""The cost of streaming a token when the model costs nothing: through gRPC and SSE, and part by part."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from benchmarks.frontend.callers import FRONT_ENDS, Streamed, stream
from benchmarks.frontend.parts import PARTS
from benchmarks.frontend.process import Server, Used, serving
from benchmarks.harness.lab import Lab, Row, Section

STREAMS = (1, 16, 64, 256)
TOKENS = 12_000  # of all streams of one turn together
PAUSE = 0.05  # seconds between two steps, so that the server can keep up: 256 streams are 5,120 tokens/s
WARM_UP = 0.1  # of a turn's tokens, before the first turn of a front end

REST_OF_LOOP = "the rest of the event loop: tasks, uvloop, gRPC's own"
OTHER_THREADS = "other threads: gRPC's core, the engine's steps"


def measure(lab: Lab) -> list[Row]:
    """Measure every front end with every number of streams; steps run as fast as the server takes them."""
    wanted = lab.options.streams or STREAMS
    with serving() as server:
        return [_row(lab, server, door, streams) for door in FRONT_ENDS for streams in wanted]


def _row(lab: Lab, server: Server, door: str, streams: int) -> Row:
    lab.tell(f"frontend: {door}, {streams} streams")
    turns = list(_turns(lab, server, door, streams))
    median = partial(_median, turns)
    return {
        "door": door,
        "streams": streams,
        "tokens_per_second": median(lambda turn, _: turn.tokens / turn.seconds),
        "messages": median(lambda turn, _: turn.tokens / turn.messages),
        "cpu": median(lambda turn, used: 1e6 * used.total / turn.tokens),
        "cpu_of_message": median(lambda turn, used: 1e6 * used.total / turn.messages),
        "cores": median(lambda turn, used: used.total / turn.seconds),
    }


def _turns(lab: Lab, server: Server, door: str, streams: int) -> Iterator[tuple[Streamed, Used]]:
    """Run a warm-up turn, then as many turns as the options specify."""
    tokens = max(10, (TOKENS if lab.options.streams is None else lab.options.tokens) // streams)
    asyncio.run(stream(FRONT_ENDS[door], server, streams, round(WARM_UP * tokens)))
    for _ in range(lab.options.rounds):
        before = server.used()
        turn = asyncio.run(stream(FRONT_ENDS[door], server, streams, tokens))
        yield turn, server.used().since(before)


def _median(turns: Sequence[tuple[Streamed, Used]], of: Callable[[Streamed, Used], float]) -> float:
    return statistics.median(of(turn, used) for turn, used in turns)


def measure_parts(lab: Lab) -> list[Row]:
    """Measure the most streams with one message per token, on a server with timed parts and on one without."""
    streams = max(lab.options.streams or STREAMS)
    with serving(pause=PAUSE, parts=True) as apart, serving(pause=PAUSE) as whole:
        lab.tell(f"frontend-parts: {streams} streams")
        found = {door: _costs(list(_turns(lab, apart, door, streams))) for door in FRONT_ENDS}
        known = {
            door: _median(list(_turns(lab, whole, door, streams)), lambda turn, used: 1e6 * used.total / turn.tokens)
            for door in FRONT_ENDS
        }
    rows = [_part(name, {door: costs[name] / sum(costs.values()) for door, costs in found.items()}, known)
            for name in [*PARTS.values(), REST_OF_LOOP, OTHER_THREADS]]  # fmt: skip
    return [*rows, {"part": "all, per token", **known, **{f"{door} share": 1.0 for door in FRONT_ENDS}}]


def _part(name: str, shares: dict[str, float], known: dict[str, float]) -> Row:
    """Apply the parts' shares, from the server with timed parts, to the time of the server without them."""
    parts = {door: share * known[door] for door, share in shares.items()}
    return {"part": name, **parts, **{f"{door} share": share for door, share in shares.items()}}


def _costs(turns: Sequence[tuple[Streamed, Used]]) -> dict[str, float]:
    """Return microseconds per token of each part, medians over the turns."""

    def cost(of: Callable[[Used], float]) -> float:
        return max(0.0, _median(turns, lambda turn, used: 1e6 * of(used) / turn.tokens))

    parts = {text: cost(lambda used, name=name: used.parts.get(name, 0.0)) for name, text in PARTS.items()}  # type: ignore[misc]
    rest = cost(lambda used: used.loop - sum(used.parts.values()))
    return parts | {REST_OF_LOOP: rest, OTHER_THREADS: cost(lambda used: used.total - used.loop)}


def verdict(rows: Sequence[Row]) -> Sequence[str]:
    """Return a sentence about the largest number of streams."""
    most = max(row["streams"] for row in rows)
    told = (
        f"{row['tokens_per_second']:,.0f} tokens/s through {row['door']} ({row['cpu']:.0f} µs of processor per token)"
        for row in rows
        if row["streams"] == most
    )
    return [f"With {most} streams: " + ", ".join(told) + "."]


def verdict_of_parts(rows: Sequence[Row]) -> Sequence[str]:
    """Return a sentence about the largest part of each front end."""
    told = (
        f"{door} {rows[-1][door]:.0f} µs per token, most of it in “{largest['part']}” ({largest[f'{door} share']:.0%})"
        for door in FRONT_ENDS
        for largest in [max(rows[:-1], key=lambda row, door=door: row[door])]  # type: ignore[misc]
    )
    return ["; ".join(told) + "."]


_SUBJECT = "an engine without a model, one token per step and stream"

SECTIONS = (
    Section(
        "frontend",
        "Tokens per second",
        measure,
        "Steps are taken as fast as the driver asks for them. Tokens per message: what has gathered while a reader was "
        "busy goes out in one message. Cores: processor time of the server over time. Median over rounds.",
        {
            "door": "{door}",
            "streams": "{streams}",
            "tokens/s": "{tokens_per_second:,.0f}",
            "tokens per message": "{messages:.2f}",
            "µs of processor per token": "{cpu:.0f}",
            "µs per message": "{cpu_of_message:.0f}",
            "cores": "{cores:.2f}",
        },
        verdict=verdict,
        page="frontend",
        subject=_SUBJECT,
    ),
    Section(
        "frontend-parts",
        "Where the time of a token goes",
        measure_parts,
        f"{max(STREAMS)} streams, a step each {1000 * PAUSE:.0f} ms, so that the server keeps up and each token is a "
        "message of its own. Shares are of a server whose functions note when they run "
        "(`benchmarks/frontend/parts.py`), "
        "which costs about a quarter more; microseconds are these shares of the processor time of one that is left "
        "alone.",
        {
            "part": "{part}",
            **{
                f"{door}{unit}": form
                for door in FRONT_ENDS
                for unit, form in ((", µs", f"{{{door}:.1f}}"), (", share", f"{{{door} share:.0%}}"))
            },
        },
        verdict=verdict_of_parts,
        page="frontend",
        subject=_SUBJECT,
    ),
)
