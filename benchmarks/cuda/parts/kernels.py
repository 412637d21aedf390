"""Timings of kernels alone: attention against a copy, sampling against a sort, fp8 with sums of two kinds."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from benchmarks.cuda.arenas import Arenas
from benchmarks.cuda.card import Card, seconds_of_each
from benchmarks.cuda.parts.checking import relative_to_largest
from benchmarks.cuda.report import PartReport
from benchmarks.cuda.setting import Setting
from benchmarks.cuda.shapes import SHAPES, Heads
from pilotfish.engine.kernels import reference
from pilotfish.engine.kernels.args import SamplerRows

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
    from pilotfish.engine.kernels import sampling

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


def fp8(setting: Setting, section: PartReport) -> None:
    """Measure a matmul in fp8 with sums in float32, as we multiply, and with `use_fast_accum`: time and error."""
    card, shape = Card.measured(setting.device), SHAPES[setting.target]
    section.say("Error: of a product of the same rounded numbers, relative to the largest of the matrix.")
    if not card.is_cuda:
        section.needs_a_card("fp8 in rows of a scale each, which torch before 2.13 cannot do on a CPU")
        return
    section.table("rows", "sums in float32, µs", "error", "fast, µs", "error", "bf16, µs")
    plain = torch.randn(shape["intermediate_size"], shape["hidden_size"], device=card.device).to(card.dtype)
    weight = reference.round_rows(plain)
    exact = weight.rows.float() * weight.scale
    for num_rows in setting.drawn:
        x = torch.randn(num_rows, plain.shape[1], device=card.device).to(card.dtype)
        rounded = reference.round_rows(x)
        multiply = partial(
            torch._scaled_mm, rounded.rows, weight.rows.t(),  # noqa: SLF001
            scale_a=rounded.scale, scale_b=weight.scale.t().contiguous(), out_dtype=card.dtype,
        )  # fmt: skip
        calls = [partial(multiply, use_fast_accum=is_fast) for is_fast in (False, True)]
        micros = [seconds_of_each([call], card.device) * 1e6 for call in (*calls, partial(torch.mm, x, plain.t()))]
        want = (rounded.rows.float() * rounded.scale) @ exact.t()
        errors = [relative_to_largest(call(), want) for call in calls]
        section.row(
            num_rows, f"{micros[0]:.1f}", f"{errors[0]:.1e}", f"{micros[1]:.1f}", f"{errors[1]:.1e}", f"{micros[2]:.1f}"
        )
        section.number(
            str(num_rows), exact=micros[0], fast=micros[1], bf16=micros[2], error=errors[0], fast_error=errors[1]
        )


def law_of(rows: int, vocab: int, top_k: int, top_p: float, device: torch.device) -> SamplerRows:
    """Return sampler rows with the same settings, each with its own seed."""
    whole = torch.arange(rows, device=device)
    real = torch.ones(rows, dtype=torch.float64, device=device)
    return SamplerRows(
        top_k=whole * 0 + min(top_k, vocab), top_p=real * top_p, min_p=real * 0, seed=whole, position=whole * 0 + 9,
        stream=whole * 0, temperature=real.float(),
    )  # fmt: skip
