"""Philox noise in C (`noise.c`): the same numbers as `engine/sampling/noise.py`, one call for all rows. CPU only."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch
from torch import Tensor

from engine.native.compiled import function, library

_I64, _PTR = ctypes.c_int64, ctypes.c_void_p
_SIGNATURES: dict[str, tuple[type, ...]] = {
    "uniform": (_PTR, _PTR, _PTR, _I64, _I64, _PTR),
    "uniform_at": (_PTR, _PTR, _PTR, _PTR, _I64, _I64, _PTR),
}


def _function(name: str) -> Callable[..., None]:
    return function(name, _SIGNATURES[name])


def draws(seed: Tensor) -> bool:
    """Whether C can compute the noise for these seeds; it cannot for traced tensors, which have a shape but no data."""
    return type(seed) is Tensor and seed.is_cpu and library() is not None


def uniform(seed: Tensor, position: Tensor, stream: Tensor, pairs: int) -> Tensor:
    """Numbers in (0, 1) for the first 2 * pairs tokens: int64 `[rows]` each -> float64 `[rows, 2 * pairs]`."""
    seed, position, stream = _dense(seed, position, stream)
    out = torch.empty(len(seed), 2 * pairs, dtype=torch.float64)
    ours = seed.data_ptr(), position.data_ptr(), stream.data_ptr()
    _function("uniform")(*ours, len(seed), pairs, out.data_ptr())
    return out


def uniform_at(seed: Tensor, position: Tensor, stream: Tensor, tokens: Tensor) -> Tensor:
    """The same numbers for `tokens` `[rows, S]` only: float64 `[rows, S]`."""
    seed, position, stream, tokens = _dense(seed, position, stream, tokens)
    out = torch.empty(tokens.shape, dtype=torch.float64)
    ours = seed.data_ptr(), position.data_ptr(), stream.data_ptr(), tokens.data_ptr()
    _function("uniform_at")(*ours, *tokens.shape, out.data_ptr())
    return out


def _dense(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(tensor.contiguous() for tensor in tensors)
