"""Attention by our C kernel, on CPUs: all sequences in one call, K/V read in place (`native/attention.c`)."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import partial
from itertools import chain

import torch
from torch import Tensor

from pilotfish.engine.attention import sdpa
from pilotfish.engine.attention.reference import AttentionSpec
from pilotfish.engine.kv.arena import is_rounded, width_of
from pilotfish.engine.kv.batch import RaggedBatch
from pilotfish.engine.machine.threads import pool_threads
from pilotfish.engine.native import library
from pilotfish.engine.native.compiled import BITS, AttentionArgs, function

_LANES = 16  # what a head's size must be a multiple of


def attend(
    query: Tensor,
    k: Tensor,
    v: Tensor,
    batch: RaggedBatch,
    spec: AttentionSpec,
    *,
    otherwise: Callable[..., Tensor] = sdpa.attend,
) -> Tensor:
    """Same contract as `reference.attend`. Unsupported sizes, types and machines use `otherwise`."""
    bits = BITS.get(query.dtype)
    if library() is None or bits is None or not query.is_cpu or not all(map(partial(_reads, query), (query, k, v))):
        return otherwise(query, k, v, batch, spec)
    if query.stride()[1:] != (query.shape[2], 1):
        query = query.contiguous()
    out = query.new_empty(*query.shape[:2], width_of(v))
    args = args_of(batch, query.shape[1], k.shape[1], query.shape[2])
    args.query, args.key, args.value, args.out = (x.data_ptr() for x in (query, k, v, out))
    args.query_stride, args.key_stride, args.value_stride = query.stride(0), k.stride(0), v.stride(0)
    args.value_dim, args.rounded = width_of(v), is_rounded(k)
    args.scale, args.softcap, args.window, args.chunk = (
        spec.scale,
        spec.softcap or 0.0,
        spec.window or 0,
        spec.chunk or 0,
    )
    sinks = None if spec.sinks is None else spec.sinks.float().contiguous()
    args.sinks = None if sinks is None else sinks.data_ptr()
    if function("attend")(ctypes.byref(args), bits, pool_threads()):
        raise MemoryError("attention kernel: out of memory")
    return out


def _reads(query: Tensor, x: Tensor) -> bool:
    """Whether the kernel supports heads like those of `x`."""
    beside = x.stride(1) == x.shape[2] or x.shape[1] == 1 or x is query
    return (x.dtype == query.dtype or is_rounded(x)) and not width_of(x) % _LANES and beside


def args_of(batch: RaggedBatch, heads: int, kv_heads: int, dim: int) -> AttentionArgs:
    """The kernel's arguments for a batch, without the tensors of a layer. Valid as long as `batch` is.

    Values are as wide as keys, and heads are adjacent.
    """
    where, sequences = batch.once("native", partial(_where, batch)), len(batch.kv_lens)
    start = where.data_ptr()
    return AttentionArgs(
        first_rows=start,
        kv_lens=start + 4 * (sequences + 1),
        tables=start + 4 * (2 * sequences + 1),
        query_stride=heads * dim,
        key_stride=kv_heads * dim,
        value_stride=kv_heads * dim,
        sequences=sequences,
        width=(len(where) - (2 * sequences + 1)) // sequences,
        page_size=batch.page_size,
        heads=heads,
        kv_heads=kv_heads,
        dim=dim,
        value_dim=dim,
    )


def _where(batch: RaggedBatch) -> Tensor:
    """First rows `[B + 1]`, lengths `[B]` and page tables `[B, width]` of a batch, concatenated, in int32."""
    width = max(map(len, batch.page_tables))
    tables = chain.from_iterable((*table, *(0,) * (width - len(table))) for table in batch.page_tables)
    return torch.tensor([*batch.cu_seqlens, *batch.kv_lens, *tables], dtype=torch.int32)
