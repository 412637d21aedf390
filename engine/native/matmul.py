"""Matrices packed for our C (`matmul.h`): int8 in integers, bfloat16 and float32 in float sums. Knows numbers alone."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.native.compiled import library

PANEL = 64  # outputs
_BITS = {torch.int8: 8, torch.bfloat16: 16, torch.float32: 32}
_ALIGNED = 16  # inputs: a whole number of vectors


class Matrix(ctypes.Structure):
    """`Matrix` of matmul.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("panels", "scale", "offset", "bias")),
        *((name, ctypes.c_int64) for name in ("inputs", "outputs", "bits")),
    )


class _Product(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("rows", "step", "out")),
        ("count", ctypes.c_int64),
        ("bits", ctypes.c_int),
        ("add", ctypes.c_int),
    )


@cache
def multiplies(dtype: torch.dtype) -> bool:
    """Whether there is compiled code for weights of this type, and a processor that makes it worth having."""
    native = library()
    return native is not None and dtype in _BITS and bool(native.pilotfish_multiplies(_BITS[dtype]))


class PackedMatrix:
    """A matrix `[out, in]` in panels. Where it was packed it stays: copies share it.

    A row's product is the same bits alone or in any batch, on any number of threads.
    """

    def __init__(self, weight: Tensor, scale: Tensor | None = None, bias: Tensor | None = None) -> None:
        """`scale` `[out]` is what a step of an int8 weight is worth; `bias` `[out]` is float32."""
        self.out_features, self.in_features = weight.shape
        assert not self.in_features % _ALIGNED, f"{self.in_features} inputs are no whole number of vectors"
        self.dtype = weight.dtype
        self._panels = _panels(weight)
        self._scale, self._bias = (None if x is None else _padded(x) for x in (scale, bias))
        self._offset = None if scale is None else _padded(_offsets(weight))
        self.matrix = Matrix(
            *(None if x is None else x.data_ptr() for x in (self._panels, self._scale, self._offset, self._bias)),
            self.in_features, self.out_features, _BITS[weight.dtype],
        )  # fmt: skip

    def __deepcopy__(self, _memo: dict[int, Any]) -> PackedMatrix:
        return self

    @property
    def nbytes(self) -> int:
        """Of the weights."""
        return self._panels.nbytes

    def multiply(self, rows: Tensor, step: Tensor | None, dtype: torch.dtype) -> Tensor:
        """`[M, in]` in the weights' type, for int8 uint8 around 128 worth `step` `[M, 1]` each -> `[M, out]`."""
        native = library()
        assert native is not None
        assert rows.is_contiguous(), "rows lie apart"
        out = torch.empty(len(rows), self.out_features, dtype=dtype)
        at = None if step is None else step.data_ptr()
        product = _Product(rows.data_ptr(), at, out.data_ptr(), len(rows), _BITS[dtype], 0)
        native.pilotfish_multiply(ctypes.byref(self.matrix), ctypes.byref(product), torch.get_num_threads())
        return out


def _panels(weight: Tensor) -> Tensor:
    """`[out, in]` -> `[out / 64, in / G, 64, G]`, G numbers in 4 bytes; panel by panel, to need no second copy."""
    outputs, inputs = weight.shape
    group = 4 // weight.element_size()
    packed = torch.zeros(-(-outputs // PANEL), inputs // group, PANEL, group, dtype=weight.dtype)
    for panel, part in zip(packed, weight.split(PANEL), strict=True):
        panel[:, : len(part)] = part.unflatten(1, (-1, group)).transpose(0, 1)
    return packed


def _offsets(weight: Tensor) -> Tensor:
    """What rows around 128 add to the sums of each output."""
    sums = [part.sum(1, dtype=torch.int32) for part in weight.split(4096)]
    return torch.cat(sums).mul_(128)


def _padded(x: Tensor) -> Tensor:
    return F.pad(x, (0, -len(x) % PANEL)).contiguous()
