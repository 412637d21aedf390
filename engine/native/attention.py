"""The arguments of our attention in C (`attention.h`)."""

from __future__ import annotations

import ctypes

import torch

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
