"""compressed-tensors, the format of llm-compressor: 4- or 8-bit integers, and 8-bit floats.

Of a matrix, `pack-quantized` has `weight_packed` int32 `[out, in * bits / 32]`, with the codes of consecutive inputs
from the low bits of a word upwards, each plus half their range; `weight_scale` `[out, groups]`; perhaps
`weight_zero_point` int32 `[out * bits / 32, groups]`, packed likewise along the outputs; perhaps `weight_g_idx` `[in]`,
the group of each input; and `weight_shape`. The other formats store a code in each element of `weight`, and zero points
as they are.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pilotfish.engine.errors import ModelError
from pilotfish.engine.model.published.base import (
    Codes,
    Weights,
    expect,
    in_groups,
    in_words,
    integers,
    taken,
    unpacked,
    with_codes,
    words_of,
)
from pilotfish.engine.model.published.floats import FP8, scaled
from pilotfish.engine.native.weights import GroupedCodes

_FORMATS = ("dense", "pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "mixed-precision")
_PACKED, _SCALE, _ZERO, _INDEX, _SHAPE = (
    "weight_packed",
    "weight_scale",
    "weight_zero_point",
    "weight_g_idx",
    "weight_shape",
)
_KINDS = ("weight", _PACKED, _SCALE, _ZERO, _INDEX, _SHAPE)
_WORD = 32  # bits


def check(settings: Mapping[str, Any]) -> None:
    """Raise ModelError for an unsupported variant."""
    groups = list(_groups(settings))
    for found in (settings.get("format"), *(group.get("format") for group in groups)):
        if found is not None and found not in _FORMATS:
            raise ModelError(f"compressed-tensors format {found}; supported: {', '.join(_FORMATS[1:])}")
    for name in ("sparsity_config", "transform_config"):
        part = settings.get(name) or {}
        if part.get("format", "dense") != "dense" or part.get("config_groups"):
            raise ModelError(f"compressed-tensors with {name}; supported: dense weights without transforms")
    for group in groups:
        weights = group.get("weights") or {"type": "int", "num_bits": 8}
        kind = weights.get("type", "int"), weights.get("num_bits")
        if kind not in (("int", 4), ("int", 8), ("float", 8)):
            raise ModelError(
                f"compressed-tensors with {kind[0]} weights of {kind[1]} bits; supported: int 4, int 8, float 8"
            )


def has_integers(settings: Mapping[str, Any]) -> bool:
    """Whether there are integer weights."""
    return any((group.get("weights") or {}).get("type", "int") == "int" for group in _groups(settings))


def _groups(settings: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    for group in (settings.get("config_groups") or {}).values():
        if not isinstance(group, dict):
            raise ModelError(f"compressed-tensors with config_groups {group!r}; expected an object")
        yield group


def read(settings: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Weights:
    """Weights by the names of a float checkpoint. Raises ModelError if a tensor is missing or inconsistent."""
    return with_codes(tensors, _KINDS, _holds_codes, partial(_matrix, settings, tensors))


def _holds_codes(kind: str, tensor: Tensor) -> bool:
    return kind == _PACKED or (kind == "weight" and tensor.dtype in (torch.int8, *FP8))


def _matrix(settings: Mapping[str, Any], tensors: Mapping[str, Tensor], path: str) -> Codes:
    is_packed = f"{path}.{_PACKED}" in tensors
    return _packed(path, _bits(settings, path), tensors) if is_packed else _plain(path, tensors)


def _bits(settings: Mapping[str, Any], path: str) -> int:
    """Bits of a module's codes: those of the group whose targets match the module, or else its class."""
    by_class: list[int] = []
    for group in _groups(settings):
        bits = int((group.get("weights") or {}).get("num_bits", 4))
        for target in group.get("targets", ()):
            if re.match(target[3:], path) if target.startswith("re:") else target == path:
                return bits
            by_class += [bits] * target.isidentifier()
    return by_class[0] if by_class else 4


def _packed(path: str, bits: int, tensors: Mapping[str, Tensor]) -> Codes:
    codes = words_of(tensors, f"{path}.{_PACKED}")
    zero, index, shape = (tensors.get(f"{path}.{kind}") for kind in (_ZERO, _INDEX, _SHAPE))
    out, width = len(codes), codes.shape[1] * _WORD // bits
    if shape is not None and not shape.is_meta and shape.tolist() != [out, width]:
        raise ModelError(f"{path}.{_SHAPE} is {shape.tolist()}; {_PACKED} has {[out, width]} codes of {bits} bits")
    scale = _scale_of(tensors, path, _PACKED, out)
    if zero is not None:
        expect(f"{path}.{_ZERO}", zero, (-(-out * bits // _WORD), scale.shape[1]), torch.int32)

    def grouped() -> GroupedCodes:
        zeros = None if zero is None else unpacked(zero.t(), bits)[:, :out].t()
        return in_words(codes, bits, scale, zeros, index, f"{path}.{_INDEX}")

    return integers(f"{path}.weight", (out, width), bits, scale, grouped, has_zero=zero is not None)


def _scale_of(tensors: Mapping[str, Tensor], path: str, beside: str, out: int) -> Tensor:
    """The scales as `[out, groups]`; the checkpoint may have one for the whole matrix."""
    scale = taken(tensors, f"{path}.{_SCALE}", f"{path}.{beside}")
    wide = scale.reshape(1, 1).expand(out, 1) if scale.numel() == 1 else scale
    return expect(f"{path}.{_SCALE}", wide, (out, wide.shape[-1] if wide.ndim > 1 else 1))


def _plain(path: str, tensors: Mapping[str, Tensor]) -> Codes:
    """A matrix of one code in each element."""
    codes = tensors[f"{path}.weight"]
    if codes.dtype in FP8:
        scale = taken(tensors, f"{path}.{_SCALE}", f"{path}.weight")
        return Codes(tuple(codes.shape), partial(scaled, f"{path}.weight", codes, scale, None))
    if codes.ndim != 2:
        raise ModelError(f"{path}.weight is int8 {list(codes.shape)}; expected two dimensions")
    scale = _scale_of(tensors, path, "weight", len(codes))
    zero, index = tensors.get(f"{path}.{_ZERO}"), tensors.get(f"{path}.{_INDEX}")

    def grouped() -> GroupedCodes:
        order = None if index is None else in_groups(index, scale.shape[1], f"{path}.{_INDEX}")
        zeros = None
        if zero is not None and zero.any():
            zeros = zero.to(torch.int8)
            if not torch.equal(zeros, zero):
                raise ModelError(f"{path}.{_ZERO} has values outside of int8")
            zeros = zeros.reshape(-1, zero.shape[-1]).expand(scale.shape).contiguous()
        each = codes if order is None else codes[:, order]
        return GroupedCodes(each, 8, scale.contiguous(), None, order, zeros=zeros)

    return integers(f"{path}.weight", (len(codes), codes.shape[1]), 8, scale, grouped, has_zero=zero is not None)
