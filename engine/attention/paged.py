"""Attention by our Triton kernel: on CUDA, or interpreted where a test asks for that; and what it means in plain torch.

Both read where rows and keys lie from device tensors, which a batch may bring along (`key_of`).
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from engine.attention import fixed as fixed_order
from engine.attention import sdpa
from engine.attention.spec import AttentionSpec
from engine.kernels import reference
from engine.kernels.paging import Paging
from engine.kv.batch import RaggedBatch
from engine.kv.rounded import is_rounded

WIDEST_IN_PROMPTS = 256  # numbers of a value


def attend(
    query: Tensor,  # [T, heads, key_dim]
    k: Tensor,  # [rows, kv_heads, key_dim]
    v: Tensor,  # [rows, kv_heads, value_dim]
    batch: RaggedBatch,
    spec: AttentionSpec,
    *,
    fixed: bool = False,
) -> Tensor:  # [T, heads, value_dim]
    """Same contract as `reference.attend`; in prompts a query's bits depend on how many rows come with it.

    With `fixed` they do not depend on how its batch was put together.
    """
    if is_rounded(k):  # our kernel reads floats alone
        plain = fixed_order.attend if fixed else sdpa.attend
        return plain(query, k, v, batch, spec)
    from engine.kernels import attention, plan  # both bring Triton, which not every machine has

    shape = (*query.shape[1:], *v.shape[1:])
    # Tiles of prompts are for tensor cores, which float32 has none of, and for values that registers hold that many of.
    fixed = fixed or query.dtype == torch.float32 or v.shape[2] > WIDEST_IN_PROMPTS
    paging = paging_of(batch, query.shape[1] // k.shape[1], fixed=fixed)
    make = partial(plan.plans_of, query, k, paging, spec.window, chunk=spec.chunk, value_dim=v.shape[2])
    plans = batch.once(("plans", shape, spec.reach, fixed), make)
    attended: Tensor = attention.attend(
        query, k, v, paging, spec.scale, spec.window, spec.softcap, chunk=spec.chunk, sinks=spec.sinks, plans=plans
    )
    return attended


attend_fixed = partial(attend, fixed=True)


def attend_plainly(
    query: Tensor,
    k: Tensor,
    v: Tensor,
    batch: RaggedBatch,
    spec: AttentionSpec,
) -> Tensor:
    """As `attend`, without Triton and without a value read on the host: slow, and for small sizes."""
    paging = paging_of(batch, query.shape[1] // k.shape[1])
    return reference.attend(
        query, k, v, paging, spec.scale, spec.window, spec.softcap, chunk=spec.chunk, sinks=spec.sinks
    )


def paging_of(batch: RaggedBatch, group: int, *, fixed: bool = False) -> Paging:
    """Where the rows and keys of a batch lie, for layers with `group` query heads to a KV head."""
    return batch.once(key_of(group, fixed=fixed), partial(_lay_out, batch, group, fixed=fixed))


def key_of(group: int, *, fixed: bool) -> tuple[str, int, bool]:
    """The key under which a batch carries a layout that is on the device already."""
    return "paging", group, fixed


def keys_of(group: int) -> tuple[tuple[str, int, bool], ...]:
    """All such keys, for a batch without tiles of prompts: its layout is the same `fixed` or not."""
    return key_of(group, fixed=False), key_of(group, fixed=True)


def _lay_out(batch: RaggedBatch, group: int, *, fixed: bool) -> Paging:
    ends = batch.cu_seqlens[1:]
    num_rows = [end - start for start, end in zip(batch.cu_seqlens, ends, strict=False)]
    starts = [kv_len - n for kv_len, n in zip(batch.kv_lens, num_rows, strict=True)]
    device = batch.positions.device
    return Paging.of(num_rows, starts, batch.page_tables, batch.page_size, group, device, fixed=fixed)
