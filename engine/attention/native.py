"""Attention by our own C kernel, on CPUs: all sequences in one call, K/V read where it lies (`native/attention.c`)."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch
from torch import Tensor

from engine.attention import sdpa
from engine.kv.batch import RaggedBatch
from engine.machine.threads import pool_threads
from engine.native import library
from engine.native.attention import BITS, AttentionArgs, attention_args, pack_batch_indices

_LANES = 16  # what a head's size must be a multiple of


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
    bits = BITS.get(query.dtype)
    if native is None or bits is None or k.dtype != query.dtype or query.shape[2] % _LANES or not query.is_cpu:
        return otherwise(query, k, v, batch, scale, window, softcap)
    if query.stride()[1:] != (query.shape[2], 1):
        query = query.contiguous()
    out = torch.empty(query.shape, dtype=query.dtype)
    args = args_of(batch, query.shape[1], k.shape[1], k.shape[2])
    args.query, args.key, args.value, args.out = (x.data_ptr() for x in (query, k, v, out))
    args.query_stride, args.window, args.scale, args.softcap = query.stride(0), window or 0, scale, softcap or 0.0
    if native.pilotfish_attend(ctypes.byref(args), bits, pool_threads()):
        raise MemoryError("attention had no memory to work in")
    return out


def args_of(batch: RaggedBatch, heads: int, kv_heads: int, dim: int) -> AttentionArgs:
    """The kernel's arguments for a batch, without the tensors of a layer. Valid as long as `batch` is."""
    where = batch.once("native", lambda: pack_batch_indices(batch.cu_seqlens, batch.kv_lens, batch.page_tables))
    return attention_args(where, batch.page_size, len(batch.kv_lens), heads, kv_heads, dim)
