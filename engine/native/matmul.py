"""Matrices packed for our C (`matmul.h`): integers of 4 to 8 bits, bfloat16 and float32."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence as Seq
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from pilotfish.engine.machine.threads import pool_threads
from pilotfish.engine.native.compiled import fields, function, library
from pilotfish.engine.native.weights import ALIGNED, GroupedCodes, Groups, StoredCodes, panels_of, panels_of_groups

_OUT_BITS = {torch.bfloat16: 16, torch.float32: 32}
_TYPES = frozenset((torch.uint8, torch.int8, *_OUT_BITS))  # of codes, and of float weights


class Matrix(ctypes.Structure):
    """`Matrix` of matmul.h."""

    _fields_ = (
        *fields("p", "panels bias"),
        *fields("n", "inputs outputs bits"),
        ("groups", Groups),
        *fields("p", "order"),
    )


class _Product(ctypes.Structure):
    _fields_ = (*fields("p", "rows step out"), *fields("n", "stride count"), *fields("i", "bits add"))


@cache
def multiplies(dtype: torch.dtype) -> bool:
    """Whether there is compiled code for weights of this type."""
    return library() is not None and dtype in _TYPES


@cache
def panel() -> int:
    """The number of outputs per panel on this processor."""
    return function("panel")()


@cache
def codes_from() -> int:
    """The offset added to 8-bit codes when they are packed for this processor."""
    return function("codes_from")()


class PackedMatrix:
    """A matrix `[out, in]` in panels. A copy is the same object, because the packed memory must not move.

    A row's product has the same bits in any batch and on any number of threads.
    """

    def __init__(
        self, dtype: torch.dtype, shape: tuple[int, int], bits: int, panels: Tensor, bias: Tensor | None
    ) -> None:
        """Take the fields of matmul.h, which `of` and `of_groups` compute."""
        self.dtype, (self.out_features, self.in_features), self._panels = dtype, shape, panels
        # C holds the addresses of these tensors, so they must stay alive.
        padded = None if bias is None else F.pad(bias, (0, -len(bias) % panel())).contiguous()
        self._held: tuple[Tensor | None, ...] = panels, padded
        addresses = (None if x is None else x.data_ptr() for x in self._held)
        self.matrix = Matrix(*addresses, self.in_features, self.out_features, bits)

    @classmethod
    def of(cls, weight: Tensor | Seq[Tensor], bias: Tensor | None = None) -> PackedMatrix:
        """Pack a float matrix, or several stacked along the outputs; `bias` `[out]` is float32."""
        parts = [weight] if isinstance(weight, Tensor) else weight
        outputs, inputs = sum(map(len, parts)), parts[0].shape[1]
        assert not inputs % ALIGNED, f"{inputs} inputs; expected a multiple of {ALIGNED}"
        dtype = parts[0].dtype
        return cls(dtype, (outputs, inputs), 8 * dtype.itemsize, panels_of(parts, panel()), bias)

    @classmethod
    def of_groups(cls, codes: GroupedCodes, parts: Seq[Tensor | StoredCodes] | None = None) -> PackedMatrix:
        """Pack grouped codes; `parts`: the codes of several matrices instead of its own."""
        panels, groups = panels_of_groups(codes, parts or [codes.codes], panel(), codes_from())
        bias = None if codes.bias is None else codes.bias.detach().float()
        made = cls(codes.codes.dtype, (len(codes.scale), codes.in_features), codes.bits, panels, bias)
        made.matrix.groups = groups
        if codes.order is not None:
            order = codes.order.contiguous()
            made.matrix.order, made._held = order.data_ptr(), (*made._held, order)
        return made

    def __deepcopy__(self, _memo: dict[int, Any]) -> PackedMatrix:
        return self

    @property
    def nbytes(self) -> int:
        return self._panels.nbytes

    def multiply(self, rows: Tensor, step: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Multiply rows `[M, in]` -> `[M, out]` in `dtype`.

        Rows have the type of the weights. For codes they are int16, in units of `step` `[M, 1]` (`Rows.round`).
        """
        out = torch.empty(len(rows), self.out_features, dtype=dtype)
        _multiply(self.matrix, 1, rows, step, out)
        return out

    @property
    def form(self) -> tuple[object, ...]:
        """The properties that determine the input form and the panel size."""
        return self.dtype, bytes(self.matrix.groups), self.in_features, self.out_features


class PackedMatrices:
    """Float matrices of one form, each with its own rows, multiplied in one call. A copy is the same object."""

    def __init__(self, parts: Seq[PackedMatrix]) -> None:
        assert len({part.form for part in parts}) == 1, "matrices of different forms"
        self._parts = tuple(parts)  # kept alive, because C holds their addresses
        self._matrices = (Matrix * len(parts))(*(part.matrix for part in parts))

    def __deepcopy__(self, _memo: dict[int, Any]) -> PackedMatrices:
        return self

    def multiply(self, rows: Tensor) -> Tensor:
        """Multiply rows `[n, M, in]` by the n matrices -> `[n, M, out]`, all in one type."""
        out = rows.new_empty(*rows.shape[:2], self._parts[0].out_features)
        _multiply(self._matrices, len(self._parts), rows, None, out)
        return out


def _multiply(
    matrices: ctypes.Structure | ctypes.Array[Any], count: int, rows: Tensor, step: Tensor | None, out: Tensor
) -> None:
    assert rows.is_contiguous(), "rows are not contiguous"
    at = None if step is None else step.data_ptr()
    product = _Product(rows.data_ptr(), at, out.data_ptr(), out.shape[-1], out.shape[-2], _OUT_BITS[out.dtype], 0)
    if function("multiply")(ctypes.byref(matrices), count, ctypes.byref(product), pool_threads()):
        raise MemoryError("matmul kernel: out of memory")
