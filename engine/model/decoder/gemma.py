"""Parts specific to Gemma 3n and 4.

These are per-layer embeddings of tokens, streams of hidden states, and experts with their own input norms.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from pilotfish.engine.attention.registry import Ragged
from pilotfish.engine.model.decoder.architecture import NormForm
from pilotfish.engine.model.decoder.experts import Experts, MixtureMLP, RowProducts
from pilotfish.engine.model.decoder.feed_forward import ACTIVATIONS
from pilotfish.engine.model.decoder.norms import RMSNorm, norm_of
from pilotfish.engine.model.decoder.weights import WeightReader
from pilotfish.engine.model.linear.activations import ELEMENTWISE, RowWise

_NORM = NormForm(1e-6)
_FEED_NORMS = (
    "pre_feedforward_layernorm", "post_feedforward_layernorm_1",
    "pre_feedforward_layernorm_2", "post_feedforward_layernorm_2",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class LayerVectors:
    """Per-layer embeddings: from a table, and from a projection of the token's embedding.

    Attributes:
        rows: of the table; tokens beyond it use its first row.
        layers: of the model.
        size: size of a layer's vector.
        norm: of the projections.
        streams: number of hidden-state streams; all but the first begin as projections of it, and end in another
        projection.
    """

    rows: int
    layers: int
    size: int
    norm: NormForm
    streams: int = 1


class PerLayerEmbeddings(nn.Module):
    """The per-layer embeddings of tokens, and the beginning and end of streams."""

    def __init__(self, vectors: LayerVectors, width: int, weights: WeightReader) -> None:
        super().__init__()
        self.vectors, others = vectors, range(vectors.streams - 1)
        self.embed_tokens_per_layer = weights.table(
            "embed_tokens_per_layer", vectors.rows, vectors.layers * vectors.size, vectors.size**0.5
        )
        sizes = {"per_layer_model_projection": vectors.layers * vectors.size}
        self.per_layer_model_projection = weights.matrix(sizes, width, has_bias=False)
        self.per_layer_projection_norm = norm_of(vectors.norm, weights, "per_layer_projection_norm", vectors.size)

        def matrices(name: str) -> nn.ModuleList:
            return nn.ModuleList(weights.matrix({f"{name}.{each}": width}, width, has_bias=False) for each in others)

        self.altup_projections, self.altup_unembed_projections = map(
            matrices, ("altup_projections", "altup_unembed_projections")
        )

    def forward(self, ids: Tensor, hidden: Tensor) -> tuple[Tensor, ...]:
        """Tokens `[1, T]` and their embeddings `[1, T, width]` -> for each layer `[1, T, size]`."""
        made = self.per_layer_model_projection(hidden).unflatten(-1, (self.vectors.layers, -1))
        made = self.per_layer_projection_norm(made)
        found = self.embed_tokens_per_layer(torch.where(ids < self.vectors.rows, ids, 0))
        both: tuple[Tensor, ...] = ((made + found.view_as(made)) * 2**-0.5).unbind(-2)
        return both

    def spread(self, hidden: Tensor) -> Tensor:
        """`[1, T, width]` -> `[streams, T, width]`."""
        return torch.cat([hidden, *(_as_large(project(hidden), hidden) for project in self.altup_projections)])

    def merge(self, hidden: Tensor) -> Tensor:
        """`[streams, T, width]` -> their mean `[1, T, width]`."""
        first, *others = hidden.split(1)
        total: Tensor = first.float()
        for project, other in zip(self.altup_unembed_projections, others, strict=True):
            total = total + _as_large(project(other), first)
        return (total / len(hidden)).to(first.dtype)


def _as_large(x: Tensor, like: Tensor) -> Tensor:
    """Rows of x scaled to the mean squares of others."""
    have, want = (rows.float().square().mean(-1, keepdim=True) for rows in (x, like))
    return (x * (want.sqrt() / have.clamp_min(1e-5).sqrt())).to(x.dtype)


@dataclass(frozen=True, slots=True)
class ScaledSums:
    """x * scalar, after adding the projection of the token's vector of this layer, if any (`size` above 0)."""

    size: int
    activation: str
    norm: NormForm


@dataclass(frozen=True, slots=True)
class Streams:
    """Streams of hidden states: the layer computes the first and corrects the others.

    AltUp (Baykal et al. 2023, arXiv 2301.13310), with a low-rank product beside attention (LAuReL, Menghani et al.
    2024, arXiv 2411.07501).

    Attributes:
        count: of streams.
        rank: of the product.
        size: size of the token's vector of this layer, which is added to all streams but the first.
        activation: of the vector's gate.
        norm: of all norms.
    """

    count: int
    rank: int
    size: int
    activation: str
    norm: NormForm


class _Gated(nn.Module):
    """norm(projection(activation(gate(x)) * the token's vector of this layer))."""

    def __init__(self, part: ScaledSums | Streams, width: int, weights: WeightReader) -> None:
        super().__init__()
        self.part = part
        if part.size:
            self.per_layer_input_gate = weights.matrix({"per_layer_input_gate": part.size}, width, has_bias=False)
            self.per_layer_projection = weights.matrix({"per_layer_projection": width}, part.size, has_bias=False)
            self.post_per_layer_input_norm = norm_of(part.norm, weights, "post_per_layer_input_norm", width)
            self.act_fn = RowWise(ACTIVATIONS[part.activation]())

    def gated(self, x: Tensor, given: Tensor) -> Tensor:
        """`[1, T, width]` and `[1, T, size]` -> `[1, T, width]`."""
        made = self.per_layer_projection(self.act_fn(self.per_layer_input_gate(x)) * given)
        return cast("Tensor", self.post_per_layer_input_norm(made))


