"""Stores keys and values in arena rows. `pages.py` assigns rows to sequences.

There is one arena per model, allocated once. A sequence's position p is stored in arena row
`page_table[p // page_size] * page_size + p % page_size`, the same row in every layer.

In int8 each vector has its own scale. A vector of `dim` numbers takes `dim + SCALE_BYTES` bytes: first its float32
scale, then its codes. The scale comes first, so that values that are the beginning of their keys (MLA) are a view of
them.
"""

from __future__ import annotations

import math
import mmap
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pilotfish.engine.choices import KVType
from pilotfish.engine.kernels.reference import round_heads
from pilotfish.engine.machine.mapped import in_pages

SCALE_BYTES = 4


def is_rounded(heads: Tensor) -> bool:
    """Whether a tensor holds codes and scales, not floats."""
    return heads.dtype == torch.int8


def width_of(heads: Tensor) -> int:
    """The number of elements of each vector of `[..., stored]`, in any storage."""
    return heads.shape[-1] - (SCALE_BYTES if is_rounded(heads) else 0)


def floats_of(heads: Tensor, dtype: torch.dtype) -> Tensor:
    """Vectors `[..., stored]` as floats of `dtype` `[..., dim]`, dequantised if rounded."""
    if not is_rounded(heads):
        return heads.to(dtype)
    scale = heads[..., :SCALE_BYTES].contiguous().view(torch.float32)
    return (heads[..., SCALE_BYTES:] * scale).to(dtype)


@dataclass(frozen=True, slots=True)
class LayerKV:
    """The K/V of one layer and position: `heads` keys of `key_dim` and values of `value_dim` elements."""

    heads: int
    key_dim: int
    value_dim: int
    is_latent: bool = False  # the value is the beginning of the key, and is not stored separately (MLA)
    source: int | None = None  # an earlier layer whose keys and values this one reads instead of its own

    def bytes_in(self, dtype: torch.dtype) -> int:
        """Bytes per position."""
        kept = (self.key_dim,) if self.is_latent else (self.key_dim, self.value_dim)
        return 0 if self.source is not None else self.heads * sum(_stored(dim, dtype) * dtype.itemsize for dim in kept)


@dataclass(frozen=True, slots=True)
class KVLayout:
    """The shape of K/V by layer; None for a layer without attention."""

    layers: tuple[LayerKV | None, ...]
    dtype: torch.dtype  # int8: every vector has a scale

    @classmethod
    def uniform(cls, layers: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> KVLayout:
        """The layout of most models: every layer has the same heads."""
        return cls((LayerKV(kv_heads, head_dim, head_dim),) * layers, dtype)

    @property
    def same(self) -> LayerKV | None:
        """The shape of a layer, if all layers are equal and keys are as wide as values; else None."""
        first = self.layers[0] if len(set(self.layers)) == 1 else None
        return first if first is not None and first.key_dim == first.value_dim and not first.is_latent else None

    @property
    def heads(self) -> int | None:
        """K/V heads of a layer, if all layers attend and have the same number; else None."""
        found = {layer.heads if layer is not None else None for layer in self.layers}
        return found.pop() if len(found) == 1 else None

    @property
    def bytes_per_token(self) -> int:
        """Bytes of K and V per position, over all layers."""
        return sum(layer.bytes_in(self.dtype) for layer in self.layers if layer is not None)

    @property
    def is_rounded(self) -> bool:
        return self.dtype == torch.int8

    def takes(self, dtype: torch.dtype) -> bool:
        """Whether our C can write keys and values of this type into such an arena, rounded or not."""
        return self.is_rounded or self.dtype == dtype

    def stored_as(self, kind: KVType) -> KVLayout:
        """The layout of the same K/V with the option `kv_cache_dtype`."""
        return self if kind == "auto" else replace(self, dtype=torch.int8)


class KVArena:
    """Keys and values of every sequence of one model: per layer `k` and `v` of `[rows, kv_heads, head_dim]`.

    In int8 the last dimension is that of `round_heads`. A layer without attention has empty tensors; a layer that reads
    those of an earlier layer shares its tensors.
    """

    def __init__(
        self, layout: KVLayout, num_pages: int, page_size: int, device: torch.device, spare_rows: int = 0
    ) -> None:
        self.layout, self.num_pages, self.page_size = layout, num_pages, page_size
        # Spare rows follow the last page and belong to no sequence: padding may write there.
        rows = num_pages * page_size + spare_rows
        pairs: list[tuple[Tensor, Tensor]] = []
        for layer in layout.layers:
            if layer is not None and layer.source is not None:
                pairs.append(pairs[layer.source])
            else:
                pairs.append(_pair(layer or LayerKV(0, 0, 0), rows, layout.dtype, device))
        self.k: tuple[Tensor, ...] = tuple(k for k, _ in pairs)
        self.v: tuple[Tensor, ...] = tuple(v for _, v in pairs)

    def write(self, layer: int, rows: Tensor, key: Tensor, value: Tensor) -> None:
        """Store `key` and `value` `[tokens, kv_heads, head_dim]` in place at `rows` `[tokens]`.

        A layer that reads those of an earlier layer does not store them, nor values that are part of their keys.
        """
        shape = self.layout.layers[layer]
        assert shape is not None, "attention in a layer without keys and values"
        if shape.source is not None:
            return
        for stored, new in ((self.k[layer], key), (self.v[layer], None if shape.is_latent else value)):
            if new is not None:
                stored.index_copy_(0, rows, round_heads(new) if self.layout.is_rounded else new)


def _pair(layer: LayerKV, rows: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    # Zeroed once: rows beyond `kv_len` may be read under a mask, and the mask would not remove a NaN.
    key_width, value_width = (_stored(dim, dtype) for dim in (layer.key_dim, layer.value_dim))
    key = _zeros((rows, layer.heads, key_width), dtype, device)
    if layer.is_latent:
        return key, key[..., :value_width]
    return key, _zeros((rows, layer.heads, value_width), dtype, device)


def _stored(dim: int, dtype: torch.dtype) -> int:
    """The stored size of a vector of `dim` elements, in elements of `dtype`."""
    return dim + (SCALE_BYTES if dtype == torch.int8 else 0)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Like `torch.zeros`, but on a CPU the system zeroes each page at first access, so start-up does not wait for it.

    Small pages, because one token may be the first of a page in every layer: with large ones it waited half a second.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    size = math.prod(shape) * dtype.itemsize
    if not size:
        return torch.zeros(shape, dtype=dtype)
    # New memory from the system, not freed memory, which the C library would have to zero.
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    zeros = torch.frombuffer(memory, dtype=torch.uint8)
    in_pages(zeros, large=False)
    return zeros.view(dtype).view(shape)
