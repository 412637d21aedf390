"""MXFP4 (OCP microscaling, 2023) as gpt-oss is published: floats of 4 bits, 32 with a power of two, experts stacked.

Beside `X_blocks` uint8 `[experts, out, in / 32, 16]` there is `X_scales` uint8 `[experts, out, in / 32]`, exponents
plus 127. The float weight `X` is `[experts, in, out]`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from engine.errors import ModelError
from engine.model.published.base import FloatCodes, Weights, expect, taken, unpack4
from engine.model.published.stacked import StackedCodes

_BLOCKS, _SCALES = "_blocks", "_scales"
_POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_LEVELS = torch.tensor([*_POSITIVE, *(-level for level in _POSITIVE)])


def check(_settings: Mapping[str, Any]) -> None:
    """There is one variant."""


def read(_settings: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Weights:
    """The weights of a checkpoint, by the names of a float checkpoint.

    Raises:
        ModelError: a tensor is missing, or of another shape or type.
    """
    weights: Weights = {}
    for key, tensor in tensors.items():
        stem = key.removesuffix(_BLOCKS).removesuffix(_SCALES)
        if key == stem + _BLOCKS:
            weights[stem] = _experts(stem, tensor, taken(tensors, stem + _SCALES, key))
        elif key != stem + _SCALES or stem + _BLOCKS not in tensors:
            weights[key] = tensor
    return weights


def _experts(name: str, blocks: Tensor, scales: Tensor) -> StackedCodes:
    if blocks.ndim != 4 or blocks.dtype != torch.uint8:
        raise ModelError(f"{name}{_BLOCKS} is {blocks.dtype} {list(blocks.shape)}; expected uint8 of four dimensions")
    experts, out, groups, half = blocks.shape
    expect(name + _SCALES, scales, (experts, out, groups), torch.uint8)
    shape, pairs = (out, groups * half * 2), zip(blocks, scales, strict=True)
    return StackedCodes([FloatCodes(shape, partial(_plain, *pair), pair) for pair in pairs], transposed=True)


def _plain(blocks: Tensor, scales: Tensor) -> Tensor:
    """The matrix `[out, in]` of an expert; of each byte the low half comes first."""
    floats = _LEVELS[unpack4(blocks).int()]
    return torch.ldexp(floats, scales.int()[..., None] - 127).flatten(1)
