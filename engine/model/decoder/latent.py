"""Latent attention (MLA, DeepSeek-V2, section 2.1.2 of arXiv 2405.04434): all heads share one latent per position.

key = (W_UK latent, rotary part), value = W_UV latent. Because q (W_UK c) = (q W_UK) c, and a weighted sum of W_UV c is
W_UV times the weighted sum, the matrices are multiplied into query and result, and no key or value of a head is
computed. The arena stores one key per token, (latent, rotary part), whose beginning is its value.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from pilotfish.engine.attention.reference import AttentionSpec
from pilotfish.engine.attention.registry import Ragged
from pilotfish.engine.kv.arena import LayerKV
from pilotfish.engine.model.decoder.architecture import Architecture, Mixer, NormForm
from pilotfish.engine.model.decoder.attention import join, rotated, signed_halves
from pilotfish.engine.model.decoder.norms import norm_of
from pilotfish.engine.model.decoder.rotary import RotaryTable
from pilotfish.engine.model.decoder.weights import WeightReader
from pilotfish.engine.model.linear.activations import ELEMENTWISE
from pilotfish.engine.native import ALIGNED, PackedMatrices, PackedMatrix, multiplies

_NORM = NormForm(1e-6)  # of all families
_QUERY, _LATENT = "q_proj", "kv_a_proj_with_mqa"


@dataclass(frozen=True, slots=True)
class LatentLayer(Mixer):
    """Attention whose keys and values are projections of one latent vector per position, plus a shared rotary part.

    Attributes:
        heads: of queries.
        rank: size of a latent.
        nope: size of the part of a key without rotation.
        rope: size of the rotated part.
        value: size of a value.
        spec: scale of the scores.
        rotary: of the rotated part.
        query_rank: size of the latent of queries; None: they are projections of the row.
        interleaved: pairs that are rotated are neighbours in the checkpoint; else they are halves of what is rotated.
        bias: the input projections and the output projection have one.
        norm: of latents, including that of queries.
        expands: store keys and values of heads instead of latents, because an adapter changes `kv_b_proj`.
        gated: a head's output is multiplied by the sigmoid of its gate, a projection of the row by `g_proj`.
    """

    heads: int
    rank: int
    nope: int
    rope: int
    value: int
    spec: AttentionSpec
    rotary: RotaryTable = field()  # without a default, which the property of `Mixer` would be
    query_rank: int | None = None
    interleaved: bool = False
    bias: bool = False
    norm: NormForm = _NORM
    expands: bool = False
    gated: bool = False

    @property
    def kv(self) -> LayerKV:
        if self.expands:
            return LayerKV(self.heads, self.nope + self.rope, self.value)
        return LayerKV(1, self.rank + self.rope, self.rank, is_latent=True)

    @property
    def queries(self) -> int:
        return self.heads * (self.nope + self.rope)

    @property
    def firsts(self) -> dict[str, int]:
        """The matrices that read a row, with their outputs."""
        query = {_QUERY: self.queries} if self.query_rank is None else {"q_a_proj": self.query_rank}
        return query | {_LATENT: self.rank + self.rope} | ({"g_proj": self.heads} if self.gated else {})

    def order(self, still: int, count: int = 1) -> Tensor | None:
        """The index in the checkpoint of each element of `count` heads of `still + rope`; None: equal.

        A head with 1 fixed element and 4 rotated as adjacent pairs: [0, 1, 3, 2, 4].
        """
        if not self.interleaved:
            return None
        turned = torch.arange(still, still + self.rope).view(-1, 2).t().flatten()
        head = torch.cat([torch.arange(still), turned])
        return (torch.arange(count)[:, None] * len(head) + head).flatten()


class LatentHeads(nn.Module):
    """The projections of latents by the heads of a layer: W_UK and W_UV of each."""

    def __init__(self, keys: Tensor, values: Tensor, *, row_wise: bool, packs: bool = True) -> None:
        """Take W_UK `[heads, nope, rank]` and W_UV `[heads, value_dim, rank]`.

        `row_wise`: a row's bits are independent of other rows, even where torch multiplies. `packs`: use our C on a
        CPU.
        """
        super().__init__()
        self.nope = keys.shape[1]
        both = keys.transpose(1, 2), values
        self.keys, self.values = (HeadProducts(x, row_wise=row_wise, packs=packs) for x in both)

    def absorb(self, query: Tensor) -> Tensor:
        """Queries `[T, heads, nope + rope]` -> `[T, heads, rank + rope]`, for keys of a latent and a rotary part."""
        nope, rope = query.split([self.nope, query.shape[2] - self.nope], 2)
        return torch.cat([self.keys(nope), rope], 2)


def latent_of(module: nn.Module) -> LatentHeads | None:
    """The projections of a latent-attention layer (`model.latent`); None for any other."""
    found = getattr(module, "latent", None)
    return found if isinstance(found, LatentHeads) else None


class HeadProducts(nn.Module):
    """A matrix `[out, in]` per head; multiplied by our C if it supports type and size."""

    def __init__(self, weight: Tensor, *, row_wise: bool, packs: bool = True) -> None:
        super().__init__()
        self._packed: PackedMatrices | None = None
        self.row_wise = row_wise
        self.weight: Tensor | None
        self.register_buffer("weight", None, persistent=False)  # such a parameter would count as stacked experts
        if packs and weight.is_cpu and multiplies(weight.dtype) and not weight.shape[2] % ALIGNED:
            self._packed = PackedMatrices([PackedMatrix.of(part.contiguous()) for part in weight])
        else:
            self.weight = weight.transpose(1, 2).contiguous()  # [heads, in, out]

    def forward(self, x: Tensor) -> Tensor:
        """`[T, heads, in]` -> `[T, heads, out]`."""
        by_head = x.transpose(0, 1)
        if self._packed is not None:
            return self._packed.multiply(by_head.contiguous()).transpose(0, 1)
        assert self.weight is not None
        if not self.row_wise:
            return torch.bmm(by_head, self.weight).transpose(0, 1)
        # A product of constant shape has a constant order of sums.
        rows = [torch.bmm(row[:, None].contiguous(), self.weight)[:, 0] for row in x]
        return torch.stack(rows)


class LatentAttention(nn.Module):
    """Multiplies the expansion of latents into queries and results: no key or value of a head is computed."""

    def __init__(self, layer: LatentLayer, number: int, width: int, weights: WeightReader) -> None:
        super().__init__()
        self.layer, self.layer_idx = layer, number
        queries, latents = layer.order(layer.nope, layer.heads), layer.order(layer.rank)
        ordered = {_QUERY: queries, _LATENT: latents}
        orders = {name: order for name, order in ordered.items() if order is not None and name in layer.firsts}
        join(self, weights, layer.firsts, width, has_bias=layer.bias, orders=orders)
        self.kv_a_layernorm = norm_of(layer.norm, weights, "kv_a_layernorm", layer.rank)
        if layer.query_rank is not None:
            self.q_a_layernorm = norm_of(layer.norm, weights, "q_a_layernorm", layer.query_rank)
            orders, sizes = {} if queries is None else {"q_b_proj": queries}, {"q_b_proj": layer.queries}
            self.q_b_proj = weights.matrix(sizes, layer.query_rank, has_bias=False, orders=orders)
        self.latent: LatentHeads | None = None
        expanded = layer.heads * (layer.nope + layer.value)
        if layer.expands:
            self.kv_b_proj = weights.matrix({"kv_b_proj": expanded}, layer.rank, has_bias=False)
        else:
            expanding = weights.floats("kv_b_proj.weight", expanded, layer.rank).to(weights.dtype)
            keys, values = expanding.unflatten(0, (layer.heads, -1)).split([layer.nope, layer.value], 1)
            self.latent = LatentHeads(keys, values, row_wise=weights.device.type == "cpu", packs=weights.packs)
        self.o_proj = weights.matrix({"o_proj": width}, layer.heads * layer.value, has_bias=layer.bias)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor], ragged: Ragged) -> Tensor:
        """`[1, T, width]`, and cos and sin `[1, T, rope]` -> `[1, T, width]`."""
        layer, parts = self.layer, cast("Any", self)
        both: Tensor = parts.kv_a_proj_with_mqa.joined.matmul(x)[0]
        sizes = [layer.query_rank or layer.queries, layer.rank, layer.rope, layer.heads if layer.gated else 0]
        query, latent, turned, gate = cast("tuple[Tensor, ...]", both.split(sizes, -1))
        if layer.query_rank is not None:
            query = self.q_b_proj(self.q_a_layernorm(query))
        still, turning = query.unflatten(-1, (layer.heads, -1)).split([layer.nope, layer.rope], -1)
        cos, sin = rotary
        signed = ragged.batch.once(("sin", sin), partial(signed_halves, sin))
        together = rotated(torch.cat([turning, turned[:, None]], 1), cos, signed)
        asked, normed = torch.cat([still, together[:, :-1]], -1), self.kv_a_layernorm(latent)
        if self.latent is None:
            heads = self.kv_b_proj(normed[None])[0].unflatten(-1, (layer.heads, -1))
            keys, value = heads.split([layer.nope, layer.value], -1)
            key = torch.cat([keys, together[:, -1:].expand(-1, layer.heads, -1)], -1)
            attended = ragged.attend_layer(self.layer_idx, asked, key, value, layer.spec)
        else:
            key = torch.cat([normed[:, None], together[:, -1:]], -1)
            found = ragged.attend_layer(
                self.layer_idx, self.latent.absorb(asked), key, key[..., : layer.rank], layer.spec
            )
            attended = self.latent.values(found)  # weighted sums of latents -> of values
        if layer.gated:
            attended = attended * ELEMENTWISE[torch.sigmoid](gate)[..., None]
        return cast("Tensor", self.o_proj(attended.flatten(1)[None]))


def expanded(architecture: Architecture) -> Architecture:
    """The same with keys and values of heads instead of latents."""
    mixers = (layer.mixer for layer in architecture.layers)
    each = [replace(mixer, expands=True) if isinstance(mixer, LatentLayer) else mixer for mixer in mixers]
    layers = zip(architecture.layers, each, strict=True)
    return replace(architecture, layers=tuple(replace(layer, mixer=mixer) for layer, mixer in layers))
