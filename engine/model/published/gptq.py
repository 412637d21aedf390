"""GPTQ (Frantar et al. 2022) as of AutoGPTQ and GPTQModel, and AWQ (Lin et al. 2023) in AutoAWQ's layout `gemm`.

Of a matrix both have `qweight` and `qzeros`, int32 words of codes and zero points from the low bits upwards, and
`scales` `[groups, out]`.

GPTQ: `qweight` `[in * bits / 32, out]` has consecutive inputs in a word, `qzeros` `[groups, out * bits / 32]`
consecutive outputs, and `g_idx` int32 `[in]` is the group of each input. In version 1 every zero point is stored minus
one; this was subtracted from whole words, so that a zero point of 0 borrows from the next one.

AWQ: `qweight` `[in, out / 8]` and `qzeros` `[groups, out / 8]` have eight consecutive outputs in a word, in the order
0, 2, 4, 6, 1, 3, 5, 7.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pilotfish.engine.errors import ModelError
from pilotfish.engine.machine.mapped import release_mapped
from pilotfish.engine.model.published.base import (
    Codes,
    Weights,
    expect,
    in_words,
    integers,
    taken,
    unpacked,
    with_codes,
    words_of,
)
from pilotfish.engine.native.weights import GroupedCodes

_KINDS = ("qweight", "qzeros", "scales", "g_idx")
_ACTIVATION = ".act.scales"
_VERSION_1, _VERSION_2 = "gptq", "gptq_v2"
_WORD = 32  # bits
_ONES = {4: 0x11111111, 8: 0x01010101}  # a word of ones
_PLACES = [0, 4, 1, 5, 2, 6, 3, 7]  # positions of consecutive outputs in an AWQ word


def check(settings: Mapping[str, Any]) -> None:
    """Raise ModelError for an unsupported variant of GPTQ."""
    bits, layout = settings.get("bits"), _layout(settings)
    if bits not in (4, 8):
        raise ModelError(f"GPTQ with bits {bits}; supported: 4, 8")
    if layout not in (_VERSION_1, _VERSION_2) or settings.get("is_marlin_format"):
        found = "marlin" if settings.get("is_marlin_format") else layout
        raise ModelError(f"GPTQ layout {found}; supported: {_VERSION_1}, {_VERSION_2}")


def check_awq(settings: Mapping[str, Any]) -> None:
    """Raise ModelError for an unsupported variant of AWQ."""
    bits, layout = settings.get("bits", 4), str(settings.get("version") or settings.get("format") or "gemm").lower()
    if bits != 4:
        raise ModelError(f"AWQ with bits {bits}; supported: 4")
    if layout != "gemm":
        raise ModelError(f"AWQ layout {layout}; supported: gemm")


def read(settings: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Weights:
    """GPTQ weights by the names of a float checkpoint. Raises ModelError if a tensor is missing or inconsistent."""
    return with_codes(tensors, _KINDS, lambda kind, _: kind == "qweight", partial(_matrix, settings, tensors))


def read_awq(_settings: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Weights:
    """AWQ weights, as `read`. Raises ModelError also if activations are scaled."""
    scaled = next((key for key in tensors if key.endswith(_ACTIVATION)), None)
    if scaled is not None:
        raise ModelError(f"AWQ with {scaled}; scaled activations are not supported")
    return with_codes(tensors, _KINDS[:3], lambda kind, _: kind == "qweight", partial(_awq_matrix, tensors))


def _layout(settings: Mapping[str, Any]) -> str:
    return str(settings.get("checkpoint_format") or settings.get("format") or _VERSION_1)


def _parts(tensors: Mapping[str, Tensor], path: str, bits: int, out: int) -> tuple[Tensor, Tensor]:
    """Zero points, in words, and scales of a matrix."""
    zeros, scales = (taken(tensors, f"{path}.{kind}", f"{path}.qweight") for kind in ("qzeros", "scales"))
    expect(f"{path}.scales", scales, (len(scales), out))
    return expect(f"{path}.qzeros", zeros, (len(scales), out * bits // _WORD), torch.int32), scales


def _matrix(settings: Mapping[str, Any], tensors: Mapping[str, Tensor], path: str) -> Codes:
    codes, bits, index = words_of(tensors, f"{path}.qweight"), int(settings["bits"]), tensors.get(f"{path}.g_idx")
    # With an index the bits follow from the shapes; GPTQModel may use other bits for single matrices.
    words, out = codes.shape
    width = words * _WORD // bits if index is None else len(index)
    bits = words * _WORD // max(1, width)
    if bits not in (4, 8) or words * _WORD != width * bits:
        raise ModelError(f"{path}.qweight has {words} words for {width} inputs; expected 4 or 8 bits per input")
    zeros, scales = _parts(tensors, path, bits, out)
    less = _ONES[bits] if _layout(settings) == _VERSION_1 else 0

    def grouped() -> GroupedCodes:
        zero = unpacked(zeros + less, bits).t()
        is_symmetric = bool((zero == 1 << (bits - 1)).all())
        along = codes.t().contiguous()
        release_mapped(codes)
        return in_words(along, bits, scales.t(), None if is_symmetric else zero, index, f"{path}.g_idx")

    return integers(f"{path}.weight", (out, width), bits, scales, grouped, has_zero=not settings.get("sym", True))


def _awq_matrix(tensors: Mapping[str, Tensor], path: str) -> Codes:
    codes = words_of(tensors, f"{path}.qweight")
    width, out = codes.shape[0], 8 * codes.shape[1]
    zeros, scales = _parts(tensors, path, 4, out)

    def grouped() -> GroupedCodes:
        words = codes.t().contiguous()
        release_mapped(codes)
        packed = torch.empty(len(words), 8, width // 2, dtype=torch.uint8)
        for output, place in enumerate(_PLACES):  # one output of all words at a time: the fastest of several ways
            low, high = (words[:, i::2] >> 4 * place & 15 for i in (0, 1))
            packed[:, output] = low | high << 4
        zero = unpacked(zeros, 4).unflatten(1, (-1, 8))[..., _PLACES].flatten(1).t().contiguous()
        return GroupedCodes(packed.flatten(0, 1), 4, scales.t().contiguous(), None, zeros=zero)

    return integers(f"{path}.weight", (out, width), 4, scales, grouped, has_zero=True)
