"""Attention of any shape against plain torch, and a row's bits alone against those in a batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from benchmarks.cuda.arenas import PAGE, tables_of
from benchmarks.cuda.card import Card
from benchmarks.cuda.parts.checking import KernelCheck, largest_difference
from pilotfish.engine.kernels import reference
from pilotfish.engine.kernels.paging import Paging

ATTENDED = {torch.bfloat16: 2e-2, torch.float16: 3e-3, torch.float32: 2e-5}  # tolerances for rounding
Batch = tuple[list[int], list[int]]  # rows, and the position of the first, of each sequence


@dataclass(frozen=True, slots=True)
class Attention:
    """The heads of one layer, and what its attention is beside that of most."""

    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    window: int | None = None
    chunk: int | None = None
    has_sinks: bool = False
    is_latent: bool = False


@dataclass(frozen=True, slots=True)
class Attending:
    """A batch of one type: its keys, values and queries are drawn when it is compared."""

    card: Card
    shape: Attention
    batch: Batch
    dtype: torch.dtype

    def differs(self) -> float:
        """Compare the kernel with its reference."""
        from pilotfish.engine.kernels import attention as kernel  # imported here because it imports Triton

        drawn = _Drawn(self)
        paging = drawn.paging(*self.batch, drawn.tables, fixed=self.shape.value_dim > 256)
        got = drawn.attend(kernel.attend, drawn.query, paging, self.dtype)
        return largest_difference(got, drawn.attend(reference.attend, drawn.query, paging, torch.float32))

    def differs_alone(self) -> float:
        """Compare the last row of each sequence alone and in a batch; with fixed-shape tiles the bits must be equal."""
        from pilotfish.engine.kernels import attention as kernel

        drawn, found, end = _Drawn(self), [0.0], 0
        together = drawn.attend(
            kernel.attend, drawn.query, drawn.paging(*self.batch, drawn.tables, fixed=True), self.dtype
        )
        for rows, start, table in zip(*self.batch, drawn.tables, strict=True):
            end += rows
            one = drawn.paging([1], [start + rows - 1], [table], fixed=True)
            got = drawn.attend(kernel.attend, drawn.query[end - 1 : end], one, self.dtype)
            found.append(largest_difference(got[0], together[end - 1]))
        return max(found)


class _Drawn:
    """Random keys and values of a batch, and queries of all or of single rows."""

    def __init__(self, of: Attending) -> None:
        self._of, shape, (rows, starts) = of, of.shape, of.batch
        self.tables = tables_of(rows, starts)
        draw = partial(torch.randn, device=of.card.device, dtype=of.dtype)
        self._k = draw(sum(map(len, self.tables)) * PAGE, shape.kv_heads, shape.key_dim)
        self._v = draw(len(self._k), shape.kv_heads, shape.value_dim)
        self.query = draw(sum(rows), shape.heads, shape.key_dim)
        self._sinks = draw(shape.heads) if shape.has_sinks else None

    def paging(self, rows: list[int], starts: list[int], tables: list[list[int]], *, fixed: bool) -> Paging:
        group = self._of.shape.heads // self._of.shape.kv_heads
        return Paging.of(rows, starts, tables, PAGE, group, self._of.card.device, fixed=fixed)

    def attend(self, run: Callable[..., Tensor], query: Tensor, paging: Paging, dtype: torch.dtype) -> Tensor:
        shape, k = self._of.shape, self._k.to(dtype)
        kv = k, k[..., : shape.value_dim] if shape.is_latent else self._v.to(dtype)
        sinks = None if self._sinks is None else self._sinks.to(dtype)
        scale = shape.key_dim**-0.5
        return run(query.to(dtype), *kv, paging, scale, shape.window, chunk=shape.chunk, sinks=sinks)


def attention_check(name: str, shape: str, one: Attending) -> KernelCheck:
    """Return the check of a batch against the reference."""
    return KernelCheck(name, str(one.dtype).removeprefix("torch."), shape, ATTENDED[one.dtype], one.differs)


def row_alone_check(shape: str, one: Attending) -> KernelCheck:
    """Return the check that a row has the same bits alone."""
    dtype = str(one.dtype).removeprefix("torch.")
    return KernelCheck("attention, a row alone", dtype, shape, 0.0, one.differs_alone)
