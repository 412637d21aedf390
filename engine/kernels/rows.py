"""Row operations, each fused into one kernel: rotary positions with the K/V write, norms, gates, rounding."""

from __future__ import annotations

from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from pilotfish.engine.kernels.args import LARGEST, LARGEST_CODE, TINIEST, TINIEST_PEAK, Fp8Rows

Activation = Literal["silu", "gelu_tanh"]
_BLOCK = 1024  # elements of a gate per program
_LARGEST, _TINIEST = tl.constexpr(LARGEST), tl.constexpr(TINIEST)
_LARGEST_CODE, _TINIEST_PEAK = tl.constexpr(float(LARGEST_CODE)), tl.constexpr(TINIEST_PEAK)
_WHOLE = tl.constexpr(1.5 * 2.0**23)  # adding it to a float32 rounds to the nearest integer, ties to even


def rotate_and_write(
    projected: Tensor,  # [T, (heads + 2 * kv_heads) * head_dim]: q, k, v side by side; rows may be strided
    cos: Tensor,  # [T, rotary_dim]; the elements of a head beyond rotary_dim are unchanged
    sin: Tensor,
    kv_rows: Tensor,  # [T] int64, the arena row of each; a spare one for padding
    k: Tensor,  # [rows, kv_heads, scaled + head_dim], the arena of one layer, written in place
    v: Tensor,
    norms: tuple[Tensor, Tensor] | None = None,  # norm weights of q and k, float32 [head_dim]
    eps: float = 0.0,
    scaled: int = 0,
) -> Tensor:  # [T, heads, head_dim]
    """Rotate q and k, store k and v at `kv_rows`, return q. Computed in float32, rounded once.

    `scaled` as in `attention.attend`: above 0, k and v are then rounded to int8, as by `reference.round_heads`. On a
    GPU a code halfway between two may differ from it by 1, because the product is not rounded first.
    """
    num_rows, width = projected.shape
    kv_heads, dim = k.shape[1], k.shape[2] - scaled
    heads = width // dim - 2 * kv_heads
    query = torch.empty((num_rows, heads, dim), dtype=projected.dtype, device=projected.device)
    q_scale, k_scale = norms or (cos, cos)
    if num_rows:
        _rotate_kernel[(num_rows, heads + 2 * kv_heads)](
            projected, cos, sin, kv_rows, k, v, query, q_scale, k_scale, eps,
            projected.stride(0), cos.stride(0), sin.stride(0),
            HEADS=heads, KV_HEADS=kv_heads, DIM=dim, ROTARY=cos.shape[1], DIM_PADDED=triton.next_power_of_2(dim),
            NORMED=norms is not None, SCALED=scaled, num_warps=1,
        )  # fmt: skip
    return query


