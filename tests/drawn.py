"""Tensors of random numbers, the same for a seed every time."""

from __future__ import annotations

import torch


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    """Normal, float32."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def int16s(rows: int, width: int, high: str = "some", seed: int = 0) -> torch.Tensor:
    """Rows as products with codes take them: in `no`, `some` or `all` runs of four inputs is a number beyond 8 bits."""
    draw = torch.Generator().manual_seed(seed)
    small = torch.randint(-128, 128, (rows, width), dtype=torch.int16, generator=draw)
    large = torch.randint(128, 32513, (rows, width), dtype=torch.int16, generator=draw)
    large = torch.where(small < 0, -large - 1, large).clamp(-32512, 32512)
    share = {"no": 0.0, "some": 0.05, "all": 0.3}[high]
    chosen = torch.rand(rows, width, generator=draw) < share
    if high == "all":
        chosen[:, ::4] = True
    return torch.where(chosen, large, small)
