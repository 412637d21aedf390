"""Lookups over a long life: memory, time and acceptance of `suffix` as past outputs come and are forgotten.

    python -m benchmarks.lookups --tokens 5000000 --out docs/benchmarks/lookups

No model runs: prompts and outputs are pieces of the standard library in the embedded target's tokens, and a draft is
kept where the text goes on with it. Each request is of a tenant, a few of which send most.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.progress import track

from benchmarks.harness.machine import machine
from engine.params import SpeculationMode, SpeculationSettings, Verification
from engine.proposers import SuffixProposer
from engine.text.codec import Codec
from engine.types import Request
from engine.types import Sequence as Output
from models import corpus, embedded_target

K = 8
TENANTS = 300
_PROMPT, _OUTPUT = (64, 512), (32, 512)  # least and most tokens
_SPECULATION = SpeculationSettings(
    mode=SpeculationMode.AUTO, num_draft_tokens=K, proposer="suffix", verification=Verification.COUPLED
)


@dataclass(frozen=True)
class LookupRow:
    """One part of the run. `peak_mib` is the most that the process held so far; seconds are of the processor."""

    tokens: int  # of all requests so far, prompts included
    requests: int
    peak_mib: float
    median_us: float
    p99_us: float
    acceptance: float
    tokens_per_step: float


def main() -> None:
    """Run and write `OUT.md` and `OUT.json`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--tokens", type=int, default=5_000_000)
    parser.add_argument("--parts", type=int, default=10)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    rows = list(measure(texts(), options.tokens, options.parts))
    report = {"command": " ".join(["python -m benchmarks.lookups", *sys.argv[1:]]), **machine()}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.with_suffix(".json").write_text(json.dumps({**report, "rows": [*map(asdict, rows)]}, indent=1) + "\n")
    options.out.with_suffix(".md").write_text(markdown(report, rows))


def texts() -> list[list[int]]:
    """The library's modules as tokens."""
    codec = Codec.load(embedded_target())
    assert codec is not None, "the embedded target has a tokenizer"
    found = [list(codec.encode(path.read_text("utf-8"), bare=True)) for path in corpus.find().library]
    return [tokens for tokens in found if len(tokens) > _PROMPT[1] + _OUTPUT[1]]


def measure(sources: Sequence[list[int]], tokens: int, parts: int) -> Iterator[LookupRow]:
    """Serve requests one after the other until they come to so many tokens; a row for each part."""
    proposer, chance = SuffixProposer(), random.Random(0)  # noqa: S311 - a sample, no secret
    spent, number = 0, 0
    for part in track(range(1, parts + 1), description="lookups"):
        taken, drafted, accepted, made = list[float](), 0, 0, 0
        while spent < tokens * part // parts:
            text = chance.choice(sources)
            prompt, output = chance.randint(*_PROMPT), chance.randint(*_OUTPUT)
            start = chance.randrange(len(text) - prompt - output)
            tenant = str(int(TENANTS * chance.random() ** 3))
            for seconds, num_drafts, num_kept in _serve(
                proposer, text[start : start + prompt + output], prompt, tenant
            ):
                taken.append(seconds)
                drafted, accepted = drafted + num_drafts, accepted + num_kept
            spent, number, made = spent + prompt + output, number + 1, made + output
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        median, p99 = (1e6 * x for x in (statistics.median(taken), statistics.quantiles(taken, n=100)[98]))
        yield LookupRow(spent, number, peak, median, p99, accepted / max(1, drafted), made / len(taken))


def _serve(proposer: SuffixProposer, text: list[int], prompt: int, tenant: str) -> Iterator[tuple[float, int, int]]:
    """Seconds of each lookup, the drafts that it found and those that the text goes on with."""
    request = Request(request_id="r", token_ids=tuple(text[:prompt]), cache_salt=tenant)
    output = Output(
        request=request, seed=0, speculation=_SPECULATION, max_len=len(text), end_token_ids=frozenset(),
        tokens=text[:prompt],
    )  # fmt: skip
    while len(output.tokens) < len(text):
        position, start = len(output.tokens), time.thread_time()
        drafts = proposer.find(output, min(K, len(text) - position - 1)).tokens
        seconds, rest = time.thread_time() - start, text[position:]
        kept = next((i for i, (a, b) in enumerate(zip(drafts, rest, strict=False)) if a != b), len(drafts))
        output.tokens += rest[: kept + 1]
        yield seconds, len(drafts), kept


def markdown(report: dict[str, str], rows: Sequence[LookupRow]) -> str:
    """A table with a line for each part of the run."""
    lines = [
        "# Lookups over a long life",
        "",
        f"`{report['command']}`",
        "",
        f"{report['machine']}; {report['versions']}; commit {report['commit']}. Prompts and outputs are",
        f"pieces of the standard library, of {TENANTS} tenants, a few of which send most; K={K}. No model runs.",
        "*Peak*: the most that the process has held so far, texts of the benchmark included.",
        "",
        "| tokens so far | requests | peak MiB | lookup, median us | p99 us | acceptance | tokens per step |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row.tokens:,} | {row.requests:,} | {row.peak_mib:.0f} | {row.median_us:.0f} | {row.p99_us:.0f} "
        f"| {row.acceptance:.2f} | {row.tokens_per_step:.2f} |"
        for row in rows
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
