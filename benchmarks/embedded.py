"""K sweep of the embedded pair on held-out modules: acceptance, and speed relative to plain decoding.

    python -m benchmarks.embedded --out docs/benchmarks/embedded-cpu

Every K is measured in every round, so that a slow minute of a shared machine slows all of them. A ratio is the median
over rounds of the ratios to plain decoding in the same round.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.progress import track

from benchmarks.harness.machine import machine
from engine import LLM, CompletionOutput, SamplingParams
from models import corpus, embedded_draft, embedded_target


@dataclass(frozen=True)
class SweepRow:
    """One K. Speeds in tokens per second; `gain` is the median ratio to plain decoding in the same round."""

    num_draft: int
    batch: int
    acceptance_rate: float
    acceptance_length: float
    accepted_per_position: list[float]
    tokens_per_second: float
    gain: float
    gain_range: tuple[float, float]


def main() -> None:
    """Measure and write `OUT.md` and `OUT.json`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    options = parser.parse_args()
    prompts = corpus.held_out_prompts(options.prompts)
    params = SamplingParams(max_tokens=options.tokens, ignore_eos=True)
    sweep = range(9)
    llms = {k: _llm(k, options.threads) for k in sweep}
    rows = [row for batch in options.batches for row in _sweep(llms, prompts, params, batch, options.rounds)]
    report = {
        "command": " ".join(["python -m benchmarks.embedded", *sys.argv[1:]]),
        **machine(),
        "rows": [asdict(r) for r in rows],
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n")
    options.out.with_suffix(".md").write_text(_markdown(report, rows))


def _llm(num_draft: int, threads: int | None) -> LLM:
    return LLM(
        embedded_target(),
        embedded_draft(),
        dtype="float32",
        speculation="fixed" if num_draft else "off",
        num_draft_tokens=num_draft,
        threads=threads,
        max_batch_size=16,
    )


def _sweep(
    llms: dict[int, LLM], prompts: Sequence[str], params: SamplingParams, batch: int, rounds: int
) -> list[SweepRow]:
    """Measure all K in each round; the first round is a warm-up and is not counted."""
    speeds: dict[int, list[float]] = {k: [] for k in llms}
    done: dict[int, list[CompletionOutput]] = {}
    for turn in track(range(rounds + 1), description=f"batch {batch}"):
        for k, llm in llms.items():
            start = time.perf_counter()
            done[k] = [c for i in range(0, len(prompts), batch) for c in llm.generate(prompts[i : i + batch], params)]
            if turn:
                speeds[k].append(sum(len(c.token_ids) for c in done[k]) / (time.perf_counter() - start))
    plain = [c.token_ids for c in done[0]]
    for k, completions in done.items():
        if [c.token_ids for c in completions] != plain:
            raise RuntimeError(f"K={k} gave other tokens than plain decoding")
    return [_row(k, batch, done[k], speeds[k], speeds[0]) for k in llms]


def _row(k: int, batch: int, done: list[CompletionOutput], speeds: list[float], plain: list[float]) -> SweepRow:
    stats = [c.stats for c in done]
    rounds, drafted, accepted = (sum(getattr(s, name) for s in stats) for name in ("rounds", "drafted", "accepted"))
    kept = [sum(s.accepted_per_position[i] for s in stats if i < len(s.accepted_per_position)) for i in range(k)]
    gains = [a / b for a, b in zip(speeds, plain, strict=True)]
    return SweepRow(
        num_draft=k,
        batch=batch,
        acceptance_rate=accepted / drafted if drafted else 0.0,
        acceptance_length=1 + accepted / rounds if rounds else 1.0,
        accepted_per_position=[count / rounds for count in kept],
        tokens_per_second=statistics.median(speeds),
        gain=statistics.median(gains),
        gain_range=(min(gains), max(gains)),
    )


def _markdown(report: Mapping[str, object], rows: Sequence[SweepRow]) -> str:
    lines = [
        "# The embedded pair on held-out modules",
        "",
        f"`{report['command']}`",
        "",
        f"{report['machine']}; {report['versions']}; commit {report['commit']}. Greedy decoding, float32. The run",
        "checked that every K gave the same tokens as plain decoding. *Gain* is tokens/s divided by the tokens/s of",
        "K=0 in the same round: the median over rounds, and the range. *Kept at position* is the share of rounds with",
        "drafts in which the draft at that position was accepted.",
        "",
        "| batch | K | acceptance rate | acceptance length | tokens/s | gain | range | kept at position 1.. |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        kept = " ".join(f"{share:.2f}" for share in r.accepted_per_position)
        low, high = r.gain_range
        lines.append(
            f"| {r.batch} | {r.num_draft} | {r.acceptance_rate:.3f} | {r.acceptance_length:.2f} "
            f"| {r.tokens_per_second:.0f} | {r.gain:.2f} | {low:.2f} to {high:.2f} | {kept} |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
