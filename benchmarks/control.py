"""Compare AUTO with no drafts and with every fixed number of drafts, on the embedded pair and held-out functions.

    python -m benchmarks.control --out docs/benchmarks/control-cpu

Every configuration is measured in every round, in processor seconds of one thread. Fixed numbers and plain decoding
share an engine. AUTO has its own engine, so that it learns only from its own steps. It has no warm-up round, so that
the report can show the first round beside the last.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path

from rich.progress import track

from benchmarks.harness.machine import machine
from engine.config import EngineConfig
from engine.engine import Engine
from engine.params import SamplingParams, SpeculationMode, SpeculationParams
from engine.startup.build import build_engine
from engine.startup.calibrate import calibrate
from engine.text.codec import Codec
from engine.types import Request
from models import corpus, embedded_draft, embedded_target

MOST = 8
AUTO = "auto"
_names = count()


@dataclass(frozen=True)
class ControlRow:
    """One way to choose K. Gains are ratios of processor time to plain decoding's in the same round."""

    proposer: str
    batch: int
    k: str
    drafts_per_step: float
    gain: float
    gains: list[float]
    estimate: float  # control's own estimate of its speed-up in the last round


@dataclass(frozen=True)
class ControlTurn:
    """One run over all prompts."""

    tokens: list[list[int]]
    seconds: float
    drafts_per_step: float
    estimate: float


def main() -> None:
    """Measure and write `OUT.md` and `OUT.json`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--proposers", nargs="+", default=["model", "auto"])
    parser.add_argument("--fixed", type=int, nargs="+", default=list(range(1, MOST + 1)))
    options = parser.parse_args()
    codec = Codec.load(embedded_target())
    assert codec is not None, "the embedded target has a tokenizer"
    prompts = [tuple(codec.encode(text)) for text in corpus.held_out_prompts(options.prompts)]
    ways = [*map(str, [0, *options.fixed]), AUTO]
    rows = [
        row
        for proposer in options.proposers
        for batch in options.batches
        for row in _batch(proposer, ways, prompts, batch, options.tokens, options.rounds)
    ]
    command = " ".join(["python -m benchmarks.control", *sys.argv[1:]])
    report = {"command": command, **machine(), "rows": [asdict(row) for row in rows]}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n")
    options.out.with_suffix(".md").write_text(_markdown(report, rows))


def _batch(
    proposer: str, ways: Sequence[str], prompts: Sequence[tuple[int, ...]], batch: int, tokens: int, rounds: int
) -> Iterator[ControlRow]:
    engines = {fixed: _engine(proposer, batch) for fixed in (True, False)}
    calibrate(engines[False], 1.0)
    turns: dict[str, list[ControlTurn]] = {way: [] for way in ways}
    _turn(engines[True], prompts, tokens, "1", proposer)  # warm-up, so that one-time costs are not measured
    for _ in track(range(rounds), description=f"{proposer}, batch {batch}"):
        for way in ways:
            turns[way].append(_turn(engines[way != AUTO], prompts, tokens, way, proposer))
    plain = turns["0"]
    for way, mine in turns.items():
        if any(turn.tokens != plain[0].tokens for turn in mine):
            raise RuntimeError(f"K={way} gave other tokens than plain decoding")
        gains = [p.seconds / turn.seconds for p, turn in zip(plain, mine, strict=True)]
        yield ControlRow(
            proposer, batch, way, mine[-1].drafts_per_step, statistics.median(gains), gains, mine[-1].estimate
        )


def _engine(proposer: str, batch: int) -> Engine:
    settings = {
        "target": str(embedded_target()),
        "draft": str(embedded_draft()),
        "dtype": "float32",
        "proposer": proposer,
        "num_draft_tokens": MOST,
        "max_batch_size": batch,
        "threads": 1,
    }
    engine = build_engine(EngineConfig.model_validate(settings))
    engine.warm_up()
    return engine


def _turn(engine: Engine, prompts: Sequence[tuple[int, ...]], tokens: int, way: str, proposer: str) -> ControlTurn:
    """Run all prompts; each request is its own tenant, so that nothing is cached between turns."""
    mode = SpeculationMode.AUTO if way == AUTO else SpeculationMode.FIXED if int(way) else SpeculationMode.OFF
    speculation = SpeculationParams(
        mode=mode, num_draft_tokens=MOST if way == AUTO else int(way), proposer=proposer if way != "0" else None
    )
    sampling = SamplingParams(max_tokens=tokens, ignore_eos=True)
    salt = next(_names)
    for i, prompt in enumerate(prompts):
        engine.add(
            Request(
                request_id=str(i),
                token_ids=prompt,
                sampling=sampling,
                speculation=speculation,
                cache_salt=f"{salt}-{i}",
            )
        )
    made: dict[str, list[int]] = {str(i): [] for i in range(len(prompts))}
    drafted = fed = 0
    start = time.process_time()
    while engine.has_work:
        output = engine.step()
        drafted += output.stats.drafted
        fed += len(output.events)
        for event in output.events:
            made[event.request_id] += event.token_ids
    return ControlTurn(list(made.values()), time.process_time() - start, drafted / fed, engine.spec_gain)


def _markdown(report: Mapping[str, object], rows: Sequence[ControlRow]) -> str:
    lines = [
        "# As many drafts as pay",
        "",
        f"`{report['command']}`",
        "",
        f"{report['machine']}; {report['versions']}; commit {report['commit']}. Embedded pair, greedy, float32, one",
        "thread. Every cell gave the same tokens as plain decoding (checked in the run). Gain: median over rounds of",
        "processor time against K=0 in the same round; then the first round, the last, and what control believes.",
        "",
        "| proposer | batch | K | drafts per sequence and step | gain | first round | last round | own estimate |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        estimate = f"{r.estimate:.2f}" if r.k == AUTO else ""
        lines.append(
            f"| {r.proposer} | {r.batch} | {r.k} | {r.drafts_per_step:.2f} | {r.gain:.3f} | {r.gains[0]:.2f} "
            f"| {r.gains[-1]:.2f} | {estimate} |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
