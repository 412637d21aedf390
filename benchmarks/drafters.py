"""`auto` against every single proposer, with all of them loaded, on five kinds of text that suit different ones.

    python -m benchmarks.drafters --out docs/benchmarks/drafters-cpu

The embedded target with its draft model, its heads and lookups. Every way is measured in every round, in processor
seconds of one thread, and compared with plain decoding in the same round. `auto` has an engine of its own, so that it
learns from its own steps alone; both engines are calibrated as at the start of a server. Each request is its own
tenant: nothing is cached or found between turns.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path

from rich.progress import track

from benchmarks.harness.machine import machine
from engine.config import EngineConfig
from engine.engine import Engine
from engine.params import SamplingParams, SpeculationMode, SpeculationParams
from engine.startup.build import build_engine
from engine.startup.warm import make_ready
from engine.text.codec import Codec
from engine.types import AUTO, Request
from models import corpus, embedded_draft, embedded_eagle, embedded_medusa, embedded_target

PLAIN = "none"
MODES = {"auto": (SpeculationMode.AUTO, 8), "K=4": (SpeculationMode.FIXED, 4)}
_CALIBRATION = 4.0  # seconds, as at the start of a server
_names = count()


@dataclass(frozen=True)
class DrafterRow:
    """One proposer under one mode on one kind of text. `gain` is over plain decoding: the median over rounds."""

    text: str
    batch: int
    mode: str
    proposer: str
    gain: float
    gains: list[float]
    tokens_per_step: float


def main() -> None:
    """Measure and write `OUT.md` and `OUT.json`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--prompts", type=int, default=8, help="of each kind of text")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--modes", nargs="+", default=list(MODES), choices=list(MODES))
    options = parser.parse_args()
    codec = Codec.load(embedded_target())
    assert codec is not None, "the embedded target has a tokenizer"
    kinds = {kind: [tuple(codec.encode(t)) for t in texts] for kind, texts in texts_of(options.prompts).items()}
    rows = [
        row
        for batch in options.batches
        for row in _measure(kinds, batch, options.modes, options.tokens, options.rounds)
    ]
    command = " ".join(["python -m benchmarks.drafters", *sys.argv[1:]])
    report = {"command": command, **machine(), "rows": [asdict(row) for row in rows]}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n")
    options.out.with_suffix(".md").write_text(markdown(report, rows))


def texts_of(number: int) -> dict[str, list[str]]:
    """So many prompts of each kind: code, text that repeats itself, edits of a function, JSON, and unlike anything."""
    chance, starts = random.Random(0), corpus.held_out_prompts(3 * number)  # noqa: S311 - a sample, no secret
    functions = [start for start in starts[number:] if start.count("\n") > 6][:number]
    records = [
        [{"id": i, "name": f"item{i}", "price": chance.randrange(999), "tags": ["new", "red"]} for i in range(6)]
        for _ in range(number)
    ]
    return {
        "code": starts[:number],
        "repetition": [_line(start) * 12 for start in starts[:number]],
        "edits": [f"{text}\n    return None\n\n{_head(text, 3).replace('self', 'this')}" for text in functions],
        "JSON": [json.dumps(rows, indent=1)[:-90] for rows in records],
        "unlike anything": ["".join(chr(chance.randrange(33, 126)) for _ in range(200)) for _ in range(number)],
    }


def _line(text: str) -> str:
    """The longest line of a text."""
    return max(text.splitlines(), key=len) + "\n"


def _head(text: str, lines: int) -> str:
    """The first lines of a text."""
    return "".join(text.splitlines(keepends=True)[:lines])