class ScaledLayer(_Gated):
    """Around a layer of Gemma 4."""

    layer_scalar: Tensor

    def __init__(self, part: ScaledSums, width: int, weights: WeightReader) -> None:
        super().__init__(part, width, weights)
        self.register_buffer("layer_scalar", weights.vector("layer_scalar", 1), persistent=False)

    def forward(
        self, layer: Any, x: Tensor, rotary: tuple[Tensor, Tensor], ragged: Ragged, given: Tensor | None
    ) -> Tensor:
        total: Tensor = layer.sums(x, rotary, ragged)
        if given is not None:
            total = total + self.gated(total, given)
        return total * self.layer_scalar


class StreamedLayer(_Gated):
    """Around a layer of Gemma 3n."""

    correct_output_scale: Tensor
    prediction_coefs: Tensor
    correction_coefs: Tensor

    def __init__(self, part: Streams, width: int, weights: WeightReader) -> None:
        super().__init__(part, width, weights)
        scale = weights.vector("correct_output_scale", width)
        self.register_buffer("correct_output_scale", scale, persistent=False)
        for name, outputs in (("prediction_coefs", part.count**2), ("correction_coefs", part.count)):
            found = weights.floats(f"{name}.weight", outputs, part.count)
            self.register_buffer(name, found.float(), persistent=False)
        self.modality_router = RowProducts(weights, "modality_router", part.count, width, has_bias=False)
        self.router_norm = norm_of(part.norm, weights, "router_norm", width)
        self.linear_left = weights.matrix({"linear_left": part.rank}, width, has_bias=False)
        self.linear_right = weights.matrix({"linear_right": width}, part.rank, has_bias=False)
        self.post_laurel_norm = norm_of(part.norm, weights, "post_laurel_norm", width)

    def forward(self, layer: Any, x: Tensor, rotary: tuple[Tensor, Tensor], ragged: Ragged, given: Tensor) -> Tensor:
        """`[streams, T, width]` -> the same: the layer's result for the first stream corrects all predictions."""
        first, after_mixer, second, after_feed = layer.norms
        predicted = self._predicted(x)
        active = predicted[:1]
        normed = first(active)
        total = active + after_mixer(layer.mixer(normed, rotary, ragged))
        low_rank = normed + self.post_laurel_norm(self.linear_right(self.linear_left(normed)))
        total = (total + low_rank) * 2**-0.5
        total = total + after_feed(layer.feed(second(total)))
        corrected = self._corrected(predicted, total)
        active = corrected[:1]
        return torch.cat([active, corrected[1:] + self.gated(active * self.correct_output_scale, given)])

    def _predicted(self, x: Tensor) -> Tensor:
        """Each stream plus a linear combination of all."""
        count, wide = len(x), x.float()
        mixed = _products(self._kinds(x[0]), self.prediction_coefs).unflatten(-1, (count, count))
        parts = (mixed[..., each].t()[..., None] * wide[each] for each in range(count))
        return sum(parts, wide).to(x.dtype)

    def _corrected(self, predicted: Tensor, total: Tensor) -> Tensor:
        """Each stream plus a share of the change of the first."""
        shares = _products(self._kinds(total[0]), self.correction_coefs) + 1.0
        wide = predicted.float()
        return (wide + shares.t()[..., None] * (total.float() - wide[:1])).to(total.dtype)

    def _kinds(self, rows: Tensor) -> Tensor:
        """`[T, width]` -> float32 `[T, streams]`, between -1 and 1."""
        routed = self.modality_router(self.router_norm(rows)) / rows.shape[-1]
        return cast("Tensor", ELEMENTWISE[torch.tanh](routed))


def _products(x: Tensor, weight: Tensor) -> Tensor:
    """`[T, n]` times `[m, n]` -> `[T, m]`, for small n; rows are independent."""
    parts: Iterable[Tensor] = (x[:, each, None] * weight[:, each] for each in range(x.shape[1]))
    return sum(parts, x.new_zeros(()))


@dataclass(frozen=True, slots=True)
class NormedExperts(Experts):
    """Experts beside a feed-forward; experts, feed-forward and router each have their own input norm.

    `norm`: of all of them.
    """

    norm: NormForm = _NORM


class NormedMixture(MixtureMLP):
    """The experts of a row, times their weights and scales, and the feed-forward."""

    feed: NormedExperts
    expert_scale: Tensor

    def __init__(self, feed: NormedExperts, width: int, weights: WeightReader) -> None:
        super().__init__(feed, width, weights)
        for name in _FEED_NORMS:
            setattr(self, name, norm_of(feed.norm, weights, name, width))
        scale = weights.floats("router.scale", width).float() * width**-0.5
        self.router_norm = RMSNorm(scale, feed.norm.eps)
        scales = weights.floats("router.per_expert_scale", feed.router.experts)
        self.register_buffer("expert_scale", scales.float(), persistent=False)

    def forward(self, x: Tensor, *_: object) -> Tensor:
        before, after, before_experts, after_experts = map(self.get_submodule, _FEED_NORMS)
        chosen, shares = self.feed.router.choose(self.router(self.router_norm(x[0])), None)
        mixed = self.experts(before_experts(x[0]), chosen, shares * self.expert_scale[chosen])
        dense = self.get_submodule(self.feed.shared_name)(before(x))
        return cast("Tensor", after(dense) + after_experts(mixed).view_as(x))
