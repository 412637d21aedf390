"""Activations whose result does not depend on an element's position.

torch computes whole vectors with one function, and the remainder of a buffer, or of a thread's part of it, with another
that may round differently. Here there is no remainder, and only one thread.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

_VECTOR = 64  # twice the elements of the longest vector of the shortest type
_SERIAL = 16384  # GELU uses several threads above this number of elements; other activations above twice this number


class RowWise(nn.Module):
    """Runs an elementwise `inner` on whole rows, as many at once as torch computes in one thread."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        # GELU has separate functions for contiguous and other layouts; SiLU, the most common activation, has one.
        self._as_it_lies = type(inner) is nn.SiLU
        self._most = (2 if self._as_it_lies else 1) * _SERIAL - 1

    def forward(self, x: Tensor) -> Tensor:
        """`[..., n]` -> `[..., n]`."""
        if not x.is_cpu:
            return self._whole(x)
        n = x.shape[-1]
        if n % _VECTOR:
            padded: Tensor = self(F.pad(x, (0, -n % _VECTOR)))
            return padded[..., :n]
        if x.numel() <= self._most:
            return self._whole(x)
        if n > self._most:
            return torch.cat([self(part) for part in x.split(self._most // _VECTOR * _VECTOR, -1)], -1)
        rows = x.reshape(-1, n).split(self._most // n)
        return torch.cat([self._whole(part) for part in rows]).view(x.shape)

    def _whole(self, x: Tensor) -> Tensor:
        done: Tensor = self.inner(x if self._as_it_lies else x.contiguous())
        return done


ELEMENTWISE: dict[Callable[..., Any], nn.Module] = {
    torch.sigmoid: RowWise(nn.Sigmoid()),
    torch.tanh: RowWise(nn.Tanh()),
    F.silu: RowWise(nn.SiLU()),
    F.softplus: RowWise(nn.Softplus()),
}
