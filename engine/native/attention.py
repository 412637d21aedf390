"""The arguments of our attention in C (`attention.h`)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence as Seq
from itertools import chain

import torch
from torch import Tensor

BITS = {torch.float32: 32, torch.bfloat16: 16}


class AttentionArgs(ctypes.Structure):
    """`Args` of attention.h."""

    _fields_ = (
        *(
            (name, ctypes.c_void_p)
            for name in ("query", "key", "value", "out", "first_rows", "kv_lens", "tables", "sinks")
        ),
        *((name, ctypes.c_int64) for name in ("query_stride", "key_stride", "value_stride")),
        *((name, ctypes.c_int64) for name in ("sequences", "width", "page_size", "heads", "kv_heads")),
        *((name, ctypes.c_int64) for name in ("dim", "value_dim", "window", "chunk", "rounded")),
        *((name, ctypes.c_float) for name in ("scale", "softcap")),
    )


def pack_batch_indices(cu_seqlens: Seq[int], kv_lens: Seq[int], page_tables: Seq[Seq[int]]) -> Tensor:
    """Concatenate first rows `[B + 1]`, lengths `[B]` and page tables `[B, width]` of a batch, in int32."""
    width = max(map(len, page_tables))
    tables = chain.from_iterable((*table, *(0,) * (width - len(table))) for table in page_tables)
    return torch.tensor([*cu_seqlens, *kv_lens, *tables], dtype=torch.int32)


def attention_args(where: Tensor, page_size: int, sequences: int, heads: int, kv_heads: int, dim: int) -> AttentionArgs:
    """Build the arguments without the tensors of a layer; `where` must live longer than the result.

    Values are as wide as keys, and heads lie beside each other without gaps.
    """
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
        page_size=page_size,
        heads=heads,
        kv_heads=kv_heads,
        dim=dim,
        value_dim=dim,
    )
