"""Small operations on rows, each fused into one kernel: rotary positions with the K/V write, norms, gates."""

from __future__ import annotations

from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

Activation = Literal["silu", "gelu_tanh"]
_BLOCK = 1024  # numbers of a gate that one program takes


def rotate_and_write(
    projected: Tensor,  # [T, (heads + 2 * kv_heads) * head_dim]: q, k, v side by side; rows may be strided
    cos: Tensor,  # [T, rotary_dim]; the head's numbers behind rotary_dim stay as they are
    sin: Tensor,
    kv_rows: Tensor,  # [T] int64, the arena row of each; of padding, a spare one
    k: Tensor,  # [rows, kv_heads, head_dim], the arena of one layer, written in place
    v: Tensor,
    norms: tuple[Tensor, Tensor] | None = None,  # scales of q and k, float32 [head_dim], of families that norm heads
    eps: float = 0.0,
) -> Tensor:  # [T, heads, head_dim]
    """Rotate q and k, store k and v at `kv_rows`, give back q. Computed in float32, rounded once."""
    num_rows, width = projected.shape
    _, kv_heads, dim = k.shape
    heads = width // dim - 2 * kv_heads
    query = torch.empty((num_rows, heads, dim), dtype=projected.dtype, device=projected.device)
    q_scale, k_scale = norms or (cos, cos)
    if num_rows:
        _rotate_kernel[(num_rows, heads + 2 * kv_heads)](
            projected, cos, sin, kv_rows, k, v, query, q_scale, k_scale, eps,
            projected.stride(0), cos.stride(0), sin.stride(0),
            HEADS=heads, KV_HEADS=kv_heads, DIM=dim, ROTARY=cos.shape[1], DIM_PADDED=triton.next_power_of_2(dim),
            NORMED=norms is not None, num_warps=1,
        )  # fmt: skip
    return query


@triton.jit
def _rotate_kernel(
    x_ptr, cos_ptr, sin_ptr, rows_ptr, k_ptr, v_ptr, q_ptr, q_scale_ptr, k_scale_ptr, eps, x_stride, cos_stride,
    sin_stride, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, ROTARY: tl.constexpr,
    DIM_PADDED: tl.constexpr, NORMED: tl.constexpr,
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
        row = tl.load(rows_ptr + t)
        if head < HEADS + KV_HEADS:
            tl.store(k_ptr + (row * KV_HEADS + head - HEADS) * DIM + d, x.to(k_ptr.dtype.element_ty), mask=inside)
        else:
            v_ptr += (row * KV_HEADS + head - HEADS - KV_HEADS) * DIM
            tl.store(v_ptr + d, x.to(v_ptr.dtype.element_ty), mask=inside)


def add_norm(x: Tensor, residual: Tensor | None, scale: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`sum = x + residual` and RMSNorm(sum): `[..., size]` each, of the type of `x`, the sum rounded before the norm.

    `scale` float32 `[size]`, what the normed row is multiplied by. Without `residual` the sum is `x` itself.
    """
    size = x.shape[-1]
    rows = x.reshape(-1, size)
    normed = torch.empty_like(rows)
    if residual is None:
        total, other = rows, rows
    else:
        total, other = torch.empty_like(rows), residual.reshape(-1, size)
    if len(rows):
        block = triton.next_power_of_2(size)
        _norm_kernel[(len(rows),)](
            rows, other, total, normed, scale, eps, rows.stride(0), other.stride(0),
            SIZE=size, BLOCK=block, ADDS=residual is not None, num_warps=min(16, max(1, block // 512)),
        )  # fmt: skip
    return normed.view(x.shape), total.view(x.shape)


@triton.jit
def _norm_kernel(
    x_ptr, other_ptr, total_ptr, normed_ptr, scale_ptr, eps, x_stride, other_stride,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, ADDS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK)
    inside = d < SIZE
    x = tl.load(x_ptr + row * x_stride + d, mask=inside, other=0.0)
    if ADDS:
        x = (x.to(tl.float32) + tl.load(other_ptr + row * other_stride + d, mask=inside, other=0.0).to(tl.float32)).to(
            total_ptr.dtype.element_ty
        )
        tl.store(total_ptr + row * SIZE + d, x, mask=inside)
    wide = x.to(tl.float32)
    shrink = 1.0 / tl.sqrt(tl.sum(wide * wide, 0) / SIZE + eps)
    normed = wide * shrink * tl.load(scale_ptr + d, mask=inside, other=0.0)
    tl.store(normed_ptr + row * SIZE + d, normed.to(normed_ptr.dtype.element_ty), mask=inside)


def gate(both: Tensor, activation: Activation) -> Tensor:
    """activation(gate) * up of `both` `[..., 2 * size]`, gate first: `[..., size]`, in float32, rounded once."""
    size = both.shape[-1] // 2
    rows = both.reshape(-1, 2 * size)
    out = torch.empty((len(rows), size), dtype=both.dtype, device=both.device)
    if len(rows):
        grid = (len(rows), triton.cdiv(size, _BLOCK))
        _gate_kernel[grid](rows, out, rows.stride(0), SIZE=size, BLOCK=_BLOCK, GELU=activation == "gelu_tanh")
    return out.view(*both.shape[:-1], size)


@triton.jit
def _gate_kernel(x_ptr, out_ptr, x_stride, SIZE: tl.constexpr, BLOCK: tl.constexpr, GELU: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = d < SIZE
    x = tl.load(x_ptr + row * x_stride + d, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * x_stride + SIZE + d, mask=inside, other=0.0).to(tl.float32)
    # x / 2 * (1 + tanh(u)) is x * sigmoid(2 u).
    steep = 1.5957691216057308 * (x + 0.044715 * x * x * x) if GELU else x
    bent = x / (1.0 + tl.exp(-steep))
    tl.store(out_ptr + row * SIZE + d, (bent * up).to(out_ptr.dtype.element_ty), mask=inside)
