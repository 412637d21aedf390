"""Attention by torch's SDPA, one sequence at a time, on any device.

The K/V of a sequence with consecutive pages, the usual case, is a view of the arena; else it is gathered first. int8
K/V is converted to floats first.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from pilotfish.engine.attention import reference
from pilotfish.engine.attention.reference import AttentionSpec
from pilotfish.engine.kv.arena import floats_of, width_of
from pilotfish.engine.kv.batch import RaggedBatch
from pilotfish.engine.machine.threads import exactly


def attend(query: Tensor, k: Tensor, v: Tensor, batch: RaggedBatch, spec: AttentionSpec) -> Tensor:
    """Same contract as `reference.attend`."""
    out = query.new_empty(*query.shape[:2], width_of(v))
    for i, kv_len in enumerate(batch.kv_lens):
        rows = slice(batch.cu_seqlens[i], batch.cu_seqlens[i + 1])
        num_rows = rows.stop - rows.start
        oldest = spec.oldest(kv_len - num_rows)
        mask = None
        if num_rows > 1:
            make = partial(reference.causal_mask, batch.positions[rows], range(oldest, kv_len), spec)
            mask = batch.once(("mask", i, spec.reach), make)
        key, value = (floats_of(positions(arena, batch, i, oldest), query.dtype) for arena in (k, v))
        out[rows] = _one_sequence(query[rows], key, value, mask, spec)
    return out


def attend_rows(query: Tensor, k: Tensor, v: Tensor, batch: RaggedBatch, spec: AttentionSpec) -> Tensor:
    """Same contract as `reference.attend`, one row at a time: a row's bits depend on its own sequence only.

    Verification and decoding are then the same operation on operands of the same shape. int8 models need this, because
    rounding to int8 can turn a difference in the last bit into a whole step.
    """
    out = query.new_empty(*query.shape[:2], width_of(v))
    for i, kv_len in enumerate(batch.kv_lens):
        rows = range(batch.cu_seqlens[i], batch.cu_seqlens[i + 1])
        key, value = (floats_of(positions(arena, batch, i), query.dtype) for arena in (k, v))
        for row, position in zip(rows, range(kv_len - len(rows), kv_len), strict=True):
            seen = slice(spec.oldest(position), position + 1)
            out[row] = _one_sequence(query[row : row + 1], key[seen], value[seen], None, spec)[0]
    return out


def attend_fixed(query: Tensor, k: Tensor, v: Tensor, batch: RaggedBatch, spec: AttentionSpec) -> Tensor:
    """As `attend_rows`, on one thread: torch adds up many keys in an order that depends on the number of threads."""
    with exactly(1):
        return attend_rows(query, k, v, batch, spec)


def positions(arena: Tensor, batch: RaggedBatch, i: int, oldest: int = 0) -> Tensor:
    """K or V of sequence i from position `oldest` on, `[s, kv_heads, dim]`."""
    if batch.is_contiguous[i]:
        start = batch.page_tables[i][0] * batch.page_size
        return arena[start + oldest : start + batch.kv_lens[i]]
    rows = batch.once(("rows", i), partial(reference.arena_rows, batch, i, arena.device))
    return arena.index_select(0, rows[oldest:])


def _one_sequence(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, spec: AttentionSpec) -> Tensor:
    """[t, heads, key_dim] over [s, kv_heads, dim]. Query heads that share a KV head become additional rows.

    torch's own grouping (`enable_gqa`) expands the K/V instead, which was 12 times slower on CPU. SDPA has neither
    softcap nor sinks.
    """
    if spec.softcap is not None or spec.sinks is not None:
        return reference.attended(query, key, value, mask, spec)
    num_rows, kv_heads = query.shape[0], key.shape[1]
    folded = query.unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3).flatten(1, 2)  # [kv_heads, group * t, key_dim]
    group = folded.shape[1] // num_rows
    if mask is not None:
        mask = mask.repeat(group, 1)[None]
    result: Tensor = scaled_dot_product_attention(
        folded[None], key.transpose(0, 1)[None], value.transpose(0, 1)[None], mask, scale=spec.scale
    )
    unfolded: Tensor = result[0].unflatten(1, (group, num_rows)).permute(2, 0, 1, 3).flatten(1, 2)
    return unfolded
