"""What single families need of kernels, against plain torch: sinks, chunks, latent heads, experts; and their times."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from benchmarks.cuda.card import Card, seconds_of_each
from benchmarks.cuda.parts.attending import Attending, Attention, attention_check, row_alone_check
from benchmarks.cuda.parts.checking import KernelCheck, largest_difference, relative_to_largest, run_checks, types_on
from benchmarks.cuda.report import PartReport
from benchmarks.cuda.setting import Setting
from pilotfish.engine.kernels import reference
from pilotfish.engine.model.linear.experts import FusedExperts
from pilotfish.engine.native.experts import ExpertGate

_MIXED = {torch.bfloat16: 2e-2, torch.float16: 3e-3, torch.float32: 1e-4}  # relative to the largest number
_TIMED = 1, 8, 64, 512  # rows


_ATTENTIONS = {
    "gpt-oss: sinks and a window": Attention(64, 8, 64, 64, window=128, has_sinks=True),
    "gpt-oss: sinks": Attention(64, 8, 64, 64, has_sinks=True),
    "Llama 4: chunks": Attention(40, 8, 128, 128, chunk=512),
    "DeepSeek: expanded": Attention(16, 16, 192, 128),
    "DeepSeek: latents": Attention(16, 1, 576, 512, is_latent=True),
    "DeepSeek V3: latents": Attention(128, 1, 576, 512, is_latent=True),
    "Gemma 4: large heads": Attention(8, 1, 512, 512),
}
_IN_FLOAT32 = "gpt-oss: sinks", "DeepSeek: latents", "Gemma 4: large heads"  # too: each takes seconds to compile
_BATCH = [5, 1, 70], [900, 3000, 300]


@dataclass(frozen=True, slots=True)
class Mixture:
    """The experts of one family."""

    experts: int
    each: int
    hidden: int
    inner: int
    gate: ExpertGate = ExpertGate()  # noqa: RUF009 - frozen
    is_turned: bool = False  # stacks are transposed, and have biases


_MIXTURES = {
    "Qwen3-30B-A3B": Mixture(128, 8, 2048, 768),
    "gpt-oss-20b": Mixture(32, 4, 2880, 2880, ExpertGate(1.702, limit=7.0, plus=1.0, interleaved=True), is_turned=True),
    "Mixtral": Mixture(8, 2, 4096, 14336),
}
_TINY = {"tiny": Mixture(3, 2, 64, 32)}


def compare(setting: Setting, section: PartReport) -> None:
    """Check all of it, then measure the experts of each family against the weights that they read."""
    card = Card.measured(setting.device)
    mixtures = _MIXTURES if card.is_cuda else _TINY
    try:
        run_checks([*_attention_checks(card), *_mixture_checks(card, mixtures)], section)
    finally:
        _time(card, mixtures, section)


def _attention_checks(card: Card) -> Iterable[KernelCheck]:
    batch = _BATCH if card.is_cuda else ([2], [9])
    for dtype in types_on(card)[:2]:
        for name, shape in _ATTENTIONS.items():
            is_checked = name in _IN_FLOAT32 if dtype == torch.float32 else card.is_cuda
            if is_checked:
                yield attention_check("attention", name, Attending(card, shape, batch, dtype))
                if card.is_cuda:
                    yield row_alone_check(name, Attending(card, shape, batch, dtype))


def _mixture_checks(card: Card, mixtures: dict[str, Mixture]) -> Iterable[KernelCheck]:
    for dtype in types_on(card)[:2]:
        for name, shape in list(mixtures.items())[: None if dtype == card.dtype else 1]:
            kind = str(dtype).removeprefix("torch.")
            for rows in (1, 16, 16 * shape.experts // shape.each) if card.is_cuda else (3,):
                differs = partial(_mixed, card, shape, rows, dtype)
                yield KernelCheck(f"experts, {rows} rows", kind, name, _MIXED[dtype], differs)
            if card.is_cuda:
                yield KernelCheck("experts, a row alone", kind, name, 0.0, partial(_row_alone, card, shape, dtype))


def _experts_of(card: Card, shape: Mixture, dtype: torch.dtype) -> FusedExperts:
    from pilotfish.engine.kernels import experts  # imported here because it imports Triton

    drawn, turned = partial(torch.randn, device=card.device, dtype=dtype), shape.is_turned
    sizes = (2 * shape.inner, shape.hidden), (shape.hidden, shape.inner)
    up, down = (drawn(shape.experts, *(size[::-1] if turned else size)) * size[1] ** -0.5 for size in sizes)
    biases = (drawn(shape.experts, sizes[0][0]), drawn(shape.experts, sizes[1][0])) if turned else None
    return FusedExperts(up, down, biases, shape.gate, experts.mix, transposed=turned)


def _batch(card: Card, shape: Mixture, rows: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return random rows, and for each as many experts as it gets, with their weights."""
    scores = torch.rand(rows, shape.experts, device=card.device)
    weights, chosen = scores.topk(shape.each)
    return torch.randn(rows, shape.hidden, device=card.device, dtype=dtype), chosen, weights.to(dtype)


def _mixed(card: Card, shape: Mixture, rows: int, dtype: torch.dtype) -> float:
    """Compare with plain torch, some rows at a time: there every expert multiplies every row."""
    made, batch = _experts_of(card, shape, dtype), _batch(card, shape, rows, dtype)
    with torch.inference_mode():
        parts = zip(*(tensor.split(64) for tensor in batch), strict=True)
        want = torch.cat([reference.mix(x, chosen, weights, made.fused) for x, chosen, weights in parts])
        return relative_to_largest(made(*batch), want)


def _row_alone(card: Card, shape: Mixture, dtype: torch.dtype) -> float:
    made, (x, chosen, weights) = _experts_of(card, shape, dtype), _batch(card, shape, 16, dtype)
    with torch.inference_mode():
        together = made(x, chosen, weights)
        alone = torch.cat([made(x[i : i + 1], chosen[i : i + 1], weights[i : i + 1]) for i in range(len(x))])
    return largest_difference(alone, together)


def _time(card: Card, mixtures: dict[str, Mixture], section: PartReport) -> None:
    """Write the time of each family's experts, and how much of a copy's rate the weights that are read make."""
    section.table("experts", "rows", "experts met", "µs", "TB/s of weights", "of a copy", "TFLOP/s")
    for name, shape in mixtures.items():
        made = _experts_of(card, shape, card.dtype)
        for rows in _TIMED if card.is_cuda else _TIMED[:1]:
            batch = _batch(card, shape, rows, card.dtype)
            met = len(batch[1].unique())
            with torch.inference_mode():
                seconds = seconds_of_each([partial(made, *batch)], card.device)
            numbers = 3 * shape.hidden * shape.inner
            rate = met * numbers * card.dtype.itemsize / seconds
            flops = 2 * rows * shape.each * numbers / seconds
            share = rate / card.bytes_per_second
            cells = f"{seconds * 1e6:.1f}", f"{rate / 1e12:.2f}", f"{share:.0%}", f"{flops / 1e12:.1f}"
            section.row(name, rows, met, *cells)
            section.number(f"{name} {rows}", microseconds=seconds * 1e6, share_of_copy=share)
