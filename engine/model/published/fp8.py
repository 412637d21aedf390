"""Weights in floats of 8 bits, with a scale for the tensor, for each output, or for each block of 128 x 128.

`fp8` is how DeepSeek and Qwen publish them, `fbgemm_fp8` how Llama 3.1 405B was. Beside `X` there is `X_scale_inv` or
`X_scale`; both multiply the weight, despite the first one's name. `X` may be a stack of experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from engine.errors import ModelError
from engine.model.published.base import FloatCodes, Weights, taken

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_SCALES = ("_scale_inv", "_scale")


def check(settings: Mapping[str, Any]) -> None:
    """Raise ModelError for a variant that is not read."""
    found = settings.get("fmt", "e4m3")
    if found not in ("e4m3", "e5m2"):
        raise ModelError(f"FP8 of the kind {found}; Pilotfish reads e4m3 and e5m2")


def read(settings: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Weights:
    """The weights of a checkpoint, by the names of a float checkpoint.

    Raises:
        ModelError: a scale is missing, or of another shape.
    """
    block = settings.get("weight_block_size")
    weights: Weights = {}
    for key, tensor in tensors.items():
        if tensor.dtype in FP8:
            name = next((key + end for end in _SCALES if key + end in tensors), key + _SCALES[0])
            scale = taken(tensors, name, key)
            weights[key] = FloatCodes(tuple(tensor.shape), partial(scaled, key, tensor, scale, block), (tensor,))
        elif not key.endswith(_SCALES):
            weights[key] = tensor
    return weights


def scaled(name: str, codes: Tensor, scale: Tensor, block: tuple[int, int] | None) -> Tensor:
    """Codes `[..., out, in]` times their scales, in float32.

    Args:
        name: of the weight, for messages.
        codes: floats of 8 bits.
        scale: one number, or `[..., out, 1]`, `[..., out]`, or `[..., ceil(out / rows), ceil(in / columns)]`.
        block: (rows, columns) of a block; None: 128 of each.

    Raises:
        ModelError: the scales are of another shape, or not finite.
    """
    out, width = codes.shape[-2:]
    rows, columns = block or (128, 128)
    wide = scale.float()
    if not wide.isfinite().all():
        raise ModelError(f"the scales of {name} have a number that is not finite")
    plain = codes.float()
    if wide.numel() == 1:
        return plain.mul_(wide.reshape(()))
    if wide.shape in (codes.shape[:-1], (*codes.shape[:-1], 1)):
        return plain.mul_(wide.reshape(*codes.shape[:-1], 1))
    if wide.shape != (*codes.shape[:-2], -(-out // rows), -(-width // columns)):
        found, of = list(scale.shape), list(codes.shape)
        raise ModelError(f"the scales of {name} are {found}; its shape is {of}, its blocks {rows} x {columns}")
    wide = wide.repeat_interleave(rows, -2)[..., :out, :].repeat_interleave(columns, -1)[..., :width]
    return plain.mul_(wide)
