"""The matrices of a mixture's experts, stacked in one weight of the model, of which each keeps its own codes."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from engine.model.published.base import Codes


@dataclass(frozen=True, slots=True)
class StackedCodes:
    """A weight of three dimensions, `[experts, out, in]`, or `[experts, in, out]` where it is `transposed`."""

    matrices: Seq[Codes]  # of each expert, `[out, in]`
    transposed: bool

    @property
    def shape(self) -> tuple[int, ...]:
        """See `Codes`."""
        one = tuple(self.matrices[0].shape)
        return len(self.matrices), *(one[::-1] if self.transposed else one)

    def num_bytes(self) -> int | None:
        """See `Codes`; all matrices must have a form."""
        sizes = [size for matrix in self.matrices if (size := matrix.num_bytes()) is not None]
        return sum(sizes) if len(sizes) == len(self.matrices) else None

    def dequantised(self) -> Tensor:
        """See `Codes`."""
        made = torch.empty(self.shape)
        for place, matrix in zip(made, self.matrices, strict=True):
            (place.t() if self.transposed else place).copy_(matrix.dequantised())
        return made

    def linear(self, bias: Tensor | None, dtype: torch.dtype | None) -> nn.Module | None:
        """See `Codes`: a stack is no matmul."""
        return None
