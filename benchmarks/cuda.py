"""What a GPU makes of Pilotfish's kernels and rounds, against what its memory and its matmuls allow, and beside others.

    python -m benchmarks.cuda --out docs/benchmarks/cuda.md

Random bf16 weights in the shapes of Llama 3.1 8B and Llama 3.2 1B; nothing is downloaded. Real cost, synthetic
acceptance (`cuda_engines`, `cuda_peers`). Limits are of this card, measured in the same run: bytes that a pass must
read over the rate of a copy, or its operations over the rate of a large matmul, whichever takes longer.
"""

from __future__ import annotations

import argparse
import gc
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

from benchmarks.cuda_engines import (
    CHUNK,
    PAGE,
    SHAPES,
    Measured,
    Pair,
    empty,
    engine_of,
    expected_tokens,
    fill,
    measure,
    round_limit,
)
from benchmarks.cuda_kernels import Card, attention_table, measured_card, sampling_table
from benchmarks.cuda_peers import assisted, continuous
from engine.engine import Engine

MOST_DRAFTS, MOST_AUTO = 7, 4
_STRANGE = 120  # steps in which AUTO finds out what pays
_WARM, _HOST = 6, 8  # steps before timing, and after it
GOALS = """
Goals: plain decoding at least 80 % of its limit at batches 1 to 32; the speed-up at least 85 % of what the limits
allow; AUTO at least 0.97 of plain decoding; attention at context 8K at least 70 % of a copy; 3 times the tokens per
second of transformers."""


