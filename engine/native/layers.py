"""All decoder layers in one call of our C (`layers.c`)."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from pilotfish.engine.machine.threads import pool_threads
from pilotfish.engine.native.compiled import BITS, AttentionArgs, fields, function
from pilotfish.engine.native.matmul import Matrix, PackedMatrix
from pilotfish.engine.native.rows import SILU, Activation, Norm, WeightAndEps


class _Joined(ctypes.Structure):
    _fields_ = (("part", Matrix * 3), *fields("n", "parts"))

    @classmethod
    def of(cls, matrices: Seq[PackedMatrix]) -> _Joined:
        return cls((Matrix * 3)(*(each.matrix for each in matrices)), len(matrices))


_MATRICES = ("qkv", "out", "gate_up", "down")
_NORMS = ("norm_attention", "after_attention", "norm_mlp", "after_mlp", "norm_query", "norm_key", "norm_beside")


class _Layer(ctypes.Structure):
    _fields_ = (
        *((name, _Joined) for name in _MATRICES),
        *((name, Norm) for name in _NORMS),
        *fields("p", "key value"),
        *fields("n", "number window"),
        *fields("f", "scale softcap"),
        ("activation", Activation),
        *fields("i", "normed_residual"),
    )


class _Pass(ctypes.Structure):
    _fields_ = (
        *fields("p", "hidden"),
        *((name, ctypes.POINTER(ctypes.c_void_p)) for name in ("cos", "sin")),
        *fields("p", "places qkv mixed gates made fed step"),
        ("attention", AttentionArgs),
        *fields("n", "rows width"),
        *fields("i", "bits"),
        *fields("p", "beside"),
        ("read", ctypes.POINTER(ctypes.c_void_p)),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerParts:
    """The parts of a layer. Norms are (weight, eps), as for `Rows.norm`.

    Matrices with the same input are one or, if their codes have several forms, up to three; their outputs are
    concatenated.
    """

    qkv: Seq[PackedMatrix]
    out: Seq[PackedMatrix]
    gate_up: Seq[PackedMatrix]
    down: Seq[PackedMatrix]
    norm_attention: WeightAndEps | None  # None: the matrix reads the unnormalised row
    norm_mlp: WeightAndEps
    scale: float
    softcap: float | None
    window: int | None
    activation: Activation = SILU
    after_attention: WeightAndEps | None = None  # of attention's output, before it is added
    after_mlp: WeightAndEps | None = None  # of the MLP's output, before it is added
    norm_query: WeightAndEps | None = None  # of each head, before it is rotated
    norm_key: WeightAndEps | None = None
    norm_beside: WeightAndEps | None = None  # of a second row, which `qkv` reads before the layer's row
    normed_residual: bool = False  # with `norm_beside`: the layer adds to the normalised row instead of the row

    def c_layer(self, number: int, k: Tensor, v: Tensor) -> _Layer:
        """Make the C structure of layer `number`, with its arena `k`, `v` `[rows, kv_heads, head_dim]`."""
        matrices = (_Joined.of(getattr(self, name)) for name in _MATRICES)
        norms = (Norm.of(getattr(self, name)) for name in _NORMS)
        return _Layer(
            *matrices, *norms, k.data_ptr(), v.data_ptr(), number, self.window or 0, self.scale, self.softcap or 0.0,
            self.activation, self.normed_residual,
        )  # fmt: skip


class Layers:
    """Layers with one arena, ready to run."""

    def __init__(self, parts: Seq[LayerParts], k: Seq[Tensor], v: Seq[Tensor]) -> None:
        self._parts, self._arena = tuple(parts), (tuple(k), tuple(v))  # kept alive, because C holds their addresses
        layers = [part.c_layer(i, *kv) for i, (part, *kv) in enumerate(zip(self._parts, *self._arena, strict=True))]
        self._layers = (_Layer * len(layers))(*layers)
        self._inner = max(part.down[0].in_features for part in parts)
        joined = [getattr(part, name) for part in parts for name in _MATRICES]
        self._fed = 4 * max(sum(matrix.in_features for matrix in matrices) for matrices in joined)

    def run(
        self, hidden: Tensor, rotary: Seq[tuple[Tensor, Tensor]], places: Tensor, where: AttentionArgs,
        beside: Tensor | None = None, read: Mapping[int, Tensor] = MappingProxyType({}),
    ) -> Tensor:  # fmt: skip
        """Replace `hidden` `[T, width]` by the result of the last layer, in place.

        `rotary` has for each layer cos and sin `[T, head_dim]`, of the type of `hidden`; `places` `[T]` int64 are rows
        of the arena; `where` contains the pages to read (`attention.native`). `beside` `[T, width]` is read by layers
        with `norm_beside`. Each tensor of `read`, dense like `hidden`, gets the hidden states before the layer of that
        number.

        Raises:
            MemoryError: the C code could not allocate working memory.
        """
        dtype, (rows, width) = hidden.dtype, hidden.shape
        assert hidden.is_contiguous(), "rows are not contiguous"
        assert beside is None or beside.is_contiguous(), "rows are not contiguous"
        assert beside is not None or not any(part.norm_beside for part in self._parts), "a second row is missing"
        mixed = where.heads * where.dim
        joined = mixed + 2 * where.kv_heads * where.dim
        # One allocation for all buffers between stages; each starts at a multiple of 64 bytes, for vectors.
        sizes = [rows * n * dtype.itemsize for n in (joined, mixed, 2 * self._inner, width)] + [rows * self._fed]
        scratch = torch.empty(sum(sizes) + 4 * rows + 64 * (len(sizes) + 1), dtype=torch.uint8)
        at = [-(-scratch.data_ptr() // 64) * 64]
        for size in sizes:
            at.append(-(-(at[-1] + size) // 64) * 64)
        where.query_stride = joined
        cos, sin = map(_pointers, zip(*rotary, strict=True))
        copies = _pointers(map(read.get, range(len(self._layers)))) if read else None
        second = None if beside is None else beside.data_ptr()
        c_pass = _Pass(
            hidden.data_ptr(), cos, sin, places.data_ptr(), *at, where, rows, width, BITS[dtype], second, copies
        )
        if function("layers")(ctypes.byref(c_pass), self._layers, len(self._layers), pool_threads()):
            raise MemoryError("layer kernel: out of memory")
        return hidden


def _pointers(tensors: Iterable[Tensor | None]) -> ctypes.Array[ctypes.c_void_p]:
    addresses = [None if x is None else x.data_ptr() for x in tensors]
    return (ctypes.c_void_p * len(addresses))(*addresses)
