"""Each kernel on the device against its reference in plain torch: the largest difference for every type and shape."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields, replace
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn

from benchmarks.cuda.card import Card
from benchmarks.cuda.parts.attending import Attending, Attention, attention_check, row_alone_check
from benchmarks.cuda.parts.checking import KernelCheck, largest_difference, relative_to_largest, run_checks, types_on
from benchmarks.cuda.parts.kernels import law_of
from benchmarks.cuda.report import PartReport
from benchmarks.cuda.setting import Setting
from benchmarks.cuda.shapes import SHAPES, Heads
from pilotfish.engine.kernels import reference
from pilotfish.engine.kernels.args import Committed, Fp8Rows, SamplerRows, Tracks
from pilotfish.engine.model.linear.cuda import Fp8Linear, W4Linear
from pilotfish.engine.sampling.distribution import choose

ROWS = {torch.bfloat16: 4e-2, torch.float16: 4e-3, torch.float32: 2e-5}  # tolerances for rounding
_FP8 = 2e-2  # relative to the largest number, because the result is rounded to bfloat16
_W4 = 1e-2  # relative to the largest number
_NUM_ROWS = 7
Bend = Literal["silu", "gelu_tanh"]
_BENDS: tuple[Bend, ...] = ("silu", "gelu_tanh")


def attention(setting: Setting, section: PartReport) -> None:
    """Check decoding, verification and prompts, and whether a row's bits are independent of the batch."""
    run_checks(_attention_checks(setting, Card.measured(setting.device)), section)


def others(setting: Setting, section: PartReport) -> None:
    """Check all kernels except attention."""
    card = Card.measured(setting.device)
    checks = [*_row_checks(setting, card), *_token_checks(setting, card), *_w4_checks(setting, card)]
    if card.is_cuda:
        checks += _fp8_checks(setting, card)
    else:
        section.needs_a_card("fp8 in rows of a scale each, which torch before 2.13 cannot do on a CPU")
    run_checks(checks, section)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _attention_checks(setting: Setting, card: Card) -> Iterable[KernelCheck]:
    """Yield checks of attention. A batch has (rows, position of the first row) of each sequence."""
    batches = {
        "decoding": ([1, 1, 1], [3000, 17, 700]), "verification": ([5, 5], [3000, 40]),
        "prompts": ([300, 130], [0, 500]), "all at once": ([5, 1, 70], [900, 9000, 300]),
    }  # fmt: skip
    if not card.is_cuda:
        batches = {"decoding": ([1], [40]), "prompts": ([9, 3], [0, 20])}
    for dtype in types_on(card):
        for shape in dict.fromkeys((setting.target, setting.draft)):
            heads = Heads.of(shape)
            layer = Attention(heads.heads, heads.kv_heads, heads.dim, heads.dim)
            for name, batch in batches.items():
                yield attention_check(f"attention, {name}", shape, Attending(card, layer, batch, dtype))
            if card.is_cuda:  # the CPU's matmul in the interpreter sums in an order that depends on a row's place
                yield row_alone_check(shape, Attending(card, layer, batches["all at once"], dtype))


def _row_checks(setting: Setting, card: Card) -> Iterable[KernelCheck]:
    for dtype in types_on(card):
        for shape in dict.fromkeys((setting.target, setting.draft)):
            for normed in (False, True):
                name = "rotate and write, heads normed" if normed else "rotate and write"
                differs = partial(_rotated, card, Heads.of(shape), dtype, is_normed=normed)
                yield KernelCheck(name, _name(dtype), shape, ROWS[dtype], differs)
            for adds in (False, True):
                differs = partial(_normed, card, SHAPES[shape]["hidden_size"], dtype, adds=adds)
                yield KernelCheck("norm of a sum" if adds else "norm", _name(dtype), shape, ROWS[dtype], differs)
            for bend in _BENDS:
                differs = partial(_gated, card, SHAPES[shape]["intermediate_size"], dtype, bend)
                yield KernelCheck(f"gate, {bend}", _name(dtype), shape, ROWS[dtype], differs)


