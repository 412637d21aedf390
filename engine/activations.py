"""Activations that no number's place can change.

torch computes them in whole vectors, and what is left over at the end of a buffer, or of a thread's part of it, with
another function that may round otherwise. Here nothing is left over and there is one thread.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel, activations

_VECTOR = 64  # numbers in the longest vector of the shortest type, twice over
_SERIAL = 32767  # torch gives more numbers than this to several threads
_KINDS = frozenset(found[0] if isinstance(found, tuple) else found for found in dict.values(activations.ACT2CLS)) | {
    nn.SiLU,
    nn.GELU,
    nn.ReLU,
    nn.Tanh,
    nn.Sigmoid,
}


class RowWise(nn.Module):
    """An elementwise `inner`, given whole rows, as many at once as one thread takes."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        """Any `[..., n]`."""
        n = x.shape[-1]
        if n % _VECTOR:
            padded: Tensor = self(F.pad(x, (0, -n % _VECTOR)))
            return padded[..., :n]
        if x.numel() <= _SERIAL:
            return self._whole(x)
        if n > _SERIAL:
            return torch.cat([self(part) for part in x.split(_SERIAL // _VECTOR * _VECTOR, -1)], -1)
        rows = x.reshape(-1, n).split(_SERIAL // n)
        return torch.cat([self._whole(part) for part in rows]).view(x.shape)

    def _whole(self, x: Tensor) -> Tensor:
        done: Tensor = self.inner(x)
        return done


def make_row_wise(model: PreTrainedModel) -> None:
    """Wrap every activation module of `model`."""
    for name, module in list(model.named_modules()):
        if type(module) in _KINDS:
            model.set_submodule(name, RowWise(module))
