"""Keys and values in int8: each vector with a scale of its own, which depends on nothing else.

A vector of `dim` numbers takes `dim + SCALE_BYTES` bytes of an int8 tensor: first the bytes of its float32 scale, then
its codes. The scale is first so that values which are the beginning of their keys (MLA) are still a view of these.
Whether a tensor holds such vectors, its type says.
"""

from __future__ import annotations

import torch
from torch import Tensor

SCALE_BYTES = 4
_TINY = 1e-30  # so that a vector of zeros has a scale too
_LARGEST = 127


def is_rounded(heads: Tensor) -> bool:
    """Whether a tensor holds codes and scales, not floats."""
    return heads.dtype == torch.int8


def width_of(heads: Tensor) -> int:
    """Numbers in each vector of `[..., stored]`, however they are stored."""
    return heads.shape[-1] - (SCALE_BYTES if is_rounded(heads) else 0)


def round_heads(heads: Tensor) -> Tensor:
    """Vectors `[..., dim]` to int8 `[..., SCALE_BYTES + dim]`, to nearest, the largest number of each to 127 or -127.

    A vector that holds a NaN or an infinity gets the scale NaN. `rotate_row` in `native/rows.c` computes the same bits.
    """
    x = heads.float()
    peak = x.abs().amax(-1, keepdim=True).clamp_min_(_TINY)
    scale = peak * (1 / _LARGEST) + (x - x).sum(-1, keepdim=True)  # 0, but NaN where there is no number
    codes = (x * (1 / peak * _LARGEST)).round_().nan_to_num_(0, 0, 0).to(torch.int8)
    return torch.cat([scale.view(torch.int8), codes], -1)


def floats_of(heads: Tensor, dtype: torch.dtype) -> Tensor:
    """Vectors `[..., stored]` as numbers of `dtype` `[..., dim]`: code times scale where they are rounded."""
    if not is_rounded(heads):
        return heads.to(dtype)
    scale = heads[..., :SCALE_BYTES].contiguous().view(torch.float32)
    return (heads[..., SCALE_BYTES:] * scale).to(dtype)