def main() -> None:
    """Print as it goes; write it all at the end."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--shapes", nargs=2, default=["8b", "1b"], choices=list(SHAPES), metavar=("TARGET", "DRAFT"))
    parser.add_argument("--sizes", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--auto-sizes", nargs="+", type=int, default=[1, 8, 32, 64, 128])
    parser.add_argument("--acceptance", type=float, default=0.8)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--attention-context", type=int, default=8192)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--peer-tokens", nargs=2, type=int, default=[16, 80], help="two lengths; none: 0 0")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    lines = []
    for line in report(asked):
        print(line, flush=True)
        lines.append(line)
    if asked.out is not None:
        asked.out.write_text("\n".join(lines) + "\n")


def report(asked: argparse.Namespace) -> Iterator[str]:
    """Every line of it."""
    torch.manual_seed(0)
    card = measured_card(torch.device(asked.device))
    yield "# On a GPU\n"
    yield f"{_command()}, {card.name}, torch {torch.__version__}."
    yield f"Copies {card.bytes_per_second / 1e12:.2f} TB/s, bf16 {card.flops / 1e12:.0f} TFLOP/s."
    yield GOALS
    if card.is_cuda:
        yield from attention_table(card, asked.attention_context)
        yield from sampling_table(card, SHAPES[asked.shapes[0]]["vocab_size"])
    rates: dict[int, float] = {}
    yield from _ours(asked, card, rates)
    gc.collect()
    if card.is_cuda:
        torch.cuda.empty_cache()
    if all(asked.peer_tokens):
        yield from peers_table(asked, card, rates)


def _command() -> str:
    git = subprocess.run(("git", "rev-parse", "--short", "HEAD"), capture_output=True, text=True, check=False)  # noqa: S607
    return f"`python -m benchmarks.cuda {' '.join(sys.argv[1:])}`, commit {git.stdout.strip() or 'unknown'}"


def _ours(asked: argparse.Namespace, card: Card, rates: dict[int, float]) -> Iterator[str]:
    """Our tables, with models and arenas that are gone when they are done. `rates` gets tokens per second by batch."""
    pair = Pair.of(tuple(asked.shapes), card)
    yield from rounds_table(asked, pair, card, rates)
    gc.collect()
    yield from auto_table(asked, pair, card)


def rounds_table(asked: argparse.Namespace, pair: Pair, card: Card, rates: dict[int, float]) -> Iterator[str]:
    """Plain decoding against its limit, then the K that the limits prefer against the speed-up that they allow."""
    longest = longest_of(asked, max(asked.sizes), _WARM, MOST_DRAFTS)
    engine = engine_of(pair, card, asked.acceptance, max(asked.sizes), longest, MOST_DRAFTS)
    yield f"\n## Rounds, context {asked.context}, acceptance {asked.acceptance} (synthetic), temperature 1\n"
    yield "Host: what a step costs Python, and how much of the step the device stood still; the rest is hidden.\n"
    yield "| batch | K | ms a step | tokens each | tok/s | of limit | speed-up | of its limit | host ms | shown ms |"
    yield "|---|---|---|---|---|---|---|---|---|---|"
    for size in asked.sizes:
        plain = 0.0
        gains = _limits(asked, pair, card, size)
        for k in (0, max(gains, key=lambda k: gains[k])):
            got = _settled(asked, engine, card, size, k, _WARM)
            rates[size] = rate = size * got.tokens / got.seconds
            plain = plain or rate
            limit = size * expected_tokens(asked.acceptance, k) / round_limit(pair, card, size, asked.context, k)
            gain = f"{rate / plain:.2f} | {rate / plain / gains[k]:.0%}" if k else "1 | "
            times = f"{got.seconds * 1e3:.2f} | {got.tokens:.2f} | {rate:.0f} | {rate / limit:.0%}"
            yield f"| {size} | {k} | {times} | {gain} | {got.host_seconds * 1e3:.2f} | {got.shown * 1e3:.2f} |"


def longest_of(asked: argparse.Namespace, size: int, warm_up: int, k: int) -> int:
    """Room for the prompt, and for K + 1 tokens in each step; the first to come ride while others are still fed."""
    feeding = -(-size * asked.context // CHUNK)
    return int(asked.context + (feeding + warm_up + asked.steps + 2 * _HOST) * (k + 1))


def _limits(asked: argparse.Namespace, pair: Pair, card: Card, size: int) -> dict[int, float]:
    """The speed-up over plain decoding that each K could have at most."""
    plain = round_limit(pair, card, size, asked.context, 0)
    return {
        k: expected_tokens(asked.acceptance, k) * plain / round_limit(pair, card, size, asked.context, k)
        for k in range(1, MOST_DRAFTS + 1)
    }


def auto_table(asked: argparse.Namespace, pair: Pair, card: Card) -> Iterator[str]:
    """As many drafts as pay, against none, where drafts pay and where they hardly do."""
    strange = _STRANGE if card.is_cuda else asked.steps
    longest = longest_of(asked, max(asked.auto_sizes), strange, MOST_AUTO)
    yield f"\n## AUTO against plain decoding, K up to {MOST_AUTO}\n"
    yield "| batch | acceptance | plain, tok/s | AUTO, tok/s | AUTO / plain | tokens each |"
    yield "|---|---|---|---|---|---|"
    for acceptance in (asked.acceptance, 0.3):
        engine = engine_of(pair, card, acceptance, max(asked.auto_sizes), longest, MOST_AUTO)
        for size in asked.auto_sizes:
            plain, auto = (_settled(asked, engine, card, size, k, warm) for k, warm in ((0, _WARM), (None, strange)))
            rates = [size * got.tokens / got.seconds for got in (plain, auto)]
            told = f"{rates[0]:.0f} | {rates[1]:.0f} | {rates[1] / rates[0]:.2f} | {auto.tokens:.2f}"
            yield f"| {size} | {acceptance} | {told} |"
        del engine
        gc.collect()


def _settled(asked: argparse.Namespace, engine: Engine, card: Card, size: int, k: int | None, warm_up: int) -> Measured:
    """So many sequences on their way, and then none."""
    fill(engine, size, asked.context, k)
    got = measure(engine, card, size, asked.steps, warm_up)
    empty(engine)
    return got


def peers_table(asked: argparse.Namespace, card: Card, ours: dict[int, float]) -> Iterator[str]:
    """transformers' own loops over the same shapes; ours are those of the table of rounds."""
    pair, tokens = Pair.of(tuple(asked.shapes), card, "sdpa"), tuple(asked.peer_tokens)
    yield "\n## Beside transformers, decoding alone\n"
    yield "| batch | transformers | tok/s | Pilotfish, tok/s | times |"
    yield "|---|---|---|---|---|"
    for size in asked.sizes:
        if size == 1:
            k = 4
            how, theirs = f"assisted, K {k}", assisted(pair, card, asked.acceptance, asked.context, k, tokens)
        else:
            how, theirs = "continuous batching", continuous(pair, card, size, asked.context, PAGE, tokens)
        yield f"| {size} | {how} | {theirs:.0f} | {ours[size]:.0f} | {ours[size] / theirs:.1f} |"


if __name__ == "__main__":
    main()
