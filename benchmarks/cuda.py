"""What a GPU makes of Pilotfish's kernels and rounds, against what its memory and its matmuls allow.

    python -m benchmarks.cuda --out docs/benchmarks/cuda.md

Random bf16 weights in the shapes of Llama 3.1 8B and Llama 3.2 1B; nothing is downloaded. Random models never agree, so
which drafts are kept is drawn on the device at the acceptance asked for, while everything is computed as if it counted:
real cost, synthetic acceptance. Limits are of this card, measured in the same run: bytes that a pass must read over the
rate of a copy, or its operations over the rate of a large matmul, whichever takes longer.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from benchmarks.cuda_kernels import Card, attention_table, measured_card, sampling_table, wait
from engine import draws, noise
from engine.attention import paged
from engine.attention.registry import ATTENTION_NAME
from engine.fuse_cuda import fuse_for_cuda
from engine.kernels import reference
from engine.kernels.args import Committed, Tracks
from engine.kv import KVArena
from engine.noise import Stream
from engine.resident import Place
from engine.round_loop import RoundLoop, Run, captured
from engine.rounds import Fed, Ops, Round
from engine.runner import kv_layout, prepare
from engine.types import SamplingParams

PAGE = 32  # tokens
_ROPE = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
         "original_max_position_embeddings": 8192}  # fmt: skip
_SHARED = {"vocab_size": 128256, "max_position_embeddings": 131072, "rope_parameters": _ROPE, "num_attention_heads": 32,
           "num_key_value_heads": 8, "eos_token_id": None}  # fmt: skip
SHAPES: dict[str, Any] = {
    "8b": {**_SHARED, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "head_dim": 128},
    "1b": {**_SHARED, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "head_dim": 64,
           "tie_word_embeddings": True},
    "tiny": {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
             "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 4096, "eos_token_id": None},
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Pair:
    """Two models with random weights, and how fast they could be."""

    target: PreTrainedModel
    draft: PreTrainedModel

    @classmethod
    def of(cls, shapes: tuple[str, str], card: Card) -> Pair:
        """Made on the device, fused for it."""
        return cls(*(random_model(LlamaConfig(**SHAPES[shape]), card) for shape in shapes))


def random_model(config: LlamaConfig, card: Card) -> PreTrainedModel:
    """Random bf16 weights, drawn where they stay."""
    prepare(config)
    with card.device:
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            config, attn_implementation=ATTENTION_NAME, dtype=torch.bfloat16
        )
    if card.is_cuda:
        fuse_for_cuda(model)
    model.eval()
    return model


def pass_seconds(model: PreTrainedModel, card: Card, sequences: int, rows: int, context: int) -> float:
    """The least that a pass can take: its weights and K/V read once, or its operations."""
    config = model.config
    numbers = sum(parameter.numel() for parameter in model.parameters())
    if not config.tie_word_embeddings:
        numbers -= config.vocab_size * config.hidden_size  # rows are picked from it, it is not read
    cached = sequences * context * kv_layout(config, torch.bfloat16).bytes_per_token
    return max((2 * numbers + cached) / card.bytes_per_second, 2 * numbers * sequences * rows / card.flops)


def kept_at(acceptance: float, commit: Callable[..., Committed]) -> Callable[..., Committed]:
    """A commit that keeps each draft with this probability, whatever it was: by a number of its slot and position."""

    def synthetic(drawn: Tensor, drafts: Tensor, num_sound: Tensor, slots: Tensor, tracks: Tracks) -> Committed:
        place = tracks.length[slots][:, None] + torch.arange(drafts.shape[1], device=drafts.device)
        chance = noise.uniform(slots[:, None].expand_as(place), place, Stream.ACCEPT)
        return commit(drawn, torch.where(chance < acceptance, drawn[:, :-1], -1), num_sound, slots, tracks)

    return synthetic


def ops_of(card: Card, acceptance: float) -> Ops:
    """Kernels; on a CPU, where this only shows that it runs, what they mean."""
    if not card.is_cuda:
        return Ops(paged.attend_plainly, draws.choose, kept_at(acceptance, reference.commit))
    from engine.kernels import commit, sampling

    return Ops(paged.attend, sampling.choose, kept_at(acceptance, commit.commit))


def loop_of(pair: Pair, card: Card, acceptance: float, size: int, longest: int, k: int) -> RoundLoop:
    """A loop with `size` places, its rounds as graphs where there is a GPU."""
    pages = size * -(-(longest + k + 1) // PAGE) + 1

    def fed(model: PreTrainedModel) -> Fed:
        return Fed(model, KVArena(kv_layout(model.config, model.dtype), pages, PAGE, card.device), longest)

    return RoundLoop(
        fed(pair.target), fed(pair.draft), ops_of(card, acceptance), num_slots=size, longest=longest, most_drafts=k,
        vocab=pair.target.config.vocab_size, chunk=2048, make_run=captured if card.is_cuda else as_it_is,
    )  # fmt: skip


def as_it_is(run: Round, _size: int) -> Run:
    """A round without a graph."""
    return run


@dataclass(frozen=True, slots=True)
class Measured:
    """One setting of batch and K."""

    seconds: float  # per round
    tokens: float  # per round and sequence
    host_seconds: float  # of Python per round, nothing waited for


def measure(loop: RoundLoop, card: Card, size: int, context: int, k: int, rounds: int) -> Measured:
    """Fill the loop with prompts of `context` tokens, then time rounds on their way."""
    vocab: int = loop.state.vocab
    for i in range(size):
        prompt = torch.randint(vocab, (context,)).tolist()
        limit = loop.state.tracks.tokens.shape[1]
        assert loop.add(str(i), Place(prompt, limit, (), SamplingParams(temperature=1.0), i, k)), "too few pages"
    for _ in range(3):
        loop.step(k)
    wait(card.device)
    start = perf_counter()
    news = [item for _ in range(rounds) for item in loop.step(k)]
    wait(card.device)
    seconds = (perf_counter() - start) / rounds
    return Measured(seconds, sum(len(n.tokens) for n in news) / len(news), host_seconds(loop, card, k))


def host_seconds(loop: RoundLoop, card: Card, k: int) -> float:
    """What a step costs Python when there is nothing to wait for."""
    found = []
    for _ in range(10):
        wait(card.device)
        start = perf_counter()
        loop.step(k)
        found.append(perf_counter() - start)
    return statistics.median(found)


def expected_tokens(acceptance: float, k: int) -> float:
    """Tokens of a round in which each draft is kept with this probability, until one is not."""
    return sum(acceptance**i for i in range(k + 1))


def round_limit(pair: Pair, card: Card, size: int, context: int, k: int) -> float:
    """The least that a round can take: a draft pass of two rows, K - 1 of one, a verification."""
    drafting = sum(pass_seconds(pair.draft, card, size, 2 if i == 0 else 1, context) for i in range(k))
    return drafting + pass_seconds(pair.target, card, size, k + 1, context)


def rounds_table(
    pair: Pair, card: Card, acceptance: float, context: int, rounds: int, sizes: list[int]
) -> Iterator[str]:
    """Plain decoding against its limit, then the K that the limits prefer against the speed-up that they allow."""
    yield f"\n## Rounds, context {context}, acceptance {acceptance} (synthetic), temperature 1\n"
    yield "| batch | K | ms per round | tokens per round | tok/s | of the limit | speed-up | of its limit | host ms |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for size in sizes:
        plain_limit = round_limit(pair, card, size, context, 0)
        speed_up = {k: expected_tokens(acceptance, k) * plain_limit / round_limit(pair, card, size, context, k)
                    for k in range(1, 8)}  # fmt: skip
        best = max(speed_up, key=lambda k: speed_up[k])
        longest = context + (rounds + 13) * (best + 1) + 8
        plain = 0.0
        for k in (0, best):
            loop = loop_of(pair, card, acceptance, size, longest, max(k, 1))
            got = measure(loop, card, size, context, k, rounds)
            rate = size * got.tokens / got.seconds
            plain = plain or rate
            limit = size * expected_tokens(acceptance, k) / round_limit(pair, card, size, context, k)
            gain = f"{rate / plain:.2f} | {rate / plain / speed_up[k]:.0%}" if k else "1 | "
            times = f"{got.seconds * 1e3:.2f} | {got.tokens:.2f} | {rate:.0f} | {rate / limit:.0%}"
            yield f"| {size} | {k} | {times} | {gain} | {got.host_seconds * 1e3:.2f} |"
            del loop


def main() -> None:
    """Print as it goes; write it all at the end."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--shapes", nargs=2, default=["8b", "1b"], choices=list(SHAPES), metavar=("TARGET", "DRAFT"))
    parser.add_argument("--sizes", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--acceptance", type=float, default=0.8)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--attention-context", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=40)
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
    git = subprocess.run(("git", "rev-parse", "--short", "HEAD"), capture_output=True, text=True, check=False)  # noqa: S607
    what = f"`python -m benchmarks.cuda {' '.join(sys.argv[1:])}`, commit {git.stdout.strip() or 'unknown'}"
    rates = f"Copies {card.bytes_per_second / 1e12:.2f} TB/s, bf16 {card.flops / 1e12:.0f} TFLOP/s"
    yield "# On a GPU\n"
    yield f"{what}, {card.name}, torch {torch.__version__}. {rates}."
    if card.is_cuda:
        yield from attention_table(card, asked.attention_context)
        yield from sampling_table(card, SHAPES[asked.shapes[0]]["vocab_size"])
    pair = Pair.of(tuple(asked.shapes), card)
    yield from rounds_table(pair, card, asked.acceptance, asked.context, asked.rounds, asked.sizes)


if __name__ == "__main__":
    main()
