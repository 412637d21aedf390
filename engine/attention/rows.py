"""Attention one row at a time: a row's bits depend on its own sequence alone.

A verified draft and a token decoded alone are then the same operation on operands of the same shape. int8 models want
this by default: where a float model shrugs a last bit off, rounding to int8 may turn it into a step of 1/127.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from engine.attention.reference import arena_rows
from engine.kv.batch import RaggedBatch


def attend(
    query: Tensor,  # [T, heads, head_dim]
    k: Tensor,  # [rows, kv_heads, head_dim]
    v: Tensor,
    batch: RaggedBatch,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:  # [T, heads, head_dim]
    """Same contract as `reference.attend`."""
    folded: Tensor = query.unflatten(1, (k.shape[1], -1))  # [T, kv_heads, group, head_dim]
    out = torch.empty_like(folded)
    for i, kv_len in enumerate(batch.kv_lens):
        rows = range(batch.cu_seqlens[i], batch.cu_seqlens[i + 1])
        key, value = (_sequence(arena, batch, i) for arena in (k, v))
        for row, stop in zip(rows, range(kv_len - len(rows) + 1, kv_len + 1), strict=True):
            start = 0 if window is None else max(0, stop - window)
            out[row] = _one_row(folded[row], key[:, start:stop], value[:, start:stop], scale, softcap)
    return out.flatten(1, 2)


def _sequence(arena: Tensor, batch: RaggedBatch, i: int) -> Tensor:
    """K or V of sequence i, `[kv_heads, kv_len, head_dim]`."""
    if batch.is_contiguous[i]:
        start = batch.page_tables[i][0] * batch.page_size
        rows = arena[start : start + batch.kv_lens[i]]
    else:
        rows = arena.index_select(0, batch.once(("rows", i), partial(arena_rows, batch, i, arena.device)))
    return rows.transpose(0, 1)


def _one_row(query: Tensor, key: Tensor, value: Tensor, scale: float, softcap: float | None) -> Tensor:
    """[kv_heads, group, d] over [kv_heads, s, d]; SDPA has no softcap."""
    if softcap is None:
        attended: Tensor = scaled_dot_product_attention(query[None], key[None], value[None], scale=scale)[0]
        return attended
    scores = torch.tanh(query.float() @ key.float().transpose(1, 2) * (scale / softcap)) * softcap
    return (scores.softmax(-1) @ value.float()).to(query.dtype)
