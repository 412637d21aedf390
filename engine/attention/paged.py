"""Attention by our Triton kernel, on CUDA or interpreted in tests, and its equivalent in plain torch.

Both read the positions of rows and keys from device tensors, which may already be stored in the batch (`key_of`).
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from pilotfish.engine.attention import sdpa
from pilotfish.engine.attention.reference import AttentionSpec
from pilotfish.engine.kernels import reference
from pilotfish.engine.kernels.paging import Paging
from pilotfish.engine.kv.arena import SCALE_BYTES, floats_of, is_rounded, width_of
from pilotfish.engine.kv.batch import RaggedBatch

WIDEST_IN_PROMPTS = 256  # elements of a value


def attend(
    query: Tensor, k: Tensor, v: Tensor, batch: RaggedBatch, spec: AttentionSpec, *, fixed: bool = False
) -> Tensor:
    """Same contract as `reference.attend`; in prompts a query's bits depend on the number of rows of its sequence.

    With `fixed` they do not depend on the batch.
    """
    if not reads(k, v):
        return (sdpa.attend_fixed if fixed else sdpa.attend)(query, k, v, batch, spec)
    from pilotfish.engine.kernels import attention, plan  # both import Triton, which is optional

    value_dim = width_of(v)
    shape = (*query.shape[1:], v.shape[1], value_dim)
    # Tiles of prompts need tensor cores, which do not support float32, and values that fit into registers.
    fixed = fixed or query.dtype == torch.float32 or value_dim > WIDEST_IN_PROMPTS
    paging = paging_of(batch, query.shape[1] // k.shape[1], fixed=fixed)
    make = partial(plan.plans_of, query, k, paging, spec.window, chunk=spec.chunk, value_dim=value_dim)
    plans = batch.once(("plans", shape, spec.reach, fixed), make)
    attended: Tensor = attention.attend(
        query, k, v, paging, spec.scale, spec.window, spec.softcap, chunk=spec.chunk, sinks=spec.sinks,
        scaled=SCALE_BYTES if is_rounded(k) else 0, plans=plans,
    )  # fmt: skip
    return attended


attend_fixed = partial(attend, fixed=True)


def reads(*heads: Tensor) -> bool:
    """Whether our kernel supports keys and values of these types and widths: scales are whole words of memory."""
    return not any(is_rounded(x) and x.shape[-1] % SCALE_BYTES for x in heads)


def attend_plainly(query: Tensor, k: Tensor, v: Tensor, batch: RaggedBatch, spec: AttentionSpec) -> Tensor:
    """As `attend`, without Triton and without reading values on the host: slow, for small sizes."""
    paging, floats = paging_of(batch, query.shape[1] // k.shape[1]), partial(floats_of, dtype=torch.float32)
    return reference.attend(
        query, floats(k), floats(v), paging, spec.scale, spec.window, spec.softcap, chunk=spec.chunk, sinks=spec.sinks
    )


def paging_of(batch: RaggedBatch, group: int, *, fixed: bool = False) -> Paging:
    """The locations of the rows and keys of a batch, for layers with `group` query heads per KV head."""
    return batch.once(key_of(group, fixed=fixed), partial(_lay_out, batch, group, fixed=fixed))


def key_of(group: int, *, fixed: bool) -> tuple[str, int, bool]:
    """The key under which a batch stores a layout that is already on the device."""
    return "paging", group, fixed


def keys_of(group: int) -> tuple[tuple[str, int, bool], ...]:
    """All such keys, for a batch without tiles of prompts, whose layout does not depend on `fixed`."""
    return key_of(group, fixed=False), key_of(group, fixed=True)


def _lay_out(batch: RaggedBatch, group: int, *, fixed: bool) -> Paging:
    ends = batch.cu_seqlens[1:]
    num_rows = [end - start for start, end in zip(batch.cu_seqlens, ends, strict=False)]
    starts = [kv_len - n for kv_len, n in zip(batch.kv_lens, num_rows, strict=True)]
    device = batch.positions.device
    return Paging.of(num_rows, starts, batch.page_tables, batch.page_size, group, device, fixed=fixed)
