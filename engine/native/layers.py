"""All decoder layers in one call of our C (`layers.c`). Knows matrices and rows; knows no model."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from engine.machine.threads import pool_threads
from engine.native.attention import BITS, AttentionArgs
from engine.native.compiled import library
from engine.native.matmul import Matrix, PackedMatrix

_PTR, _F32, _I64, _I32 = ctypes.c_void_p, ctypes.c_float, ctypes.c_int64, ctypes.c_int32


class _Layer(ctypes.Structure):
    _fields_ = (
        *((name, Matrix) for name in ("qkv", "out", "gate_up", "down")),
        *((name, _PTR) for name in ("norm_attention", "norm_mlp", "key", "value")),
        *((name, _F32) for name in ("eps_attention", "eps_mlp", "scale", "softcap")),
        ("window", _I64),
        ("norm_beside", _PTR),
        ("eps_beside", _F32),
        ("normed_residual", _I32),
    )


class _Pass(ctypes.Structure):
    _fields_ = (
        *((name, _PTR) for name in ("hidden", "cos", "sin", "places", "qkv", "mixed", "gates", "fed", "step")),
        ("attention", AttentionArgs),
        ("rows", _I64),
        ("width", _I64),
        ("bits", ctypes.c_int),
        ("beside", _PTR),
        ("read", ctypes.POINTER(_PTR)),
    )


@dataclass(frozen=True, slots=True)
class LayerParts:
    """The parts of a layer. Norms are (weight, eps), as for `Rows.norm`."""

    qkv: PackedMatrix
    out: PackedMatrix
    gate_up: PackedMatrix
    down: PackedMatrix
    norm_attention: tuple[Tensor, float] | None  # None: the matrix reads the row as it is
    norm_mlp: tuple[Tensor, float]
    scale: float
    softcap: float | None
    window: int | None
    norm_beside: tuple[Tensor, float] | None = None  # of a second row, which `qkv` reads before the layer's own
    normed_residual: bool = False  # with `norm_beside`: the layer adds to its normed row, not to the row itself

    def told(self, k: Tensor, v: Tensor) -> _Layer:
        """Make the C structure, with the arena `k`, `v` `[rows, kv_heads, head_dim]` of this layer."""
        first, beside = (
            (None, 0.0) if norm is None else (norm[0].data_ptr(), norm[1])
            for norm in (self.norm_attention, self.norm_beside)
        )
        return _Layer(
            self.qkv.matrix, self.out.matrix, self.gate_up.matrix, self.down.matrix,
            first[0], self.norm_mlp[0].data_ptr(), k.data_ptr(), v.data_ptr(),
            first[1], self.norm_mlp[1], self.scale, self.softcap or 0.0, self.window or 0,
            *beside, self.normed_residual,
        )  # fmt: skip


class Layers:
    """Layers with one arena, ready to run."""

    def __init__(self, parts: Seq[LayerParts], k: Seq[Tensor], v: Seq[Tensor]) -> None:
        self._parts, self._arena = tuple(parts), (tuple(k), tuple(v))  # kept alive, because C holds their addresses
        told = [part.told(*kv) for part, *kv in zip(self._parts, *self._arena, strict=True)]
        self._layers = (_Layer * len(told))(*told)
        self._inner = max(part.down.in_features for part in parts)
        self._widest = max(m.in_features for p in parts for m in (p.qkv, p.out, p.gate_up, p.down))

    def run(
        self,
        hidden: Tensor,
        cos: Tensor,
        sin: Tensor,
        places: Tensor,
        where: AttentionArgs,
        beside: Tensor | None = None,
        read: Mapping[int, Tensor] = MappingProxyType({}),
    ) -> Tensor:
        """Replace `hidden` `[T, width]` by the result of the last layer, in place.

        `cos`, `sin` `[T, head_dim]` have the type of `hidden`, and `places` `[T]` int64 are rows of the arena; `where`
        contains the pages to read (`attention_args`). `beside` `[T, width]` is read by layers with `norm_beside`. Each
        tensor of `read`, dense like `hidden`, gets the hidden states before the layer of that number.

        Raises:
            MemoryError: the C code could not allocate working memory.
        """
        native, dtype, (rows, width) = library(), hidden.dtype, hidden.shape
        assert native is not None
        assert hidden.is_contiguous(), "rows lie apart"
        assert beside is None or beside.is_contiguous(), "rows lie apart"
        assert beside is not None or not any(part.norm_beside for part in self._parts), "a layer reads a second row"
        mixed = where.heads * where.dim
        joined = mixed + 2 * where.kv_heads * where.dim
        # One allocation for all buffers between the stages; each buffer starts at a multiple of 64 bytes, for vectors.
        sizes = [rows * n * dtype.itemsize for n in (joined, mixed, 2 * self._inner)] + [rows * self._widest * 4]
        scratch = torch.empty(sum(sizes) + 4 * rows + 64 * 5, dtype=torch.uint8)
        at = [scratch.data_ptr()]
        for size in sizes:
            at.append(-(-(at[-1] + size) // 64) * 64)
        where.query_stride = joined
        told = _Pass(hidden.data_ptr(), cos.data_ptr(), sin.data_ptr(), places.data_ptr(), *at, where, rows, width,
                     BITS[dtype], None if beside is None else beside.data_ptr(), self._told(read))  # fmt: skip
        if native.pilotfish_layers(ctypes.byref(told), self._layers, len(self._layers), pool_threads()):
            raise MemoryError("a pass had no memory to work in")
        return hidden

    def _told(self, read: Mapping[int, Tensor]) -> ctypes.Array[ctypes.c_void_p] | None:
        if not read:
            return None
        return (_PTR * len(self._layers))(
            *(read[i].data_ptr() if i in read else None for i in range(len(self._layers)))
        )