@triton.jit
def _rotate_kernel(
    x_ptr, cos_ptr, sin_ptr, rows_ptr, k_ptr, v_ptr, q_ptr, q_scale_ptr, k_scale_ptr, eps, x_stride, cos_stride,
    sin_stride, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, ROTARY: tl.constexpr,
    DIM_PADDED: tl.constexpr, NORMED: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """One head of one row."""
    t, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    d = tl.arange(0, DIM_PADDED)
    inside = d < DIM
    x_ptr += t * x_stride + head * DIM
    x = tl.load(x_ptr + d, mask=inside, other=0.0).to(tl.float32)
    if head < HEADS + KV_HEADS:
        half = ROTARY // 2
        partner = tl.where(d < half, d + half, d - half)  # a of (a, b) becomes a cos - b sin, b becomes b cos + a sin
        turning = d < ROTARY
        y = tl.load(x_ptr + partner, mask=turning, other=0.0).to(tl.float32)
        if NORMED:
            scale_ptr = q_scale_ptr if head < HEADS else k_scale_ptr
            shrink = 1.0 / tl.sqrt(tl.sum(x * x, 0) / DIM + eps)
            x = x * shrink * tl.load(scale_ptr + d, mask=inside, other=0.0)
            y = y * shrink * tl.load(scale_ptr + partner, mask=turning, other=0.0)
        cos = tl.load(cos_ptr + t * cos_stride + d, mask=turning, other=1.0).to(tl.float32)
        sin = tl.load(sin_ptr + t * sin_stride + d, mask=turning, other=0.0).to(tl.float32)
        x = x * cos + tl.where(d < half, -y, y) * sin
    if head < HEADS:
        tl.store(q_ptr + (t * HEADS + head) * DIM + d, x.to(q_ptr.dtype.element_ty), mask=inside)
    else:
        row = tl.load(rows_ptr + t) * KV_HEADS
        if SCALED > 0:
            x = x.to(x_ptr.dtype.element_ty).to(tl.float32)  # unchanged if keys and values are floats
        if head < HEADS + KV_HEADS:
            _store_head(k_ptr + (row + head - HEADS) * (SCALED + DIM), x, d, inside, SCALED)
        else:
            _store_head(v_ptr + (row + head - HEADS - KV_HEADS) * (SCALED + DIM), x, d, inside, SCALED)


@triton.jit
def _store_head(ptr, x, d, inside, SCALED: tl.constexpr):
    """Store a key or a value unchanged, or the bytes of its scale followed by its codes."""
    if SCALED > 0:
        peak = tl.maximum(tl.max(tl.abs(x), 0), _TINIEST_PEAK)
        fault = tl.sum(x - x, 0)  # NaN if an element is not finite, else 0
        byte = tl.arange(0, SCALED)
        scale = (peak * (1.0 / _LARGEST_CODE) + fault).to(tl.int32, bitcast=True)
        tl.store(ptr + byte, (scale >> 8 * byte).to(tl.int8))  # byte by byte, because it may be unaligned
        codes = x * (tl.math.div_rn(1.0, peak) * _LARGEST_CODE) + _WHOLE - _WHOLE
        x = tl.where(fault == 0.0, codes, 0.0)
    tl.store(ptr + SCALED + d, x.to(ptr.dtype.element_ty), mask=inside)


def add_norm(
    x: Tensor, residual: Tensor | None, scale: Tensor, eps: float, before: tuple[Tensor, float] | None = None
) -> tuple[Tensor, Tensor]:
    """`sum = x + residual` and RMSNorm(sum): `[..., size]` each, of the type of `x`, the sum rounded before the norm.

    `scale` float32 `[size]`, the factor of the normalised row. Without `residual` the sum is `x`. With `before`, the
    scale and eps of another norm, `x` is first normalised with it and rounded.
    """
    normed = torch.empty_like(x.reshape(-1, x.shape[-1]))
    return normed.view(x.shape), _norm(x, residual, scale, eps, before, normed, None)


def add_norm_round(
    x: Tensor, residual: Tensor | None, scale: Tensor, eps: float, before: tuple[Tensor, float] | None = None
) -> tuple[Fp8Rows, Tensor]:
    """As `add_norm`, with normalised rows in the form of `round_rows`."""
    rounded = _unwritten(x)
    return rounded, _norm(x, residual, scale, eps, before, rounded.rows, rounded.scale)


def _unwritten(x: Tensor, size: int | None = None) -> Fp8Rows:
    """An uninitialised tensor with the rows of `x`, each `size` wide."""
    shape = torch.Size((*x.shape[:-1], size or x.shape[-1]))
    rows = torch.empty((shape.numel() // shape[-1], shape[-1]), dtype=torch.float8_e4m3fn, device=x.device)
    return Fp8Rows(rows, torch.empty((len(rows), 1), dtype=torch.float32, device=x.device), shape, x.dtype)


def _norm(
    x: Tensor,
    residual: Tensor | None,
    scale: Tensor,
    eps: float,
    before: tuple[Tensor, float] | None,
    normed: Tensor,  # [R, size], written
    steps: Tensor | None,  # [R, 1], written if rows are rounded
) -> Tensor:
    """Returns the sum."""
    size = x.shape[-1]
    rows = x.reshape(-1, size)
    assert before is None or residual is not None, "the norm of a norm"
    total, other = (rows, rows) if residual is None else (torch.empty_like(rows), residual.reshape(-1, size))
    before_scale, before_eps = before or (scale, 0.0)
    if len(rows):
        block = triton.next_power_of_2(size)
        _norm_kernel[(len(rows),)](
            rows, other, total, normed, scale if steps is None else steps, scale, before_scale, eps, before_eps,
            rows.stride(0), other.stride(0), SIZE=size, BLOCK=block, ADDS=residual is not None,
            BEFORE=before is not None, ROUNDS=steps is not None, num_warps=_warps(block),
        )  # fmt: skip
    return total.view(x.shape)


def _warps(block: int) -> int:
    """Number of warps for at most 32 elements of a row per thread, within the limit of a block."""
    return min(32, max(1, block // 512))


@triton.jit
def _norm_kernel(
    x_ptr, other_ptr, total_ptr, normed_ptr, step_ptr, scale_ptr, before_ptr, eps, before_eps, x_stride, other_stride,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, ADDS: tl.constexpr, BEFORE: tl.constexpr, ROUNDS: tl.constexpr,
):  # fmt: skip
    """One row."""
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK)
    inside = d < SIZE
    dtype = x_ptr.dtype.element_ty
    x = tl.load(x_ptr + row * x_stride + d, mask=inside, other=0.0)
    if BEFORE:
        x = _normed(x.to(tl.float32), before_ptr, before_eps, d, inside, SIZE).to(dtype)
    if ADDS:
        x = (x.to(tl.float32) + tl.load(other_ptr + row * other_stride + d, mask=inside, other=0.0).to(tl.float32)).to(
            dtype
        )
        tl.store(total_ptr + row * SIZE + d, x, mask=inside)
    normed = _normed(x.to(tl.float32), scale_ptr, eps, d, inside, SIZE).to(dtype)
    if ROUNDS:
        normed = _rounded(normed, step_ptr + row, normed_ptr.dtype.element_ty)
    tl.store(normed_ptr + row * SIZE + d, normed, mask=inside)


@triton.jit
def _normed(x, scale_ptr, eps, d, inside, SIZE: tl.constexpr):
    shrink = 1.0 / tl.sqrt(tl.sum(x * x, 0) / SIZE + eps)
    return x * shrink * tl.load(scale_ptr + d, mask=inside, other=0.0)


@triton.jit
def _rounded(x, step_ptr, dtype: tl.constexpr):
    """A whole row in 8-bit floats; stores its scale. Divisions are exact, as in plain torch."""
    wide = x.to(tl.float32)
    step = tl.math.div_rn(tl.maximum(tl.max(tl.abs(wide), 0), _TINIEST), _LARGEST)
    tl.store(step_ptr, step)
    return tl.math.div_rn(wide, step).to(dtype)


def round_rows(x: Tensor) -> Fp8Rows:
    """Rows `[..., size]` in 8-bit floats, each with a scale that maps its largest element to the format's maximum."""
    rounded, rows = _unwritten(x), x.reshape(-1, x.shape[-1])
    if len(rows):
        size = rows.shape[1]
        block = triton.next_power_of_2(size)
        _round_kernel[(len(rows),)](
            rows, rounded.rows, rounded.scale, rows.stride(0), SIZE=size, BLOCK=block, num_warps=_warps(block)
        )
    return rounded


@triton.jit
def _round_kernel(x_ptr, out_ptr, step_ptr, x_stride, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK)
    inside = d < SIZE
    x = tl.load(x_ptr + row * x_stride + d, mask=inside, other=0.0)
    tl.store(out_ptr + row * SIZE + d, _rounded(x, step_ptr + row, out_ptr.dtype.element_ty), mask=inside)


def gate(both: Tensor, activation: Activation) -> Tensor:
    """activation(gate) * up of `both` `[..., 2 * size]`, gate first: `[..., size]`, in float32, rounded once."""
    shape = torch.Size((*both.shape[:-1], both.shape[-1] // 2))
    out = torch.empty((shape.numel() // shape[-1], shape[-1]), dtype=both.dtype, device=both.device)
    _gate(both, activation, out, None)
    return out.view(shape)


def gate_round(both: Tensor, activation: Activation) -> Fp8Rows:
    """As `gate`, with rows in the form of `round_rows`; a program processes a whole row to find its maximum."""
    rounded = _unwritten(both, both.shape[-1] // 2)
    _gate(both, activation, rounded.rows, rounded.scale)
    return rounded


def _gate(both: Tensor, activation: Activation, out: Tensor, steps: Tensor | None) -> None:
    """Write `out` `[R, size]`, and `steps` `[R, 1]` if rows are rounded."""
    size, rows = out.shape[1], both.reshape(-1, both.shape[-1])
    if len(rows):
        block = _BLOCK if steps is None else triton.next_power_of_2(size)
        _gate_kernel[(len(rows), triton.cdiv(size, block))](
            rows, out, out if steps is None else steps, rows.stride(0), SIZE=size, BLOCK=block,
            GELU=activation == "gelu_tanh", ROUNDS=steps is not None,
            num_warps=4 if steps is None else _warps(block),
        )  # fmt: skip


@triton.jit
def _gate_kernel(
    x_ptr, out_ptr, step_ptr, x_stride, SIZE: tl.constexpr, BLOCK: tl.constexpr, GELU: tl.constexpr,
    ROUNDS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = d < SIZE
    x_ptr += row * x_stride
    x = tl.load(x_ptr + d, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + SIZE + d, mask=inside, other=0.0).to(tl.float32)
    # x / 2 * (1 + tanh(u)) is x * sigmoid(2 u).
    steep = 1.5957691216057308 * (x + 0.044715 * x * x * x) if GELU else x
    gated = (x / (1.0 + tl.exp(-steep)) * up).to(x_ptr.dtype.element_ty)
    if ROUNDS:
        gated = _rounded(gated, step_ptr + row, out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * SIZE + d, gated, mask=inside)
