"""Operations between matmuls in C (`rows.c`): one call instead of two to eight of torch. CPU, float32, bfloat16."""

from __future__ import annotations

import ctypes
import math

import torch
from torch import Tensor

from pilotfish.engine.machine.threads import pool_threads
from pilotfish.engine.native.compiled import BITS, fields, function, library

_LANES = 16
WeightAndEps = tuple[Tensor, float]  # weight (float32) and eps of a norm x / sqrt(sum of x^2 + eps) * weight


class Activation(ctypes.Structure):
    """`Activation` of rows.h: x times the logistic function of linear * x + cubic * x^3."""

    _fields_ = (*fields("f", "linear cubic"),)


_GELU = 2 * math.sqrt(2 / math.pi)  # Hendrycks and Gimpel 2016: 1 + tanh(z) is 2 logistic(2 z)
SILU, GELU_TANH = Activation(1.0, 0.0), Activation(_GELU, _GELU * 0.044715)


class Norm(ctypes.Structure):
    """`Norm` of rows.h."""

    _fields_ = (*fields("p", "weight"), *fields("f", "eps"))

    @classmethod
    def of(cls, norm: WeightAndEps | None) -> Norm:
        """Describe a norm or None; the caller must keep the weight alive."""
        return cls(None, 0.0) if norm is None else cls(_dense(norm[0]), norm[1])


class _Heads(ctypes.Structure):
    _fields_ = (
        *fields("n", "query kv dim"),
        *fields("p", "key value"),
        *fields("i", "rounded"),
        *((name, Norm) for name in ("norm_query", "norm_key")),
    )


def rows_for(dtype: torch.dtype, *widths: int) -> Rows | None:
    """The operations for rows of this type and these widths; None if not supported."""
    fits = library() is not None and dtype in BITS and not any(width % _LANES for width in widths)
    return Rows() if fits else None


class Rows:
    """Operations on rows. Every tensor is on the CPU and dense, with a type and widths that `rows_for` accepts.

    For `round` and `norm`, only each row must be dense.
    """

    def round(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """`[M, n]` -> int16 `[M, n]` and float32 step `[M, 1]`: x is about int16 * step (`round_rows`)."""
        m, n = x.shape
        out, scale = torch.empty(m, n, dtype=torch.int16), torch.empty(m, 1)
        function("round")(_rows(x), BITS[x.dtype], x.stride(0), m, n, out.data_ptr(), scale.data_ptr(), pool_threads())
        return out, scale

    def gate_round(self, x: Tensor, activation: Activation = SILU) -> tuple[Tensor, Tensor]:
        """(gate, up) `[M, 2 n]` -> activation(gate) * up, rounded as by `round`."""
        m, n = x.shape[0], x.shape[1] // 2
        out, scale = torch.empty(m, n, dtype=torch.int16), torch.empty(m, 1)
        bend = activation.linear, activation.cubic
        function("gate_round")(_dense(x), BITS[x.dtype], m, n, *bend, out.data_ptr(), scale.data_ptr(), pool_threads())
        return out, scale

    def gate(self, x: Tensor, activation: Activation = SILU) -> Tensor:
        """(gate, up) `[M, 2 n]` -> activation(gate) * up `[M, n]`, in the type of `x`."""
        m, n = x.shape[0], x.shape[1] // 2
        out = torch.empty(m, n, dtype=x.dtype)
        bend = activation.linear, activation.cubic
        function("gate")(_dense(x), BITS[x.dtype], m, n, *bend, out.data_ptr(), pool_threads())
        return out

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x / sqrt(sum of x^2 + eps) * weight over rows `[M, n]`, float32 inside, in the type of `x`."""
        out, (m, n) = torch.empty(x.shape, dtype=x.dtype), x.shape
        function("norm")(
            _rows(x), BITS[x.dtype], x.stride(0), m, n, _dense(weight), eps, out.data_ptr(), pool_threads()
        )
        return out

    def rotate(
        self, qkv: Tensor, cos: Tensor, sin: Tensor, places: Tensor, k: Tensor, v: Tensor,
        norms: tuple[WeightAndEps | None, WeightAndEps | None] = (None, None),
    ) -> Tensor:  # fmt: skip
        """Rotate queries in place, write rotated keys and the values into the arena, and return the queries.

        `qkv` is `[T, (heads + 2 kv_heads) * d]`, `cos` and `sin` are `[T, d]` in its type, and `places` `[T]` are rows
        of the arena `k`, `v` `[rows, kv_heads, d]`, or in int8 `[rows, kv_heads, 4 + d]`: a float scale in bytes, then
        codes. `norms` are of each head of queries and keys, before they are rotated. The result is a view of `qkv`,
        `[T, heads, d]`.
        """
        kv_heads, dim = k.shape[1], cos.shape[1]
        heads = qkv.shape[1] // dim - 2 * kv_heads
        c_heads = _Heads(heads, kv_heads, dim, _dense(k), _dense(v), k.dtype == torch.int8, *map(Norm.of, norms))
        function("rotate")(
            _dense(qkv), BITS[qkv.dtype], len(qkv), ctypes.byref(c_heads), _dense(cos), _dense(sin), _dense(places)
        )
        query: Tensor = qkv[:, : heads * dim].unflatten(1, (heads, dim))
        return query


def _rows(x: Tensor) -> int:
    assert x.stride(1) == 1, "the last dimension is not contiguous"
    return x.data_ptr()


def _dense(x: Tensor) -> int:
    assert x.is_contiguous(), "rows are not contiguous"
    return x.data_ptr()
