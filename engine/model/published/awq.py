"""AWQ (Lin et al. 2023) in the layout `gemm` of AutoAWQ. Knows tensors; knows no file.

Of a matrix there are `qweight` int32 `[in, out / 8]`, `qzeros` int32 `[groups, out / 8]` and `scales` `[groups, out]`.
A word contains eight consecutive outputs, from its low bits upwards in the order 0, 2, 4, 6, 1, 3, 5, 7.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from engine.errors import ModelError
from engine.model.published.base import CodeParts, IntegerCodes, Weights, expect, taken, unpack4, with_codes

_KINDS = ("qweight", "qzeros", "scales")
_CODES, _ACTIVATION = ".qweight", ".act.scales"
_IN_A_WORD = 8  # codes
_PLACES = [0, 4, 1, 5, 2, 6, 3, 7]  # where the consecutive outputs of a word are


def check(settings: Mapping[str, Any]) -> None:
    """Raise ModelError for a variant that is not read."""
    bits, layout = settings.get("bits", 4), str(settings.get("version") or settings.get("format") or "gemm").lower()
    if bits != 4:
        raise ModelError(f"AWQ with bits {bits}; Pilotfish reads 4")
    if layout != "gemm":
        raise ModelError(f"AWQ in the layout {layout}; Pilotfish reads gemm")


def read(_settings: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Weights:
    """The weights of a checkpoint, by the names of a float checkpoint.

    Raises:
        ModelError: a tensor is missing, or of another shape or type, or the model scales activations too.
    """
    scaled = next((key for key in tensors if key.endswith(_ACTIVATION)), None)
    if scaled is not None:
        raise ModelError(f"AWQ with {scaled}: it scales activations, which the model's class does not")
    return with_codes(tensors, _KINDS, lambda kind, _: kind == "qweight", partial(_matrix, tensors))


def _matrix(tensors: Mapping[str, Tensor], path: str) -> IntegerCodes:
    codes = tensors[path + _CODES]
    zeros, scales = (taken(tensors, f"{path}.{kind}", path + _CODES) for kind in ("qzeros", "scales"))
    if codes.ndim != 2 or codes.dtype != torch.int32:
        raise ModelError(f"{path}{_CODES} is {codes.dtype} {list(codes.shape)}; expected int32 of two dimensions")
    groups, out = scales.shape[0], codes.shape[1] * _IN_A_WORD
    expect(f"{path}.scales", scales, (groups, out))
    expect(f"{path}.qzeros", zeros, (groups, codes.shape[1]), torch.int32)
    return IntegerCodes(
        name=f"{path}.weight",
        shape=(out, codes.shape[0]),
        bits=4,
        groups=groups,
        scale_type=scales.dtype,
        has_zero=True,
        read=partial(_parts, codes, zeros, scales),
        sources=(codes,),
    )


def _parts(codes: Tensor, zeros: Tensor, scales: Tensor) -> CodeParts:
    words = codes.t().contiguous()
    packed = torch.empty(len(words), _IN_A_WORD, words.shape[1] // 2, dtype=torch.uint8)
    for output, place in enumerate(_PLACES):  # one output of all words at a time: the fastest of several ways
        low, high = (words[:, i::2] >> 4 * place & 15 for i in (0, 1))
        packed[:, output] = low | high << 4
    return CodeParts(packed.flatten(0, 1), scales.t().contiguous(), _zero_points(zeros).t().int().contiguous())


def _zero_points(words: Tensor) -> Tensor:
    """int32 `[groups, out / 8]` -> uint8 `[groups, out]`, the outputs in their own order."""
    found: Tensor = unpack4(words.contiguous().view(torch.uint8)).unflatten(1, (-1, _IN_A_WORD))
    return found[..., _PLACES].flatten(1)
