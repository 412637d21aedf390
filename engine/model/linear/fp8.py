"""Matmuls in 8-bit floats (e4m3): weights are rounded once with a scale per output, and rows in each pass.

They are for CUDA from Hopper on, and use torch's own operation; they also run on CPUs, but are not faster there. The
rounding of a row depends on that row only. The model in 8 bits is the model that is served: speculation is exact for
the model as loaded.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from engine.kernels import reference
from engine.kernels.args import Fp8Rows

_STEP = 16  # sizes of matrices are multiples of this


class Fp8Linear(nn.Module):
    """Like `nn.Linear`, with bfloat16 input and output; the input may also be rounded already."""

    types = (torch.bfloat16,)  # of rows
    round_rows: Callable[[Tensor], Fp8Rows] = staticmethod(reference.round_rows)  # or a kernel that computes the same

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
            given.rows, self.weight.t(), scale_a=given.scale, scale_b=self.scale, out_dtype=given.dtype,
            use_fast_accum=False,  # less exact than bfloat16, and no faster while decoding
        )  # fmt: skip
        out = out.view(*given.shape[:-1], self.out_features)
        return out if self.bias is None else out + self.bias

    @staticmethod
    def fits(in_features: int, out_features: int) -> bool:
        """Whether a matrix of these sizes can be multiplied in 8-bit floats."""
        return not in_features % _STEP and not out_features % _STEP

    @staticmethod
    def num_bytes(in_features: int, out_features: int) -> int:
        """Bytes of a matrix and its scales."""
        return in_features * out_features + 4 * out_features
