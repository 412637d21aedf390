"""Matmuls in 8-bit floats (e4m3): weights rounded once with a scale per output, rows as they come with one each.

For CUDA from Hopper on, by torch's own operation; it runs on CPUs too, which have nothing to gain. A row's rounding
hangs on the row alone. What a model says in 8 bits is what is served: speculation is exact for the model as loaded.
"""

from __future__ import annotations

import logging
from typing import cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from engine.errors import ModelError

log = logging.getLogger(__name__)

LARGEST = torch.finfo(torch.float8_e4m3fn).max  # 448
_TINY = 1e-12  # a row of zeros has a scale all the same
_STEP = 16  # sizes of matrices are multiples of this
_ROUTERS = ("gate", "router")  # small matrices that choose experts: a rounded choice is another choice


def rounded(rows: Tensor) -> tuple[Tensor, Tensor]:
    """`[R, in]` -> e4m3 `[R, in]` and float32 scales `[R, 1]`; their product is near the rows."""
    wide = rows.float()
    scale = wide.abs().amax(1, keepdim=True).clamp(min=_TINY) / LARGEST
    return (wide / scale).to(torch.float8_e4m3fn), scale


class Fp8Linear(nn.Module):
    """As `nn.Linear`, in bfloat16 at both ends."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        weight, scale = rounded(linear.weight.detach())
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.scale = nn.Parameter(scale.t().contiguous(), requires_grad=False)  # [1, out]
        self.bias: nn.Parameter | None = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        """`[..., in]` -> `[..., out]`."""
        rows, scale = rounded(x.reshape(-1, self.in_features))
        out = torch._scaled_mm(rows, self.weight.t(), scale_a=scale, scale_b=self.scale, out_dtype=x.dtype)  # noqa: SLF001
        out = out.view(*x.shape[:-1], self.out_features)
        return out if self.bias is None else out + self.bias


def to_fp8(model: PreTrainedModel) -> int:
    """Round the matrices of a loaded model, one at a time; how many. The head and what does not fit stay.

    Raises:
        ModelError: it is not in bfloat16.
    """
    if model.dtype != torch.bfloat16:
        raise ModelError(f"fp8 weights are for models in bfloat16; dtype is {str(model.dtype).removeprefix('torch.')}")
    head, count = model.get_output_embeddings(), 0
    for name in [name for name, module in model.named_modules() if type(module) is nn.Linear and module is not head]:
        linear = cast("nn.Linear", model.get_submodule(name))
        if name.rpartition(".")[2] in _ROUTERS or linear.in_features % _STEP or linear.out_features % _STEP:
            continue
        model.set_submodule(name, Fp8Linear(linear))
        count += 1
    log.info("%d matrices are in fp8", count)
    return count
