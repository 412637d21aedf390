"""Stores keys and values in arena rows. `pages.py` decides which sequence has which rows.

There is one arena per model, allocated once. A sequence's position p is stored in arena row
`page_table[p // page_size] * page_size + p % page_size`, the same row in every layer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

_ALIGNED = 64  # bytes, like torch's own tensors


@dataclass(frozen=True, slots=True)
class KVLayout:
    """The shape of K/V: one position takes `layers` x 2 x `kv_heads` x `head_dim` numbers of `dtype`."""

    layers: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def bytes_per_token(self) -> int:
        """Bytes of K and V that one position takes over all layers."""
        return self.layers * 2 * self.kv_heads * self.head_dim * self.dtype.itemsize


class KVArena:
    """Keys and values of every sequence of one model: per layer `k` and `v` of `[rows, kv_heads, head_dim]`."""

    def __init__(
        self, layout: KVLayout, num_pages: int, page_size: int, device: torch.device, spare_rows: int = 0
    ) -> None:
        # Spare rows are behind the last page and belong to no sequence: padding may write there.
        shape = (layout.layers, 2, num_pages * page_size + spare_rows, layout.kv_heads, layout.head_dim)
        # Zeroed once: rows beyond `kv_len` may be read under a mask, and the mask would not remove a NaN.
        is_cpu = device.type == "cpu"
        storage = _zeros(shape, layout.dtype) if is_cpu else torch.zeros(shape, dtype=layout.dtype, device=device)
        self.layout, self.num_pages, self.page_size = layout, num_pages, page_size
        self.k: tuple[Tensor, ...] = tuple(layer[0] for layer in storage)
        self.v: tuple[Tensor, ...] = tuple(layer[1] for layer in storage)

    def write(self, layer: int, rows: Tensor, key: Tensor, value: Tensor) -> None:
        """Store `key` and `value` `[tokens, kv_heads, head_dim]` in place at `rows` `[tokens]`."""
        self.k[layer].index_copy_(0, rows, key)
        self.v[layer].index_copy_(0, rows, value)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Like `torch.zeros`, but the system zeroes each page at first access, so start-up does not wait for all pages."""
    size = math.prod(shape) * dtype.itemsize
    memory = np.zeros(size + _ALIGNED, np.uint8)
    start = -memory.ctypes.data % _ALIGNED
    return torch.from_numpy(memory[start : start + size]).view(dtype).view(shape)
