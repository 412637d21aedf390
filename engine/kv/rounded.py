"""Keys and values in int8: each vector with a scale of its own, which depends on nothing else.

A vector of `dim` numbers takes `dim + SCALE_BYTES` bytes of an int8 tensor: first the bytes of its float32 scale, then
its codes. The scale is first so that values which are the beginning of their keys (MLA) are still a view of these.
Whether a tensor holds such vectors, its type says.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.kernels.reference import round_heads

__all__ = ["SCALE_BYTES", "floats_of", "is_rounded", "round_heads", "width_of"]

SCALE_BYTES = 4


def is_rounded(heads: Tensor) -> bool:
    """Whether a tensor holds codes and scales, not floats."""
    return heads.dtype == torch.int8


def width_of(heads: Tensor) -> int:
    """Numbers in each vector of `[..., stored]`, however they are stored."""
    return heads.shape[-1] - (SCALE_BYTES if is_rounded(heads) else 0)


def floats_of(heads: Tensor, dtype: torch.dtype) -> Tensor:
    """Vectors `[..., stored]` as numbers of `dtype` `[..., dim]`: code times scale where they are rounded."""
    if not is_rounded(heads):
        return heads.to(dtype)
    scale = heads[..., :SCALE_BYTES].contiguous().view(torch.float32)
    return (heads[..., SCALE_BYTES:] * scale).to(dtype)
