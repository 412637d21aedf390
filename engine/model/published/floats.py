"""Weights in small floats with scales, which are dequantised because no kernel here multiplies them exactly.

8-bit floats have a scale per tensor, per output, or per block of 128 x 128. `fp8` is the format of DeepSeek and Qwen,
`fbgemm_fp8` that of Llama 3.1 405B. Beside `X` there is `X_scale_inv` or `X_scale`; both multiply the weight, despite
the first one's name. `X` may be fused experts.

MXFP4 (OCP microscaling, 2023) is the format of gpt-oss: 4-bit floats, 32 per power-of-two scale, experts fused.
Beside `X_blocks` uint8 `[experts, out, in / 32, 16]` there is `X_scales` uint8 `[experts, out, in / 32]`, exponents
plus 127. The float weight `X` is `[experts, in, out]`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pilotfish.engine.errors import ModelError
from pilotfish.engine.machine.mapped import release_mapped
from pilotfish.engine.model.published.base import Codes, Weights, expect, fused, taken
from pilotfish.engine.native.weights import unpack4

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_OF_FP8 = ("_scale_inv", "_scale")
_BLOCKS, _SCALES = "_blocks", "_scales"
_POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_LEVELS = torch.tensor([*_POSITIVE, *(-level for level in _POSITIVE)])


def check_fp8(settings: Mapping[str, Any]) -> None:
    """Raise ModelError for an unsupported variant."""
    found = settings.get("fmt", "e4m3")
    if found not in ("e4m3", "e5m2"):
        raise ModelError(f"FP8 format {found}; supported: e4m3, e5m2")


def read_fp8(settings: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Weights:
    """Weights by the names of a float checkpoint. Raises ModelError if a scale is missing or does not fit."""
    block = settings.get("weight_block_size")
    weights: Weights = {}
    for key, tensor in tensors.items():
        if tensor.dtype in FP8:
            name = next((key + end for end in _OF_FP8 if key + end in tensors), key + _OF_FP8[0])
            scale = taken(tensors, name, key)
            weights[key] = Codes(tuple(tensor.shape), partial(scaled, key, tensor, scale, block))
        elif not key.endswith(_OF_FP8):
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
        ModelError: the scales have another shape, or are not finite.
    """
    out, width = codes.shape[-2:]
    rows, columns = block or (128, 128)
    wide = scale.float()
    if not wide.isfinite().all():
        raise ModelError(f"the scales of {name} have NaN or infinite values")
    plain = codes.float()
    release_mapped(codes)
    if wide.numel() == 1:
        return plain.mul_(wide.reshape(()))
    if wide.shape in (codes.shape[:-1], (*codes.shape[:-1], 1)):
        return plain.mul_(wide.reshape(*codes.shape[:-1], 1))
    if wide.shape != (*codes.shape[:-2], -(-out // rows), -(-width // columns)):
        found, of = list(scale.shape), list(codes.shape)
        raise ModelError(f"the scales of {name} have shape {found}; expected one per {rows} x {columns} block of {of}")
    wide = wide.repeat_interleave(rows, -2)[..., :out, :].repeat_interleave(columns, -1)[..., :width]
    return plain.mul_(wide)


def read_mxfp4(_settings: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Weights:
    """Weights by the names of a float checkpoint. Raises ModelError if a tensor is missing or does not fit."""
    weights: Weights = {}
    for key, tensor in tensors.items():
        stem = key.removesuffix(_BLOCKS).removesuffix(_SCALES)
        if key == stem + _BLOCKS:
            weights[stem] = _experts(stem, tensor, taken(tensors, stem + _SCALES, key))
        elif key != stem + _SCALES or stem + _BLOCKS not in tensors:
            weights[key] = tensor
    return weights


def _experts(name: str, blocks: Tensor, scales: Tensor) -> Codes:
    if blocks.ndim != 4 or blocks.dtype != torch.uint8:
        raise ModelError(f"{name}{_BLOCKS} is {blocks.dtype} {list(blocks.shape)}; expected uint8 of four dimensions")
    experts, out, groups, half = blocks.shape
    expect(name + _SCALES, scales, (experts, out, groups), torch.uint8)
    pairs, shape = zip(blocks, scales, strict=True), (out, groups * half * 2)
    return fused([Codes(shape, partial(_expert, *pair)) for pair in pairs], transposed=True)


def _expert(blocks: Tensor, scales: Tensor) -> Tensor:
    """The matrix `[out, in]` of an expert; the low nibble of each byte comes first."""
    floats = _LEVELS[unpack4(blocks).int()]
    release_mapped(blocks)
    return torch.ldexp(floats, scales.int()[..., None] - 127).flatten(1)