def _measure(
    kinds: Mapping[str, list[tuple[int, ...]]], batch: int, modes: Sequence[str], tokens: int, rounds: int
) -> list[DrafterRow]:
    """Every way in every round; the first round is a warm-up and is not counted."""
    engines = {is_auto: _engine(batch) for is_auto in (True, False)}
    names = [name for name in engines[True].proposer_names if name not in (PLAIN, "ngram")]
    ways = [(PLAIN, PLAIN), *((mode, name) for mode in modes for name in names)]
    seconds: dict[tuple[str, str, str], list[float]] = {(kind, *way): [] for kind in kinds for way in ways}
    per_step: dict[tuple[str, str, str], float] = {}
    for number in track(range(rounds + 1), description=f"batch {batch}"):
        for kind, prompts in kinds.items():
            plain: list[list[int]] = []
            for way in ways:
                made, steps, spent = _turn(engines[way[1] == AUTO], prompts, tokens, *way)
                plain = plain or made
                if made != plain:
                    raise RuntimeError(f"{way} gave other tokens than plain decoding")
                per_step[(kind, *way)] = sum(map(len, made)) / steps
                if number:
                    seconds[(kind, *way)].append(spent)
    rows = []
    for (kind, mode, name), mine in seconds.items():
        gains = [a / b for a, b in zip(seconds[kind, PLAIN, PLAIN], mine, strict=True)]
        rows.append(DrafterRow(kind, batch, mode, name, statistics.median(gains), gains, per_step[kind, mode, name]))
    return rows


def _engine(batch: int) -> Engine:
    settings = {
        "target": str(embedded_target()),
        "draft": str(embedded_draft()),
        "eagle": str(embedded_eagle()),
        "medusa": str(embedded_medusa()),
        "dtype": "float32",
        "max_batch_size": batch,
        "threads": 1,
    }
    engine = build_engine(EngineConfig.model_validate(settings))
    make_ready(engine, _CALIBRATION)
    return engine


def _turn(
    engine: Engine, prompts: Sequence[tuple[int, ...]], tokens: int, mode: str, proposer: str
) -> tuple[list[list[int]], int, float]:
    """Run all prompts; return their tokens, the number of steps and the processor seconds."""
    how, most = MODES.get(mode, (SpeculationMode.OFF, None))
    speculation = SpeculationParams(mode=how, num_draft_tokens=most, proposer=proposer)
    sampling = SamplingParams(max_tokens=tokens, ignore_eos=True)
    made: dict[str, list[int]] = {f"{proposer}-{next(_names)}": [] for _ in prompts}
    for name, prompt in zip(made, prompts, strict=True):
        engine.add(
            Request(request_id=name, token_ids=prompt, sampling=sampling, speculation=speculation, cache_salt=name)
        )
    steps, start = 0, time.process_time()
    while engine.has_work:
        steps += 1
        for event in engine.step().events:
            made[event.request_id] += event.token_ids
    return list(made.values()), steps, time.process_time() - start


def markdown(report: Mapping[str, object], rows: Sequence[DrafterRow]) -> str:
    """A table for each batch and mode: gains of each proposer, and `auto` against the best of the others."""
    lines = [
        "# `auto` and what it chooses from",
        "",
        f"`{report['command']}`",
        "",
        f"{report['machine']}; {report['versions']}; commit {report['commit']}. Greedy decoding, float32, one",
        "thread. The run checked that every way gave the tokens of plain decoding. *Gain*: the processor time of plain",
        "decoding divided by that of the way, in the same round; medians over rounds. *auto / best*: the median over",
        "rounds of auto's gain over that of the single proposer whose median is the highest.",
    ]
    for batch, mode in dict.fromkeys((row.batch, row.mode) for row in rows if row.mode != PLAIN):
        mine = [row for row in rows if (row.batch, row.mode) == (batch, mode)]
        names = list(dict.fromkeys(row.proposer for row in mine))
        lines += ["", f"## Batch {batch}, {mode}", "", "| text | " + " | ".join(names) + " | auto / best | range |"]
        lines.append("|---" * (len(names) + 3) + "|")
        for text in dict.fromkeys(row.text for row in mine):
            of = {row.proposer: row for row in mine if row.text == text}
            best = max((row for name, row in of.items() if name != AUTO), key=lambda row: row.gain)
            ratios = [a / b for a, b in zip(of[AUTO].gains, best.gains, strict=True)]
            cells = " | ".join(f"{of[name].gain:.2f}" for name in names)
            lines.append(
                f"| {text} | {cells} | {statistics.median(ratios):.2f} ({best.proposer}) "
                f"| {min(ratios):.2f} to {max(ratios):.2f} |"
            )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
