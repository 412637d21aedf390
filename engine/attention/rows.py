"""Attention one row at a time: a row's bits depend on its own sequence alone.

A verified draft and a token decoded alone are then the same operation on operands of the same shape. int8 models want
this by default: where a float model shrugs a last bit off, rounding to int8 may turn it into a step of 1/127.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from engine.attention.sdpa import positions
from engine.attention.spec import AttentionSpec
from engine.kv.batch import RaggedBatch
from engine.kv.rounded import floats_of, width_of


def attend(query: Tensor, k: Tensor, v: Tensor, batch: RaggedBatch, spec: AttentionSpec) -> Tensor:
    """Same contract as `reference.attend`."""
    folded: Tensor = query.unflatten(1, (k.shape[1], -1))  # [T, kv_heads, group, key_dim]
    out = folded.new_empty(*folded.shape[:3], width_of(v))
    sinks = None if spec.sinks is None else spec.sinks.float().view(*folded.shape[1:3], 1)
    for i, kv_len in enumerate(batch.kv_lens):
        rows = range(batch.cu_seqlens[i], batch.cu_seqlens[i + 1])
        key, value = (floats_of(positions(arena, batch, i), query.dtype).transpose(0, 1) for arena in (k, v))
        for row, position in zip(rows, range(kv_len - len(rows), kv_len), strict=True):
            seen = slice(spec.oldest(position), position + 1)
            out[row] = _one_row(folded[row], key[:, seen], value[:, seen], spec, sinks)
    return out.flatten(1, 2)


def _one_row(query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec, sinks: Tensor | None) -> Tensor:
    """[kv_heads, group, key_dim] over [kv_heads, s, dim]; SDPA has no softcap and no sinks `[kv_heads, group, 1]`."""
    if spec.softcap is None and sinks is None:
        attended: Tensor = scaled_dot_product_attention(query[None], key[None], value[None], scale=spec.scale)[0]
        return attended
    scores = query.float() @ key.float().transpose(1, 2) * spec.scale
    if spec.softcap is not None:
        scores = torch.tanh(scores / spec.softcap) * spec.softcap
    if sinks is not None:
        scores = torch.cat([scores, sinks], -1)
    return (scores.softmax(-1)[..., : key.shape[1]] @ value.float()).to(query.dtype)
