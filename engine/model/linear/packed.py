"""Float matrices in the panels of our C, where a row's sums do not depend on the number of rows.

torch's own float matmuls choose the order of their sums by the shape of the operands; here it is always the order of
the inputs. So floats are batch-invariant, as codes always are (`grouped.py`).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from engine.model.linear.grouped import GroupedLinear, SideBySide
from engine.native import PackedMatrix


class PackedLinear(nn.Module):
    """`nn.Linear` over a packed matrix."""

    def __init__(self, packed: PackedMatrix, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.packed, self.dtype = packed, dtype  # dtype of the output; None for the type of the input
        self.in_features, self.out_features = packed.in_features, packed.out_features

    def forward(self, x: Tensor) -> Tensor:
        """`[..., in]` -> `[..., out]`."""
        dtype = self.dtype or x.dtype
        rows = x.reshape(-1, self.in_features)
        if not len(rows):  # in the middle of a prompt no logits are needed
            return x.new_empty(*x.shape[:-1], self.out_features, dtype=dtype)
        out = self.packed.multiply(rows.to(self.packed.dtype).contiguous(), None, dtype)
        return out.view(*x.shape[:-1], self.out_features)


def packed_of(matmul: nn.Module) -> tuple[PackedMatrix, ...] | None:
    """The matrices of `matmul` in our C, if `matmul` returns their products without a change of type; else None."""
    if isinstance(matmul, SideBySide):
        parts = [packed_of(part) for part in matmul.parts]
        return None if None in parts else tuple(matrix for part in parts if part is not None for matrix in part)
    if not isinstance(matmul, GroupedLinear | PackedLinear) or matmul.dtype is not None:
        return None
    found = matmul.pack() if isinstance(matmul, GroupedLinear) else matmul.packed
    return (found,) if isinstance(found, PackedMatrix) else None