def _rotated(card: Card, heads: Heads, dtype: torch.dtype, *, is_normed: bool) -> float:
    from pilotfish.engine.kernels import rows

    drawn = partial(torch.randn, device=card.device)
    projected = drawn(_NUM_ROWS, (heads.heads + 2 * heads.kv_heads) * heads.dim, dtype=dtype)
    angles = drawn(_NUM_ROWS, heads.dim // 2).repeat(1, 2)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    where = torch.randperm(16, device=card.device)[:_NUM_ROWS]
    arenas = drawn(2, 16, heads.kv_heads, heads.dim, dtype=dtype)
    norms = (drawn(heads.dim), drawn(heads.dim)) if is_normed else None
    (k, v), (want_k, want_v) = arenas.clone(), arenas.clone()
    got = rows.rotate_and_write(projected, cos, sin, where, k, v, norms, 1e-5)
    want = reference.rotate_and_write(projected, cos, sin, where, want_k, want_v, norms, 1e-5)
    return max(_relative(got, want), _relative(k, want_k), largest_difference(v, want_v))


def _normed(card: Card, size: int, dtype: torch.dtype, *, adds: bool) -> float:
    from pilotfish.engine.kernels import rows

    x, residual = torch.randn(2, _NUM_ROWS, size, device=card.device, dtype=dtype)
    scale = torch.randn(size, device=card.device)
    got, total = rows.add_norm(x, residual if adds else None, scale, 1e-5)
    want, want_total = reference.add_norm(x, residual if adds else None, scale, 1e-5)
    return max(_relative(got, want), largest_difference(total, want_total))


def _gated(card: Card, size: int, dtype: torch.dtype, bend: Bend) -> float:
    from pilotfish.engine.kernels import rows

    both = 4 * torch.randn(_NUM_ROWS, 2 * size, device=card.device, dtype=dtype)
    return _relative(rows.gate(both, bend), reference.gate(both, bend))


def _relative(got: Tensor, want: Tensor) -> float:
    """Return the largest difference, relative to the value where that is above 1."""
    return largest_difference(
        got.float() / want.float().abs().clamp(min=1), want.float() / want.float().abs().clamp(min=1)
    )


def _token_checks(setting: Setting, card: Card) -> Iterable[KernelCheck]:
    """Yield checks that count the rows with another token, or the numbers with another value."""
    vocab = SHAPES[setting.target]["vocab_size"]
    for dtype in types_on(card):
        for name, top_k, top_p in (("greedy", 0, 1.0), ("whole", vocab, 1.0), ("top-k 50, top-p 0.9", 50, 0.9)):
            yield KernelCheck(
                f"draw, {name}", _name(dtype), str(vocab), 0, partial(_drawn, card, vocab, dtype, top_k, top_p)
            )
    yield KernelCheck("commit", "int64", "", 0, partial(_committed, card))


def _drawn(card: Card, vocab: int, dtype: torch.dtype, top_k: int, top_p: float) -> float:
    from pilotfish.engine.kernels import sampling

    rows = 32 if card.is_cuda else 2
    logits = 3 * torch.randn(rows, vocab, device=card.device, dtype=dtype)
    samplers = law_of(rows, vocab, top_k or vocab, top_p, card.device)
    samplers = samplers if top_k else _greedy(samplers)
    truncated = 0 < top_k < vocab
    got, want = (
        sampling.choose(logits, samplers, truncated=truncated),
        choose(logits, samplers, truncated=truncated),
    )
    return float((got.token != want.token).sum() + (got.sound != want.sound).sum())


def _greedy(samplers: SamplerRows) -> SamplerRows:
    return replace(samplers, temperature=samplers.temperature * 0)


def _committed(card: Card) -> float:
    """Compare partly accepted drafts, an end token, a full slot, NaN logits, and a sequence that does not run."""
    from pilotfish.engine.kernels import sampling

    whole = partial(torch.tensor, device=card.device)
    drawn = whole([[5, 6, 7], [5, 6, 7], [5, 9, 7], [5, 6, 7], [5, 6, 7]])
    drafts = whole([[5, 6], [5, 8], [5, 9], [5, 6], [5, 6]])
    sound, slots = whole([3, 3, 3, 1, 3]), whole([1, 2, 3, 4, 5])
    tracks = Tracks(
        tokens=whole([[0] * 12] * 6), length=whole([1, 4, 4, 4, 4, 4]), max_length=whole([1, 12, 5, 12, 12, 12]),
        ends=whole([[9, -1]] * 6), running=whole([0, 1, 1, 1, 1, 0]),
    )  # fmt: skip
    other = Tracks(*(getattr(tracks, field.name).clone() for field in fields(tracks)))
    got = sampling.commit(drawn, drafts, sound, slots, tracks)
    want = reference.commit(drawn, drafts, sound, slots, other)
    pairs = [(getattr(got, f.name), getattr(want, f.name)) for f in fields(Committed)]
    pairs += [(getattr(tracks, f.name), getattr(other, f.name)) for f in fields(Tracks)]
    return float(sum(int((mine != theirs).sum()) for mine, theirs in pairs))


def _fp8_checks(setting: Setting, card: Card) -> Iterable[KernelCheck]:
    for shape in dict.fromkeys((setting.target, setting.draft)):
        wide, inner = SHAPES[shape]["intermediate_size"], SHAPES[shape]["hidden_size"]
        for rows in (1, _NUM_ROWS):
            yield KernelCheck(
                f"fp8, {rows} rows", "e4m3", f"{inner} to {wide}", _FP8, partial(_fp8, card, rows, inner, wide)
            )
        yield KernelCheck("fp8, rows of a norm", "e4m3", str(inner), _FP8, partial(_normed_in_fp8, card, inner))
        yield KernelCheck("fp8, rows of a gate", "e4m3", str(wide), _FP8, partial(_gated_in_fp8, card, wide))


def _fp8(card: Card, rows: int, inner: int, outer: int) -> float:
    """Compare with the product of the rounded numbers, relative to the largest of them."""
    linear = nn.Linear(inner, outer, bias=False, device=card.device, dtype=torch.bfloat16)
    x = torch.randn(rows, inner, device=card.device, dtype=torch.bfloat16)
    want = _unrounded(reference.round_rows(x)) @ _unrounded(reference.round_rows(linear.weight.detach())).t()
    with torch.no_grad():
        got = Fp8Linear(linear)(x)
    return relative_to_largest(got, want)


def _normed_in_fp8(card: Card, size: int) -> float:
    from pilotfish.engine.kernels import rows

    x, residual = torch.randn(2, _NUM_ROWS, size, device=card.device, dtype=torch.bfloat16)
    scale = torch.randn(size, device=card.device)
    got, total = rows.add_norm_round(x, residual, scale, 1e-5)
    want, want_total = reference.add_norm(x, residual, scale, 1e-5)
    return max(_coarsely(got, want), largest_difference(total, want_total))


def _gated_in_fp8(card: Card, size: int) -> float:
    from pilotfish.engine.kernels import rows

    both = 4 * torch.randn(_NUM_ROWS, 2 * size, device=card.device, dtype=torch.bfloat16)
    return _coarsely(rows.gate_round(both, "silu"), reference.gate(both, "silu"))


def _unrounded(rows: Fp8Rows) -> Tensor:
    return rows.rows.float() * rows.scale


def _coarsely(got: Fp8Rows, want: Tensor) -> float:
    """Return the error of rounded rows beyond fp8 rounding (three mantissa bits), over each row's largest value."""
    largest = want.float().abs().amax(1, keepdim=True)
    off = (_unrounded(got) - want.float()).abs() - want.float().abs() / 16
    return float((off / largest).max().clamp(min=0))


def _w4_checks(setting: Setting, card: Card) -> Iterable[KernelCheck]:
    """Yield a check with a number of rows for each tile size."""
    dtype = torch.bfloat16 if card.is_cuda else torch.float16
    inner, wide = (SHAPES[setting.target][name] for name in ("hidden_size", "intermediate_size"))
    inner, wide = (inner, wide) if card.is_cuda else (128, 64)
    for rows in (1, 5, 40, 100) if card.is_cuda else (3,):
        differs = partial(_w4, card, rows, inner, wide, dtype)
        yield KernelCheck(f"W4A16, {rows} rows", _name(dtype), f"{inner} to {wide}", _W4, differs)


def _w4(card: Card, rows: int, inner: int, outer: int, dtype: torch.dtype) -> float:
    """Compare with the product with the dequantised matrix."""
    from pilotfish.engine.kernels import w4

    linear = W4Linear(nn.Linear(inner, outer, bias=False, device=card.device, dtype=dtype))
    linear.multiply = w4.w4_matmul
    x = torch.randn(rows, inner, device=card.device, dtype=dtype)
    with torch.no_grad():
        return relative_to_largest(
            linear(x), reference.w4_matmul(x.float(), linear.words, linear.scale, None, linear.arrived)
        )
