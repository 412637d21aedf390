"""Every proposer on the embedded pair: acceptance, and speed relative to plain decoding, on held-out functions.

    python -m benchmarks.proposers --out docs/benchmarks/proposers-cpu

Each request is its own tenant, so that nothing is learned or cached between rounds. Every configuration is measured in
every round, in processor seconds of one thread, so that the load of other programs does not count.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.progress import track

from benchmarks.harness.machine import machine
from engine.config import EngineConfig
from engine.engine import Engine
from engine.params import SamplingParams
from engine.startup.build import build_engine
from engine.text.codec import Codec
from engine.types import FinishedOutput, Request
from models import corpus, embedded_draft, embedded_eagle, embedded_medusa, embedded_target

PARTS: dict[str, dict[str, object]] = {
    "model": {"draft": str(embedded_draft())},
    "auto": {"draft": str(embedded_draft()), "eagle": str(embedded_eagle())},
    "self": {"self_layers": 3},
    "medusa": {"medusa": str(embedded_medusa())},
    "eagle": {"eagle": str(embedded_eagle())},
}
PROPOSERS = ("none", "ngram", "suffix", "model", "auto", "eagle", "medusa", "self")


@dataclass(frozen=True)
class ProposerRow:
    """One proposer at one K and batch. `gain` is the median ratio to plain decoding in the same round."""

    proposer: str
    num_draft: int
    batch: int
    acceptance_rate: float
    tokens_per_step: float  # of all steps that produced tokens, with drafts or without
    accepted_per_position: list[float]
    gain: float
    gain_range: tuple[float, float]


@dataclass(frozen=True)
class ProposerTurn:
    """One run over all prompts."""

    tokens: list[list[int]]
    ended: list[FinishedOutput]
    seconds: float


def main() -> None:
    """Measure and write `OUT.md` and `OUT.json`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--num-draft", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    options = parser.parse_args()
    codec = Codec.load(embedded_target())
    assert codec is not None, "the embedded target has a tokenizer"
    prompts = [tuple(codec.encode(text)) for text in corpus.held_out_prompts(options.prompts)]
    cells = [("none", 0), *((name, k) for name in PROPOSERS[1:] for k in options.num_draft)]
    rows = [row for b in options.batches for row in _batch(cells, prompts, b, options.tokens, options.rounds)]
    command = " ".join(["python -m benchmarks.proposers", *sys.argv[1:]])
    report = {"command": command, **machine(), "rows": [asdict(row) for row in rows]}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n")
    options.out.with_suffix(".md").write_text(_markdown(report, rows))


def _batch(
    cells: Sequence[tuple[str, int]], prompts: Sequence[tuple[int, ...]], batch: int, tokens: int, rounds: int
) -> Iterator[ProposerRow]:
    """Measure all configurations in each round; the first round is a warm-up and is not counted."""
    engines = {cell: _engine(*cell, batch) for cell in cells}
    turns: dict[tuple[str, int], list[ProposerTurn]] = {cell: [] for cell in cells}
    for number in track(range(rounds + 1), description=f"batch {batch}"):
        for cell, engine in engines.items():
            turns[cell].append(_turn(engine, prompts, tokens, f"{number}"))
    plain = turns["none", 0]
    for (name, k), mine in turns.items():
        if any(turn.tokens != plain[0].tokens for turn in mine):
            raise RuntimeError(f"{name} with K={k} gave other tokens than plain decoding")
        gains = [p.seconds / turn.seconds for p, turn in zip(plain[1:], mine[1:], strict=True)]
        yield _row(name, k, batch, mine[-1], gains)


def _engine(name: str, num_draft: int, batch: int) -> Engine:
    settings = {
        "target": str(embedded_target()),
        "dtype": "float32",
        "proposer": name,
        "num_draft_tokens": num_draft,
        "speculation": "fixed" if num_draft else "off",
        "max_batch_size": batch,
        "threads": 1,
    }
    return build_engine(EngineConfig.model_validate(settings | PARTS.get(name, {})))


def _turn(engine: Engine, prompts: Sequence[tuple[int, ...]], tokens: int, name: str) -> ProposerTurn:
    sampling = SamplingParams(max_tokens=tokens, ignore_eos=True)
    for i, prompt in enumerate(prompts):
        engine.add(Request(request_id=str(i), token_ids=prompt, sampling=sampling, cache_salt=f"{name}-{i}"))
    made: dict[str, list[int]] = {str(i): [] for i in range(len(prompts))}
    ended: list[FinishedOutput] = []
    start = time.process_time()
    while engine.has_work:
        for event in engine.step().events:
            made[event.request_id] += event.token_ids
            ended += [event.finished] if event.finished is not None else []
    return ProposerTurn(list(made.values()), ended, time.process_time() - start)


def _row(name: str, k: int, batch: int, turn: ProposerTurn, gains: list[float]) -> ProposerRow:
    stats = [ended.stats for ended in turn.ended]
    rounds, drafted, accepted = (sum(getattr(s, what) for s in stats) for what in ("rounds", "drafted", "accepted"))
    kept = [sum(s.accepted_per_position[i] for s in stats if i < len(s.accepted_per_position)) for i in range(k)]
    made = sum(map(len, turn.tokens))
    return ProposerRow(
        proposer=name,
        num_draft=k,
        batch=batch,
        acceptance_rate=accepted / drafted if drafted else 0.0,
        tokens_per_step=made / (made - accepted),
        accepted_per_position=[count / rounds for count in kept],
        gain=statistics.median(gains),
        gain_range=(min(gains), max(gains)),
    )


def _markdown(report: Mapping[str, object], rows: Sequence[ProposerRow]) -> str:
    lines = [
        "# Proposers on the embedded pair",
        "",
        f"`{report['command']}`",
        "",
        f"{report['machine']}; {report['versions']}; commit {report['commit']}. Greedy decoding, float32, fixed K, one",
        "thread. The run checked that every cell gave the same tokens as plain decoding. *Gain* is the processor",
        "time of plain decoding divided by that of the row in the same round: the median over rounds, and the range.",
        "*Tokens per step* counts all steps, including those without drafts. *Kept at position* counts only rounds",
        "with drafts.",
        "",
        "| batch | proposer | K | acceptance rate | tokens per step | gain | range | kept at position 1.. |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        kept, (low, high) = " ".join(f"{share:.2f}" for share in r.accepted_per_position), r.gain_range
        lines.append(
            f"| {r.batch} | {r.proposer} | {r.num_draft} | {r.acceptance_rate:.3f} | {r.tokens_per_step:.2f} "
            f"| {r.gain:.2f} | {low:.2f} to {high:.2f} | {kept} |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
