"""Philox noise in C (`noise.c`): the same numbers as `engine/sampling/noise.py`, one call for all rows. CPU only."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from engine.native.compiled import function, library


def draws(seed: Tensor) -> bool:
    """Whether C can compute the noise for these seeds; it cannot for traced tensors, which have a shape but no data."""
    return type(seed) is Tensor and seed.is_cpu and library() is not None


def uniform(seed: Tensor, position: Tensor, stream: Tensor, pairs: int) -> Tensor:
    """Numbers in (0, 1) for the first 2 * pairs tokens: int64 `[rows]` each -> float64 `[rows, 2 * pairs]`."""
    shape = len(seed), 2 * pairs
    return _written("uniform", (seed, position, stream), (len(seed), pairs), shape)


def uniform_at(seed: Tensor, position: Tensor, stream: Tensor, tokens: Tensor) -> Tensor:
    """The same numbers for `tokens` `[rows, S]` only: float64 `[rows, S]`."""
    return _written("uniform_at", (seed, position, stream, tokens), tokens.shape, tokens.shape)


def _written(name: str, given: tuple[Tensor, ...], sizes: Seq[int], shape: Seq[int]) -> Tensor:
    """What a function of noise.c writes to a result of this shape."""
    dense, out = [tensor.contiguous() for tensor in given], torch.empty(shape, dtype=torch.float64)
    function(name)(*(tensor.data_ptr() for tensor in dense), *sizes, out.data_ptr())
    return out
