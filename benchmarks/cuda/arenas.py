"""Batches for the attention kernel alone: random K/V of one layer in more copies than the cache can hold."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from benchmarks.cuda.card import Card
from benchmarks.cuda.shapes import Heads
from pilotfish.engine.kernels.paging import Paging, Tuning

PAGE = 32  # tokens
_TIMES_CACHE = 4  # size of all arenas together, relative to the cache


def tables_of(num_rows: Seq[int], starts: Seq[int]) -> list[list[int]]:
    """Return random pages for sequences that feed so many rows from `starts` on."""
    pages = [-(-(start + n) // PAGE) for n, start in zip(num_rows, starts, strict=True)]
    order = torch.randperm(sum(pages)).tolist()
    return [order[sum(pages[:i]) : sum(pages[: i + 1])] for i in range(len(pages))]


@dataclass(frozen=True, slots=True)
class Arenas:
    """One batch, and several arenas with the same tables: calls on them in turn never find their K/V in the cache."""

    query: Tensor  # [T, heads, head_dim]
    kv: Tensor  # [count, 2, rows, kv_heads, head_dim]
    paging: Paging

    @classmethod
    def of(
        cls,
        card: Card,
        heads: Heads,
        num_rows: Seq[int],
        starts: Seq[int],
        dtype: torch.dtype = torch.bfloat16,
    ) -> Arenas:
        """Create sequences that feed `num_rows` from `starts` on."""
        tables = tables_of(num_rows, starts)
        paging = Paging.of(num_rows, starts, tables, PAGE, heads.group, card.device)
        shape = 2, sum(map(len, tables)) * PAGE, heads.kv_heads, heads.dim
        one = 2 * shape[1] * shape[2] * shape[3] * dtype.itemsize
        kv = torch.randn(cls.count_of(one, card.cache_bytes), *shape, device=card.device, dtype=dtype)
        query = torch.randn(sum(num_rows), heads.heads, heads.dim, device=card.device, dtype=dtype)
        return cls(query, kv, paging)

    @staticmethod
    def count_of(bytes_each: int, cache_bytes: int) -> int:
        """Return a number of arenas whose total size is well above the cache."""
        return -(-_TIMES_CACHE * cache_bytes // bytes_each)

    def calls(self, tuning: Tuning | None = None) -> list[Callable[[], Tensor]]:
        """Return a kernel call per arena; the plans are made once, as the layers of a pass share them."""
        from pilotfish.engine.kernels import attention, plan  # imported here because it imports Triton

        scale = self.query.shape[2] ** -0.5
        plans = plan.plans_of(self.query, self.kv[0, 0], self.paging, tuning=tuning)
        return [partial(attention.attend, self.query, kv[0], kv[1], self.paging, scale, plans=plans) for kv in self.kv]

    @property
    def bytes_each(self) -> int:
        """Return the bytes of K and V of one arena."""
        return self.kv[0].nbytes
