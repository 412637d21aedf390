"""Timings of kernels alone: attention against a copy, sampling against a sort."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from benchmarks.cuda.arenas import Arenas
from benchmarks.cuda.card import Card, seconds_of_each
from benchmarks.cuda.report import PartReport
from benchmarks.cuda.setting import Setting
from benchmarks.cuda.shapes import SHAPES, Heads
from engine.kernels.args import SamplerRows

DECODED, VERIFIED = 1, 5  # rows of each sequence: a plain step, and a verification of four drafts


def attention(setting: Setting, section: PartReport) -> None:
    """Measure decoding and verification over long contexts: bytes of K/V read per second."""
    card, heads, context = Card.measured(setting.device), Heads.of(setting.target), setting.long_context
    section.say(
        f"Context {context}, {heads.heads} heads over {heads.kv_heads}, head size {heads.dim}, bf16. Each call reads "
        f"the next of several arenas, together well above the cache's {card.cache_bytes / 2**20:.0f} MiB."
    )
    section.table("sequences", "rows each", "arenas", "µs", "TB/s", "of a copy")
    for size in setting.sizes:
        for rows in (DECODED, VERIFIED):
            arenas = Arenas.of(card, heads, [rows] * size, [context - rows] * size, card.dtype)
            calls = arenas.calls()
            seconds = seconds_of_each(calls, card.device)
            rate = arenas.bytes_each / seconds
            share = rate / card.bytes_per_second
            section.row(size, rows, len(calls), f"{seconds * 1e6:.1f}", f"{rate / 1e12:.2f}", f"{share:.0%}")
            section.number(f"{size}x{rows}", microseconds=seconds * 1e6, share_of_copy=share)


def draws(setting: Setting, section: PartReport) -> None:
    """Measure sampling with several settings, beside torch's time to sort the same rows."""
    from engine.kernels import sampling

    card, vocab = Card.measured(setting.device), SHAPES[setting.target]["vocab_size"]
    section.say(f"{vocab} tokens, bf16 logits.")
    section.table("rows", "temperature, µs", "top-p 0.9, µs", "top-k 50 and top-p 0.9, µs", "torch.sort, µs")
    for rows in setting.drawn:
        logits = torch.randn(rows, vocab, device=card.device).to(card.dtype).mul_(3)
        truncated = ((vocab, 1.0), (vocab, 0.9), (50, 0.9))
        samplers = [law_of(rows, vocab, top_k, top_p, card.device) for top_k, top_p in truncated]
        calls: list[Callable[[], object]] = [
            partial(sampling.choose, logits, law, truncated=i > 0) for i, law in enumerate(samplers)
        ]
        calls.append(partial(torch.sort, logits, dim=-1, descending=True, stable=True))
        micros = [seconds_of_each([call], card.device) * 1e6 for call in calls]
        section.row(rows, *(f"{micro:.1f}" for micro in micros))
        section.number(str(rows), temperature=micros[0], top_p=micros[1], both=micros[2], sort=micros[3])


def law_of(rows: int, vocab: int, top_k: int, top_p: float, device: torch.device) -> SamplerRows:
    """Return sampler rows with the same settings, each with its own seed."""
    whole = torch.arange(rows, device=device)
    real = torch.ones(rows, dtype=torch.float64, device=device)
    return SamplerRows(
        real.float(), whole * 0 + min(top_k, vocab), real * top_p, real * 0, whole, whole * 0 + 9, whole * 0
    )
