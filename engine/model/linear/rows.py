"""Rows of activations as integers, for products with codes. Knows numbers; knows no model.

A row has one step, so that a product needs one factor for a row, whatever groups its weights have. A step that the
largest number fits in 8 bits with is too long for the others: published models have single numbers of 30 to 1,000 times
the mean (Dettmers et al. 2022, arXiv 2208.07339). So the step follows the mean magnitude, and the few numbers that need
more than 8 bits have 16.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.native import rows_for

# As in native/rows.h.
_MOST = 32512.0  # 127 * 256
_MEANS = 2.5  # 127 steps are this times the mean magnitude
_TINY = 1e-30  # so that a row of zeros has a step too


def round_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Floats `[M, n]` -> int16 `[M, n]`, at most 32,512, and float32 step `[M, 1]`: x is about int16 * step.

    Each operation is correctly rounded or in integers, so a row's place and neighbours cannot change its bits. C and
    torch give the same bits. The step is NaN where a number of the row is not finite.
    """
    native = rows_for(x.dtype, x.shape[1])
    if native is not None and x.is_cpu and x.stride(1) == 1:
        return native.round(x)
    wide = x.float()
    peak = wide.abs().amax(-1, keepdim=True).clamp_min_(_TINY) + (wide - wide).sum(-1, keepdim=True)
    fine = _MOST / peak
    # A sum of integers is the same in any order.
    total = (wide.abs() * fine).round_().nan_to_num_(0, 0, 0).long().sum(-1, keepdim=True)
    steps = total.float().mul_(_MEANS / 127 / x.shape[1]).clamp_(1, 256)
    rounded = (wide * (fine / steps)).round_().nan_to_num_(0, 0, 0)
    return rounded.to(torch.int16), peak.mul_(1 / _MOST).mul_(steps)


def matmul_shape(module: object) -> tuple[int, int] | None:
    """(in, out) of a plain matmul, in float, packed or of codes; None for anything else."""
    sizes = getattr(module, "in_features", None), getattr(module, "out_features", None)
    return None if sizes[0] is None or sizes[1] is None else (sizes[0], sizes[1])
