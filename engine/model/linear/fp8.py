"""Matmuls in 8-bit floats (e4m3): weights rounded once with a scale per output, rows as they come with one each.

For CUDA from Hopper on, by torch's own operation; it runs on CPUs too, which have nothing to gain. A row's rounding
hangs on the row alone. What a model says in 8 bits is what is served: speculation is exact for the model as loaded.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from engine.errors import ModelError
from engine.kernels import reference
from engine.kernels.args import Fp8Rows
from engine.model.linear.swap import Swapped, swap_matmuls

_STEP = 16  # sizes of matrices are multiples of this


class Fp8Linear(nn.Module):
    """As `nn.Linear`, in bfloat16 at both ends; takes rows that are rounded already, too."""

    round_rows: Callable[[Tensor], Fp8Rows] = staticmethod(reference.round_rows)  # or a kernel that means the same

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        rounded = reference.round_rows(linear.weight.detach())
        self.weight = nn.Parameter(rounded.rows, requires_grad=False)
        self.scale = nn.Parameter(rounded.scale.t().contiguous(), requires_grad=False)  # [1, out]
        self.bias: nn.Parameter | None = linear.bias

    def forward(self, x: Tensor | Fp8Rows) -> Tensor:
        """`[..., in]` -> `[..., out]`."""
        given = x if isinstance(x, Fp8Rows) else self.round_rows(x)
        out = torch._scaled_mm(  # noqa: SLF001
            given.rows, self.weight.t(), scale_a=given.scale, scale_b=self.scale, out_dtype=given.dtype
        )
        out = out.view(*given.shape[:-1], self.out_features)
        return out if self.bias is None else out + self.bias


def fits(in_features: int, out_features: int) -> bool:
    """Whether a matrix of these sizes can be multiplied in 8-bit floats."""
    return not in_features % _STEP and not out_features % _STEP


def num_bytes(in_features: int, out_features: int) -> int:
    """Of a matrix and its scales."""
    return in_features * out_features + 4 * out_features


def to_fp8(model: PreTrainedModel) -> Swapped:
    """Round the matrices of a loaded model, one at a time. The head, routers and what does not fit stay.

    Raises:
        ModelError: it is not in bfloat16.
    """
    if model.dtype != torch.bfloat16:
        raise ModelError(f"fp8 weights are for models in bfloat16; dtype is {str(model.dtype).removeprefix('torch.')}")
    swapped = swap_matmuls(model, Fp8Linear, fits)
    swapped.tell("fp8")
    return swapped
