"""Where keys and values lie, and which pages are free. Knows page tables; knows nothing of requests.

One arena per model, allocated once. A sequence's position p lies in arena row
`page_table[p // page_size] * page_size + p % page_size`, the same row in every layer.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.types import KVCursor


@dataclass(frozen=True, slots=True)
class KVLayout:
    """What one position costs: `layers` x 2 x `kv_heads` x `head_dim` numbers of `dtype`."""

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
        # Spare rows lie behind the last page and belong to nobody: padding may write there.
        shape = (layout.layers, 2, num_pages * page_size + spare_rows, layout.kv_heads, layout.head_dim)
        # Zeroed once: rows beyond `kv_len` may be read under a mask, and a stray NaN would survive the mask.
        storage = torch.zeros(shape, dtype=layout.dtype, device=device)
        self.layout, self.page_size = layout, page_size
        self.k: tuple[Tensor, ...] = tuple(layer[0] for layer in storage)
        self.v: tuple[Tensor, ...] = tuple(layer[1] for layer in storage)

    def write(self, layer: int, rows: Tensor, key: Tensor, value: Tensor) -> None:
        """Store `key` and `value` `[tokens, kv_heads, head_dim]` in place at `rows` `[tokens]`."""
        self.k[layer].index_copy_(0, rows, key)
        self.v[layer].index_copy_(0, rows, value)


class BlockPool:
    """The pages of one arena: each is free or in exactly one page table (I5)."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.num_pages, self.page_size = num_pages, page_size
        self._free = list(range(num_pages - 1, -1, -1))

    @property
    def num_free(self) -> int:
        """Pages that no sequence holds."""
        return len(self._free)

    def pages_for(self, num_tokens: int) -> int:
        """page_size 16: 0 -> 0, 1 -> 1, 16 -> 1, 17 -> 2."""
        return -(-num_tokens // self.page_size)

    def reserve(self, cursor: KVCursor, num_tokens: int) -> bool:
        """Give `cursor` pages for its first `num_tokens` positions; False, and nothing changed, if too few are free."""
        missing = self.pages_for(num_tokens) - len(cursor.page_table)
        if missing > self.num_free:
            return False
        for _ in range(missing):
            cursor.page_table.append(self._free.pop())
        return True

    def release(self, cursor: KVCursor) -> None:
        """Take all pages back; the cursor starts again from nothing."""
        self._free.extend(reversed(cursor.page_table))
        cursor.page_table.clear()
        cursor.kv_len = 0

    def check_invariants(self, cursors: Iterable[KVCursor]) -> None:
        """I5: free pages and referenced pages are disjoint and together all; no cursor stands beyond its pages."""
        held = []
        for cursor in cursors:
            held += cursor.page_table
            assert cursor.kv_len <= len(cursor.page_table) * self.page_size, "kv_len beyond the page table"
        assert sorted(self._free + held) == list(range(self.num_pages)), "a page was lost or is held twice"
