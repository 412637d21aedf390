"""Attention as the formula says it, for any page size, window and softcap: the oracle of all others."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from engine.kv.batch import RaggedBatch


def attend(
    query: Tensor,  # [T, heads, head_dim]
    k: Tensor,  # [rows, kv_heads, head_dim], the arena of one layer
    v: Tensor,  # [rows, kv_heads, head_dim]
    batch: RaggedBatch,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:  # [T, heads, head_dim]
    """softmax(q k^T * scale + causal mask) v, each sequence over its own pages, in float32."""
    out = torch.empty_like(query)
    for i, kv_len in enumerate(batch.kv_lens):
        rows = slice(batch.cu_seqlens[i], batch.cu_seqlens[i + 1])
        where = batch.once(("rows", i), partial(arena_rows, batch, i, k.device))
        positions = batch.positions[rows]
        key, value = k[where].float(), v[where].float()  # [kv_len, kv_heads, head_dim]
        q = query[rows].float().unflatten(1, (k.shape[1], -1))  # [t, kv_heads, group, head_dim]
        scores = torch.einsum("tkgd,jkd->kgtj", q, key) * scale
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        seen = causal_mask(positions, range(kv_len), window)
        weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
        out[rows] = torch.einsum("kgtj,jkd->tkgd", weights, value).flatten(1, 2).to(query.dtype)
    return out


def arena_rows(batch: RaggedBatch, i: int, device: torch.device) -> Tensor:
    """Arena rows of sequence i's positions 0 .. kv_len - 1, int64 `[kv_len]`."""
    pages = torch.tensor(batch.page_tables[i], dtype=torch.int64, device=device)
    position = torch.arange(batch.kv_lens[i], device=device)
    return pages[position // batch.page_size] * batch.page_size + position % batch.page_size


def causal_mask(positions: Tensor, keys: range, window: int | None) -> Tensor:
    """True where the token at `positions[t]` may see key position `keys[j]`: bool `[t, len(keys)]`.

    A window of w sees the w newest positions, its own included.
    """
    key = torch.arange(keys.start, keys.stop, device=positions.device)
    seen = key <= positions[:, None]
    if window is not None:
        seen &= key > positions[:, None] - window
    return seen
