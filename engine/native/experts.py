"""All experts of a mixture in one call of our C (`experts.c`)."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence as Seq
from dataclasses import astuple, dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from pilotfish.engine.machine.threads import pool_threads
from pilotfish.engine.native.compiled import BITS, fields, function
from pilotfish.engine.native.matmul import Matrix, PackedMatrix
from pilotfish.engine.native.weights import ALIGNED


@dataclass(frozen=True, slots=True)
class ExpertGate:
    """The elementwise operation between the two matrices of an expert.

    x * logistic(linear * x + cubic * x^3) * (up + plus), where x is the gate, clamped to at most `limit`, and `up` is
    clamped to -limit .. limit. The default is SiLU; other values give GELU's tanh approximation (Hendrycks and Gimpel
    2016: 1 + tanh(z) = 2 logistic(2 z)), or the gate of gpt-oss.

    Attributes:
        linear: see above.
        cubic: see above.
        limit: see above.
        plus: see above.
        squared: max(x, 0)^2 instead of x * logistic(...).
        ungated: without `up` and its factor.
        interleaved: gate and up alternate in a row; else all of up follows all of the gate.
    """

    linear: float = 1.0
    cubic: float = 0.0
    limit: float = math.inf
    plus: float = 0.0
    squared: bool = False
    ungated: bool = False
    interleaved: bool = False

    def __call__(self, both: Tensor) -> Tensor:
        """Compute it in torch: `[..., n]` if `ungated`, else `[..., 2 n]` -> `[..., n]`, float32 inside."""
        wide = both.float()
        if self.ungated:
            return self._activated(wide).to(both.dtype)
        gate, up = (wide[..., ::2], wide[..., 1::2]) if self.interleaved else wide.chunk(2, -1)
        return (self._activated(gate) * (up.clamp(-self.limit, self.limit) + self.plus)).to(both.dtype)

    def _activated(self, gate: Tensor) -> Tensor:
        x = gate.clamp(max=self.limit)
        return F.relu(x).square() if self.squared else x * torch.sigmoid(self.linear * x + self.cubic * x**3)


class _Gate(ctypes.Structure):
    _fields_ = (*fields("f", "linear cubic limit plus"), *fields("i", "squared ungated interleaved"))


class _Experts(ctypes.Structure):
    _fields_ = (*fields("p", "up down"), *fields("n", "experts"), ("gate", _Gate))


class _Batch(ctypes.Structure):
    _fields_ = (*fields("p", "rows chosen weights out"), *fields("n", "count each"), *fields("i", "bits"))


class ExpertMatrices:
    """The packed matrices of all experts of a mixture, ready to run. A copy is the same object."""

    def __init__(self, ups: Seq[PackedMatrix], downs: Seq[PackedMatrix], gate: ExpertGate) -> None:
        """Take, for every expert, the matrices before and after the gate; see `fits`."""
        assert self.fits(ups, downs, gate), "matrices of different forms"
        self._parts = tuple(ups), tuple(downs)  # kept alive, because C holds their addresses
        self._up, self._down = ((Matrix * len(parts))(*(part.matrix for part in parts)) for parts in self._parts)
        c_gate = _Gate(*astuple(gate))
        self._experts = _Experts(ctypes.addressof(self._up), ctypes.addressof(self._down), len(ups), c_gate)
        self.in_features, self.out_features = ups[0].in_features, downs[0].out_features

    @staticmethod
    def fits(ups: Seq[PackedMatrix], downs: Seq[PackedMatrix], gate: ExpertGate) -> bool:
        """Whether C supports these: all `ups` have one form, all `downs`, too, and rows are whole vectors."""
        if any(len({part.form for part in parts}) != 1 for parts in (ups, downs)):
            return False
        sizes = ups[0].out_features == downs[0].in_features * (1 if gate.ungated else 2)
        return sizes and not downs[0].out_features % ALIGNED and not any(p.matrix.order for p in (*ups, *downs))

    def __deepcopy__(self, _memo: dict[int, Any]) -> ExpertMatrices:
        return self

    def run(self, rows: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """The weighted sum (`weights` `[T, k]`) of the experts `chosen` `[T, k]` of `rows` `[T, in]`: `[T, out]`.

        A row's sum is in the order of its `chosen`, in float32. Invalid experts add nothing.

        Raises:
            MemoryError: the C code could not allocate working memory.
        """
        rows, chosen, weights = rows.contiguous(), chosen.long().contiguous(), weights.float().contiguous()
        out = torch.empty(len(rows), self.out_features, dtype=rows.dtype)
        at = (tensor.data_ptr() for tensor in (rows, chosen, weights, out))
        batch = _Batch(*at, *chosen.shape, BITS[rows.dtype])
        if function("experts")(ctypes.byref(self._experts), ctypes.byref(batch), pool_threads()):
            raise MemoryError("expert kernel: out of memory")
        return out
