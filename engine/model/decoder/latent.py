"""Latent attention (MLA, DeepSeek-V2, section 2.1.2 of arXiv 2405.04434): all heads share one latent per position.

key = (W_UK latent, rotary part), value = W_UV latent. As q (W_UK c) = (q W_UK) c, and a weighted sum of W_UV c is W_UV
times the weighted sum, the matrices are multiplied into query and result, and no key or value of a head is computed.
The arena stores one key per token, (latent, rotary part), whose beginning is its value.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from engine.attention.reference import AttentionSpec
from engine.attention.registry import Ragged
from engine.kv.arena import LayerKV
from engine.model.decoder.architecture import Architecture, Mixer, NormForm
from engine.model.decoder.attention import join, rotated, signed_halves
from engine.model.decoder.norms import norm_of
from engine.model.decoder.rotary import RotaryTable
from engine.model.decoder.weights import WeightReader
from engine.model.linear.activations import ELEMENTWISE
from engine.native import ALIGNED, PackedMatrices, PackedMatrix, multiplies

_NORM = NormForm(1e-6)  # of all families
_QUERY, _LATENT = "q_proj", "kv_a_proj_with_mqa"


@dataclass(frozen=True, slots=True)
class LatentLayer(Mixer):
    """Attention whose keys and values are products of one latent vector of a position, and a rotary part of all heads.

    Attributes:
        heads: of queries.
        rank: numbers of a latent.
        nope: numbers of a key that do not turn.
        rope: numbers that turn.
        value: numbers of a value.
        spec: scale of the scores.
        rotary: of the numbers that turn.
        query_rank: numbers of what queries are products of; None where they are products of the row.
        interleaved: pairs that are rotated are neighbours in the checkpoint; else they are halves of what is rotated.
        bias: the products that read a row, and the output's, have one.
        norm: of latents, and of what queries are products of.
        expands: keys and values of heads are kept, and not what they are products of: an adapter changes `kv_b_proj`.
        gated: what a head gives is multiplied by the sigmoid of its gate, a product of the row with `g_proj`.
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
        """Which number in the checkpoint each of `count` heads' `still + rope` is; None where they are the same.

        Of a head of 1 number that stays and 4 that turn as neighbours: [0, 1, 3, 2, 4].
        """
        if not self.interleaved:
            return None
        turned = torch.arange(still, still + self.rope).view(-1, 2).t().flatten()
        head = torch.cat([torch.arange(still), turned])
        return (torch.arange(count)[:, None] * len(head) + head).flatten()


class LatentHeads(nn.Module):
    """What the heads of a layer make of latents: W_UK and W_UV of each."""

    def __init__(self, keys: Tensor, values: Tensor, *, row_wise: bool, packs: bool = True) -> None:
        """Take W_UK `[heads, nope, rank]` and W_UV `[heads, value_dim, rank]`.

        `row_wise`: a row's bits depend on no other row, also where torch multiplies. `packs`: on a CPU our C does.
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
    """The products of a layer that keeps latents (`model.latent`); None for any other."""
    found = getattr(module, "latent", None)
    return found if isinstance(found, LatentHeads) else None


class HeadProducts(nn.Module):
    """A matrix `[out, in]` for each head; in our C where that multiplies its type and size."""

    def __init__(self, weight: Tensor, *, row_wise: bool, packs: bool = True) -> None:
        super().__init__()
        self._packed: PackedMatrices | None = None
        self.row_wise = row_wise
        self.weight: Tensor | None
        self.register_buffer("weight", None, persistent=False)  # a parameter of such a shape would be stacked experts
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
        # A product of always the same shape has always the same order of sums.
        rows = [torch.bmm(row[:, None].contiguous(), self.weight)[:, 0] for row in x]
        return torch.stack(rows)


class LatentAttention(nn.Module):
    """What expands latents is multiplied into queries and results, so that no key or value of a head is made."""

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
    """The same with keys and values of heads in place of latents."""
    mixers = (layer.mixer for layer in architecture.layers)
    each = [replace(mixer, expands=True) if isinstance(mixer, LatentLayer) else mixer for mixer in mixers]
    layers = zip(architecture.layers, each, strict=True)
    return replace(architecture, layers=tuple(replace(layer, mixer=mixer) for layer, mixer in layers))
