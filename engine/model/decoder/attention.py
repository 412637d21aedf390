"""Grouped attention with rotary positions over a ragged batch."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pilotfish.engine.attention.reference import AttentionSpec
from pilotfish.engine.attention.registry import Ragged
from pilotfish.engine.kv.arena import SCALE_BYTES, is_rounded
from pilotfish.engine.model.decoder.architecture import AttentionLayer
from pilotfish.engine.model.decoder.norms import RMSNorm, norm_of, norm_of_heads
from pilotfish.engine.model.decoder.ops import LayerOps
from pilotfish.engine.model.decoder.weights import WeightReader
from pilotfish.engine.model.linear.activations import ELEMENTWISE
from pilotfish.engine.native import Rows, rows_for
from pilotfish.engine.native.rows import WeightAndEps


class Joined(nn.Module):
    """One matmul that replaces several with the same input; each has a `JoinedPart`."""

    def __init__(self, matmul: nn.Module, sizes: list[int]) -> None:
        super().__init__()
        self.matmul, self.sizes = matmul, sizes

    def forward(self, x: Tensor) -> Tensor:
        """`[..., in]` -> `[..., sum of sizes]`."""
        return cast("Tensor", self.matmul(x))


class JoinedPart(nn.Module):
    """One of the joined matmuls, under its name in a checkpoint, for adapters."""

    def __init__(self, joined: Joined, index: int, order: Tensor | None = None) -> None:
        """`order`: index in the checkpoint of each output; None: equal."""
        super().__init__()
        self.joined, self.index, self.order = joined, index, order


def join(
    module: nn.Module,
    weights: WeightReader,
    sizes: dict[str, int],
    inputs: int,
    *,
    has_bias: bool,
    orders: dict[str, Tensor] | None = None,
) -> Joined:
    """Read matrices as one, and add a part to `module` for each, by name."""
    orders = orders or {}
    joined = Joined(weights.matrix(sizes, inputs, has_bias=has_bias, orders=orders), [*sizes.values()])
    for index, name in enumerate(sizes):
        setattr(module, name, JoinedPart(joined, index, orders.get(name)))
    return joined


class GroupedAttention(nn.Module):
    """One rotation for queries and keys, and no transposed copies."""

    def __init__(self, layer: AttentionLayer, number: int, width: int, weights: WeightReader) -> None:
        super().__init__()
        self.layer, self.layer_idx = layer, number
        self.ops: LayerOps | None = None  # of a GPU
        orders, inputs = _orders(layer), layer.reads or width
        if layer.joined:
            self.qkv_proj = weights.matrix(layer.firsts, inputs, has_bias=layer.qkv_bias, orders=orders)
        else:
            if layer.gate is not None and layer.gate.name is None:
                orders["q_proj"] = _gates_last(orders.get("q_proj"), layer.heads, layer.head_dim)
            join(self, weights, layer.firsts, inputs, has_bias=layer.qkv_bias, orders=orders)
        out = weights.matrix({layer.out_name: width}, layer.sizes[0], has_bias=layer.out_bias)
        setattr(self, layer.out_name, out)
        if layer.norm is not None:
            for name, heads in layer.normed.items():
                setattr(self, name, norm_of_heads(layer.norm, weights, name, heads, layer.head_dim, layer.order()))
        if layer.value_norm is not None and layer.source is None:
            self.v_norm = norm_of(layer.value_norm, weights, "v_norm", layer.head_dim)
        self.attn_sub_norm: nn.Module | None = None
        if layer.out_norm is not None:
            self.attn_sub_norm = norm_of(layer.out_norm, weights, "attn_sub_norm", layer.sizes[0])
        self.sinks: Tensor | None
        sinks = weights.vector("sinks", layer.heads) if layer.has_sinks else None
        self.register_buffer("sinks", sinks, persistent=False)

    @property
    def spec(self) -> AttentionSpec:
        spec = self.layer.spec
        return spec if self.sinks is None else replace(spec, sinks=self.sinks)

    @property
    def out(self) -> nn.Module:
        return cast("nn.Module", self._modules[self.layer.out_name])

    @property
    def norms(self) -> tuple[nn.Module, ...]:
        """Of queries, keys and values, if any."""
        found = map(self._modules.get, (*self.layer.normed, "v_norm"))
        return tuple(norm for norm in found if norm is not None)

    @property
    def joined_norms(self) -> tuple[WeightAndEps, WeightAndEps] | tuple[None, None] | None:
        """The norms that our C applies during the rotation, two None without norms; None for other kinds."""
        norm, norms = self.layer.norm, self.norms
        if norm is None:
            return None, None
        parts = [norm.parts for norm in norms if isinstance(norm, RMSNorm)]
        fits = norm.extent == "head" and not norm.turned and len(norms) == len(parts) == 2
        return (parts[0], parts[1]) if fits else None

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor], ragged: Ragged) -> Tensor:
        """`[1, T, width]`, and cos and sin `[1, T, head_dim]` -> `[1, T, width]`."""
        layer, arena = self.layer, ragged.arena
        projected, gates = self._gates_apart(self.matmul(x)[0])
        if layer.same_values:
            projected = torch.cat([projected, projected[:, layer.sizes[0] :]], -1)
        if layer.clip is not None:
            projected = projected.clamp(-layer.clip, layer.clip)
        query = self.write(projected, rotary, ragged)
        if layer.growth is not None:
            grown = query * layer.growth.of(ragged.batch.positions)[:, None, None]
            query = grown.to(query.dtype)
        keys, values = arena.k[self.layer_idx], arena.v[self.layer_idx]
        mixed = ragged.attend(query, keys, values, ragged.batch, self.spec).flatten(1)
        if gates is not None:
            mixed = (mixed.unflatten(-1, (gates.shape[1], -1)) * gates[..., None]).flatten(1)
        return cast("Tensor", self.out(mixed[None] if self.attn_sub_norm is None else self.attn_sub_norm(mixed[None])))

    @property
    def matmul(self) -> nn.Module:
        """The matrix of queries, keys and values."""
        parts: Any = self
        return cast("nn.Module", parts.qkv_proj if self.layer.joined else parts.q_proj.joined.matmul)

    def _gates_apart(self, projected: Tensor) -> tuple[Tensor, Tensor | None]:
        """Queries, keys and values of rows, and the gates of their heads."""
        gate, (queries, keys, values) = self.layer.gate, self.layer.sizes
        if gate is None:
            return projected, None
        if gate.name is None:
            query, gates, others = projected.split([queries, queries, keys + values], -1)
            projected = torch.cat([query, others], -1)
        else:
            projected, gates = projected.split([queries + keys + values, self.layer.gates], -1)
        run = ELEMENTWISE[torch.sigmoid if gate.activation == "sigmoid" else F.softplus]
        return projected.contiguous(), run(gates)

    def write(self, projected: Tensor, rotary: tuple[Tensor, Tensor], ragged: Ragged) -> Tensor:
        """Write keys and values to the arena; return the rotated queries `[T, heads, head_dim]`.

        `projected` `[T, all heads * head_dim]`: concatenated queries, keys and values; queries may be missing if they
        are not needed.
        """
        (cos, sin), norms, layer, number = rotary, self.joined_norms, self.layer, self.layer_idx
        if norms is None and layer.norm is not None and not layer.norm.turned:
            projected, norms = self._normed(projected), (None, None)
        k, v, rows = ragged.arena.k[number], ragged.arena.v[number], ragged.batch.kv_rows
        if layer.source is not None:
            k, v = k[:, :0], v[:, :0]
        if self.ops is not None and norms is not None:
            scaled = SCALE_BYTES if is_rounded(k) else 0
            return self.ops.rotate_and_write(projected, cos[0], sin[0], rows, k, v, *self._norms_of_kernels(), scaled)
        native = None if norms is None else self._native_for(projected, cos, ragged)
        if native is not None and norms is not None:
            return native.rotate(projected.contiguous(), cos[0].contiguous(), sin[0].contiguous(), rows, k, v, norms)
        if norms is not None and norms != (None, None):
            projected = self._normed(projected)
        query, key, value = self._heads(projected)
        signed = ragged.batch.once(("sin", sin), partial(signed_halves, sin))
        turned = rotated(torch.cat([query, key], 1), cos, signed)
        query, key = cast("tuple[Tensor, Tensor]", turned.tensor_split([query.shape[1]], 1))
        if layer.norm is not None and layer.norm.turned:
            query, key = (norm(x) for norm, x in zip(self.norms, (query, key), strict=True))
        ragged.arena.write(number, ragged.batch.kv_rows, key, value)
        return query

    def _norms_of_kernels(self) -> tuple[tuple[Tensor, Tensor] | None, float]:
        """Weights and eps of the norms that a kernel applies during the rotation."""
        if not self.joined_norms or self.joined_norms == (None, None):
            return None, 0.0
        (query, eps), (key, _) = (cast("RMSNorm", norm).for_kernels for norm in self.norms)
        return (query, key), eps

    def _normed(self, projected: Tensor) -> Tensor:
        layer = self.layer
        assert layer.norm is not None
        parts = [*projected.split(layer.sizes, -1)] if layer.norm.extent == "all" else [*self._heads(projected)]
        for index, norm in enumerate(self.norms):
            parts[index] = norm(parts[index])
        return torch.cat([part.flatten(1) for part in parts], -1)

    def _heads(self, projected: Tensor) -> tuple[Tensor, ...]:
        """`[T, heads, head_dim]` each."""
        layer = self.layer
        heads = projected.unflatten(-1, (-1, layer.head_dim))
        keys = layer.sizes[1] // layer.head_dim
        parts: tuple[Tensor, ...] = heads.split([heads.shape[1] - 2 * keys, keys, keys], 1)
        return parts

    def _native_for(self, projected: Tensor, cos: Tensor, ragged: Ragged) -> Rows | None:
        """Our C functions, if they can rotate projected rows and write them into this arena; else None."""
        dtype, dim = projected.dtype, self.layer.head_dim
        fits = dtype == cos.dtype and ragged.arena.layout.takes(dtype) and projected.is_cpu and cos.shape[0] == 1
        return rows_for(dtype, dim // 2) if fits and not dim % 2 else None


def _orders(layer: AttentionLayer) -> dict[str, Tensor]:
    """By matrix, the index in the checkpoint of each output; without matrices in the checkpoint's order.

    Joined, in groups of heads of 2 elements without rotation: [0, 1, 6, 7, 2, 3, 8, 9, 4, 5, 10, 11].
    """
    order, (queries, keys, _) = layer.order(), layer.sizes
    if not layer.joined:
        return {} if order is None else {"q_proj": _over_heads(order, queries), "k_proj": _over_heads(order, keys)}
    if order is None and layer.groups == 1:
        return {}
    groups = torch.arange(sum(layer.sizes)).view(layer.groups, -1)  # equal numbers of keys and values
    query, key, value = (x.flatten() for x in groups.split([size // layer.groups for size in layer.sizes], 1))
    if layer.values_first:
        key, value = value, key
    if order is not None:
        query, key = query[_over_heads(order, queries)], key[_over_heads(order, keys)]
    return {"qkv_proj": torch.cat([query, key, value])}


def _over_heads(order: Tensor, size: int) -> Tensor:
    """The order of a head's elements -> that of all heads, `[size]`."""
    dim = len(order)
    return (torch.arange(0, size, dim)[:, None] + order).flatten()


def _gates_last(order: Tensor | None, heads: int, dim: int) -> Tensor:
    """The order of queries, `[heads * dim]` -> that of a matrix in which each head's gates follow its queries."""
    queries, gates = torch.arange(2 * heads * dim).view(heads, 2, dim).unbind(1)
    return torch.cat([queries.flatten() if order is None else queries.flatten()[order], gates.flatten()])


def rotated(x: Tensor, cos: Tensor, signed_sin: Tensor) -> Tensor:
    """Rotate [T, heads, d]: the halves (a, b) of each head become (a cos - b sin, b cos + a sin)."""
    return (x * cos[0, :, None]).add_(x.roll(x.shape[-1] // 2, -1).mul_(signed_sin))


def signed_halves(sin: Tensor) -> Tensor:
    """[1, T, d] -> [T, 1, d], the first half negated."""
    first, second = sin[0, :, None].chunk(2, -1)
    return torch.cat([-first, second], -1)
