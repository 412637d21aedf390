"""Codes that stay in the blocks of a GGUF file until they are packed (`blocks.c`). Knows only numbers."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from engine.native.compiled import function, library
from engine.native.weights import spread

_KINDS = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")  # as `KINDS` of blocks.c


def splits(kind: str) -> bool:
    """Whether there is compiled code for blocks of this type."""
    return kind in _KINDS and library() is not None


@dataclass(frozen=True, slots=True)
class StoredCodes:
    """Takes the place of the tensor of a matrix' codes, of which a slice of rows is made when it is wanted.

    So there never is a copy of all codes, whose memory the system would take as long to give as all else takes.

    Attributes:
        kind: the type of the blocks, of those that are split (`splits`).
        blocks: uint8 `[out, blocks, bytes]`, mapped from a file.
        one: codes, scale, offset, steps and zeros of one block, each `[1, n]` or None: those of a row have as many
            times the numbers.
        order: int64 `[out]`, the row of `blocks` that each output is, or None.
    """

    kind: str
    blocks: Tensor
    one: Seq[Tensor | None]
    order: Tensor | None = None

    def __len__(self) -> int:
        return len(self.blocks)

    @property
    def dtype(self) -> torch.dtype:
        """Of the codes."""
        return self._codes.dtype

    @property
    def shape(self) -> tuple[int, int]:
        """Of the codes."""
        return len(self), self.blocks.shape[1] * self._codes.shape[1]

    def __getitem__(self, rows: slice) -> Tensor:
        """The codes of some outputs."""
        first, last, _ = rows.indices(len(self))
        codes, *others = (self._room(x, last - first) for x in self.one)
        assert codes is not None
        self._split(rows, [codes, *others])
        return codes

    def rows(self, which: Tensor) -> StoredCodes:
        """Some of the outputs, in any order."""
        return replace(self, order=which if self.order is None else self.order[which])

    def scales(self) -> list[Tensor | None]:
        """Scale, offset, steps and zeros of all outputs."""
        made = [self._room(x, len(self)) for x in self.one[1:]]

        def work(first: int, last: int) -> None:
            to = [None if x is None else x[first:last] for x in made]
            self._split(slice(first, last), [self._room(self._codes, last - first), *to])

        spread(len(self), self.shape[1] * self.dtype.itemsize, work)
        return made

    @property
    def _codes(self) -> Tensor:
        codes = self.one[0]
        assert codes is not None
        return codes

    def _room(self, one: Tensor | None, rows: int) -> Tensor | None:
        return None if one is None else torch.empty(rows, self.blocks.shape[1] * one.shape[1], dtype=one.dtype)

    def _split(self, rows: slice, to: Seq[Tensor | None]) -> None:
        blocks = self.blocks[rows] if self.order is None else self.blocks.index_select(0, self.order[rows])
        dense, places = blocks.contiguous(), (None if x is None else x.data_ptr() for x in to)
        function("blocks")(dense.data_ptr(), len(dense) * dense.shape[1], _KINDS.index(self.kind), *places)
