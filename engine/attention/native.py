"""Attention by our own C kernel, on CPUs: all sequences in one call, K/V read where it lies (`native/attention.c`)."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from engine.attention import sdpa
from engine.batch import RaggedBatch
from engine.native import library

_BITS = {torch.float32: 32, torch.bfloat16: 16}
_LANES = 16  # what a head's size must be a multiple of


class _Args(ctypes.Structure):
    """`Args` of the kernel."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("query", "key", "value", "out", "first_rows", "kv_lens", "tables")),
        *(
            (name, ctypes.c_int64)
            for name in ("query_stride", "sequences", "width", "page_size", "heads", "kv_heads", "dim", "window")
        ),
        *((name, ctypes.c_float) for name in ("scale", "softcap")),
    )


def attend(
    query: Tensor,  # [T, heads, head_dim]
    k: Tensor,  # [rows, kv_heads, head_dim]
    v: Tensor,
    batch: RaggedBatch,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    *,
    otherwise: Callable[..., Tensor] = sdpa.attend,
) -> Tensor:  # [T, heads, head_dim]
    """Same contract as `reference.attend`. Sizes, types and machines that the kernel is not for take `otherwise`."""
    native = library()
    bits = _BITS.get(query.dtype)
    if native is None or bits is None or k.dtype != query.dtype or query.shape[2] % _LANES or not query.is_cpu:
        return otherwise(query, k, v, batch, scale, window, softcap)
    if query.stride()[1:] != (query.shape[2], 1):
        query = query.contiguous()
    out = torch.empty(query.shape, dtype=query.dtype)
    args = _args(query, k, v, out, batch)
    args.window, args.scale, args.softcap = window or 0, scale, softcap or 0.0
    if native.pilotfish_attend(ctypes.byref(args), bits, torch.get_num_threads()):
        raise MemoryError("attention had no memory to work in")
    return out


def _args(query: Tensor, k: Tensor, v: Tensor, out: Tensor, batch: RaggedBatch) -> _Args:
    n = len(batch.kv_lens)
    where = batch.once("native", partial(_where, batch))
    start = where.data_ptr()
    return _Args(
        query=query.data_ptr(),
        key=k.data_ptr(),
        value=v.data_ptr(),
        out=out.data_ptr(),
        first_rows=start,
        kv_lens=start + 4 * (n + 1),
        tables=start + 4 * (2 * n + 1),
        query_stride=query.stride(0),
        sequences=n,
        width=(len(where) - (2 * n + 1)) // n,
        page_size=batch.page_size,
        heads=query.shape[1],
        kv_heads=k.shape[1],
        dim=k.shape[2],
    )


def _where(batch: RaggedBatch) -> Tensor:
    """First rows, lengths and page tables of a batch, one after the other: int32."""
    width = max(map(len, batch.page_tables))
    flat = [*batch.cu_seqlens, *batch.kv_lens]
    for table in batch.page_tables:
        flat += [*table, *[0] * (width - len(table))]
    return torch.tensor(flat, dtype=torch.int32)
