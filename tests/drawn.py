"""Tensors of random numbers, the same for a seed every time."""

from __future__ import annotations

import torch


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    """Normal, float32."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def int8s(*shape: int, seed: int = 0) -> torch.Tensor:
    """From -127 to 127."""
    return torch.randint(-127, 128, shape, dtype=torch.int8, generator=torch.Generator().manual_seed(seed))
