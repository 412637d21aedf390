"""GPTQ (Frantar et al. 2022) as AutoGPTQ and GPTQModel write it. Knows tensors; knows no file.

Of a matrix there are `qweight` int32 `[in * bits / 32, out]`, with the codes of consecutive inputs from the low bits of
a word upwards; `scales` `[groups, out]`; `qzeros` int32 `[groups, out * bits / 32]`, with the zero points of
consecutive outputs; and `g_idx` int32 `[in]`, the group of each input. In version 1 every zero point is less by one;
this was subtracted from whole words, so that a zero point of 0 borrows from its neighbour.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from engine.errors import ModelError
from engine.model.published.base import (
    CodeParts,
    IntegerCodes,
    Weights,
    expect,
    in_groups,
    pack4,
    signed8,
    taken,
    unpack4,
    with_codes,
)

_KINDS = ("qweight", "qzeros", "scales", "g_idx")
_CODES = ".qweight"
_VERSION_1, _VERSION_2 = "gptq", "gptq_v2"
_WORD = 32  # bits
_ONES = {4: 0x11111111, 8: 0x01010101}  # a word of ones


def check(settings: Mapping[str, Any]) -> None:
    """Raise ModelError for a variant that is not read."""
    bits, layout = settings.get("bits"), _layout(settings)
    if bits not in (4, 8):
        raise ModelError(f"GPTQ with bits {bits}; Pilotfish reads 4 and 8")
    if layout not in (_VERSION_1, _VERSION_2) or settings.get("is_marlin_format"):
        found = "marlin" if settings.get("is_marlin_format") else layout
        raise ModelError(f"GPTQ in the layout {found}; Pilotfish reads {_VERSION_1} and {_VERSION_2}")


def read(settings: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Weights:
    """The weights of a checkpoint, by the names of a float checkpoint.

    Raises:
        ModelError: a tensor is missing, or of another shape or type.
    """
    return with_codes(tensors, _KINDS, lambda kind, _: kind == "qweight", partial(_matrix, settings, tensors))


def _layout(settings: Mapping[str, Any]) -> str:
    return str(settings.get("checkpoint_format") or settings.get("format") or _VERSION_1)


def _matrix(settings: Mapping[str, Any], tensors: Mapping[str, Tensor], path: str) -> IntegerCodes:
    codes, bits = tensors[path + _CODES], int(settings["bits"])
    zeros, scales = (taken(tensors, f"{path}.{kind}", path + _CODES) for kind in ("qzeros", "scales"))
    index = tensors.get(f"{path}.g_idx")
    if codes.ndim != 2 or codes.dtype != torch.int32:
        raise ModelError(f"{path}{_CODES} is {codes.dtype} {list(codes.shape)}; expected int32 of two dimensions")
    # With an index the bits are known from the shapes; GPTQModel may give single matrices other bits than the rest.
    width = codes.shape[0] * _WORD // bits if index is None else len(index)
    bits = codes.shape[0] * _WORD // max(1, width)
    if bits not in (4, 8) or codes.shape[0] * _WORD != width * bits:
        raise ModelError(f"{path}{_CODES} has {codes.shape[0]} words for {width} inputs; expected 4 or 8 bits for each")
    groups, out = scales.shape[0], codes.shape[1]
    less = _ONES[bits] if _layout(settings) == _VERSION_1 else 0
    expect(f"{path}.scales", scales, (groups, out))
    expect(f"{path}.qzeros", zeros, (groups, out * bits // _WORD), torch.int32)
    return IntegerCodes(
        name=f"{path}.weight",
        shape=(out, width),
        bits=bits,
        groups=groups,
        scale_type=scales.dtype,
        has_zero=not settings.get("sym", True),
        read=partial(_parts, path, bits, codes, zeros, scales, index, less),
        sources=(codes,),
    )


def _parts(
    path: str, bits: int, codes: Tensor, zeros: Tensor, scales: Tensor, index: Tensor | None, stored_less: int
) -> CodeParts:
    zero = _unpacked(zeros + stored_less, bits).t().int()
    order = None if index is None else in_groups(index, len(scales), f"{path}.g_idx")
    packed = codes.t().contiguous().view(torch.uint8)
    if order is not None:
        columns = _unpacked(packed, bits)[:, order]
        packed = columns if bits == 8 else pack4(columns)
    is_symmetric = bool((zero == 1 << (bits - 1)).all())
    if bits == 8:
        packed, zero = signed8(packed), zero - 128
    return CodeParts(packed, scales.t().contiguous(), None if is_symmetric else zero.contiguous(), order)


def _unpacked(packed: Tensor, bits: int) -> Tensor:
    """`[n, words]` -> uint8 `[n, numbers]`."""
    flat = packed.contiguous().view(torch.uint8)
    return unpack4(flat) if bits == 4 else flat
