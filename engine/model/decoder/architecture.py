"""Architectures as data: sizes, norms, windows and rotary positions of each layer. Reads no weights.

Each part defines the shapes of its weights, by their names in a checkpoint below its own name. `families/` fills in the
values of each family.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from pilotfish.engine.attention.reference import AttentionSpec
from pilotfish.engine.kv.arena import LayerKV
from pilotfish.engine.model.decoder.rotary import QueryGrowth, RotaryTable
from pilotfish.engine.recurrent.arena import StatePart


class Mixer:
    """The part of a layer that reads other positions: attention or a recurrent layer."""

    @property
    def kv(self) -> LayerKV | None:
        """The layer's K/V per position."""
        return None

    @property
    def rotary(self) -> RotaryTable:
        """Its rotary positions."""
        return RotaryTable.none(0)

    def state(self, dtype: torch.dtype) -> tuple[StatePart, ...]:
        """The parts of a sequence's state, in the order of the pass; `dtype` is that of rows."""
        return ()


@dataclass(frozen=True, slots=True)
class FeedLayer(Mixer):
    """A feed-forward as mixer, without state."""

    feed: Any


@dataclass(frozen=True, slots=True)
class NormForm:
    """RMSNorm (Zhang and Sennrich 2019, arXiv 1910.07467), or LayerNorm (Ba et al. 2016, arXiv 1607.06450).

    Attributes:
        eps: added to the mean of squares.
        centred: LayerNorm, which first subtracts the mean.
        plus_one: the weight is 1 plus the stored value.
        has_weight: else all weights are 1.
        has_bias: a bias is added.
    """

    eps: float
    centred: bool = False
    plus_one: bool = False
    has_weight: bool = True
    has_bias: bool = False


@dataclass(frozen=True, slots=True)
class HeadNorm:
    """A norm of queries and one of keys.

    Attributes:
        form: of both.
        extent: per head with a shared weight (`head`) or its own (`heads`), or over all heads together (`all`).
        turned: applied after the rotation.
        listed: the checkpoint stores the weight of each head separately.
        names: of both norms.
    """

    form: NormForm
    extent: Literal["head", "heads", "all"] = "head"
    turned: bool = False
    listed: bool = False
    names: tuple[str, str] = ("q_norm", "k_norm")

    def size(self, heads: int, head_dim: int) -> tuple[int, ...]:
        """The shape of a weight."""
        return {"head": (head_dim,), "heads": (heads, head_dim), "all": (heads * head_dim,)}[self.extent]


@dataclass(frozen=True, slots=True)
class HeadGate:
    """The outputs of heads are multiplied by activated gates: one per element, or `by_head` one per head.

    `name`: of the gates' matrix; None if their rows follow those of the head in `q_proj`.
    """

    name: str | None = None
    activation: Literal["sigmoid", "softplus"] = "sigmoid"
    by_head: bool = False


@dataclass(frozen=True, slots=True)
class AttentionLayer(Mixer):
    """Grouped attention with rotary positions.

    Attributes:
        heads: of queries.
        kv_heads: of keys and values; a divisor of `heads`.
        head_dim: size of a head.
        spec: scale, window, chunk and cap of the scores.
        rotary: of queries and keys.
        interleaved: in the checkpoint, rotated pairs are adjacent; else they are (i, i + n / 2).
        norm: of queries and keys, if any.
        qkv_bias: the projections of queries, keys and values have a bias.
        out_bias: the output projection has one.
        joined: the checkpoint stores queries, keys and values in one matrix, `qkv_proj`.
        groups: number of groups of its outputs, each with its own queries, keys and values.
        values_first: in a group, values precede keys.
        clip: queries, keys and values are clamped to -clip..clip.
        growth: scaling of queries by position.
        has_sinks: each head has an additional score without a value.
        out_norm: norm of the output projection's input, `attn_sub_norm`.
        gate: of the heads' outputs, if any.
        out_name: of the output projection.
        reads: input width, if it differs from the output width.
        value_norm: norm of each value head.
        same_values: values are the projected keys, before norm and rotation.
        source: an earlier layer whose keys and values it reads instead of its own.
    """

    heads: int
    kv_heads: int
    head_dim: int
    spec: AttentionSpec
    rotary: RotaryTable = field()  # without a default, which the property of `Mixer` would be
    interleaved: bool = False
    norm: HeadNorm | None = None
    qkv_bias: bool = False
    out_bias: bool = False
    joined: bool = False
    groups: int = 1
    values_first: bool = False
    clip: float | None = None
    growth: QueryGrowth | None = None
    has_sinks: bool = False
    out_norm: NormForm | None = None
    gate: HeadGate | None = None
    out_name: str = "o_proj"
    reads: int | None = None
    value_norm: NormForm | None = None
    same_values: bool = False
    source: int | None = None

    @property
    def kv(self) -> LayerKV:
        return LayerKV(self.kv_heads, self.head_dim, self.head_dim, source=self.source)

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Widths of the queries, keys and values of a row."""
        keys = self.kv_heads * self.head_dim if self.source is None else 0
        return self.heads * self.head_dim, keys, keys

    @property
    def firsts(self) -> dict[str, int]:
        """The input matrices, with their numbers of outputs."""
        queries, keys, values = self.sizes
        if self.joined:
            return {"qkv_proj": sum(self.sizes)}
        in_queries = self.gates if self.gate is not None and self.gate.name is None else 0
        found = {"q_proj": queries + in_queries} | ({"k_proj": keys} if keys else {})
        found |= {"v_proj": values} if values and not self.same_values else {}
        return found | ({self.gate.name: self.gates} if self.gate is not None and self.gate.name is not None else {})

    @property
    def normed(self) -> dict[str, int]:
        """Norms of heads with weights, with their numbers of heads."""
        names = () if self.norm is None else self.norm.names[: 2 if self.source is None else 1]
        return dict(zip(names, (self.heads, self.kv_heads), strict=False))

    @property
    def gates(self) -> int:
        """Number of gates of a row."""
        return 0 if self.gate is None else self.heads * (1 if self.gate.by_head else self.head_dim)

    def order(self) -> Tensor | None:
        """The index in the checkpoint of each element of a head; None: equal.

        Element i is rotated with element i + head_dim / 2, and pairs that are not rotated have frequency 0. A head of 8
        elements, of which 4 are rotated as adjacent pairs: [0, 2, 4, 5, 1, 3, 6, 7].
        """
        turned = self.head_dim - 2 * self.rotary.still
        if not turned or not (self.interleaved or self.rotary.still):
            return None
        pairs = torch.arange(turned).view(-1, 2).t() if self.interleaved else torch.arange(turned).view(2, -1)
        return torch.cat([pairs, torch.arange(turned, self.head_dim).view(2, -1)], 1).flatten()


# Names of a layer's norms: before and after the mixer, before and after the feed-forward.
Norms = tuple[str | None, str | None, str | None, str | None]
TWO_NORMS: Norms = ("input_layernorm", None, "post_attention_layernorm", None)
FOUR_NORMS: Norms = (
    "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm",
)  # fmt: skip
NORMS_AFTER: Norms = (None, "post_attention_layernorm", None, "post_feedforward_layernorm")


@dataclass(frozen=True, slots=True)
class Layer:
    """x += mixer(norm(x)); x += feed(norm(x)), with norms of both results in some families.

    Attributes:
        mixer: the part that reads other positions.
        feed: the feed-forward; None in families whose layers have only a mixer.
        norms: names of the norms, in the form of `TWO_NORMS`.
        parallel: both read the layer's input x; without a second norm they read the same normalised row.
        scale: factor of both results before they are added.
        normed_sums: output norms are applied to the sum of x and the result.
        names: of the mixer and of the feed-forward.
        around: the structure that contains the layer, with the same rows (`gemma.py`).
        summed: the results of both are summed over shards (`share.py`).
        beside, keeps_normed: norm of a second row, which the mixer reads before x; x is then replaced by its normalised
        row.
    """

    mixer: Mixer
    feed: Any
    norms: Norms = TWO_NORMS
    parallel: bool = False
    scale: float = 1.0
    normed_sums: bool = False
    names: tuple[str, str] = ("self_attn", "mlp")
    around: Any = None
    summed: tuple[bool, bool] = (False, False)
    beside: str | None = None
    keeps_normed: bool = False

    @property
    def is_plain(self) -> bool:
        """Whether results are added unchanged and sequentially."""
        return self.scale == 1 and not self.parallel and not self.normed_sums and self.around is None

    @property
    def parts(self) -> tuple[tuple[str, Any], ...]:
        """Mixer, feed-forward and the structure around them, by name."""
        mixer, feed = self.names
        others = (feed, self.feed), ("around", self.around)
        return ((mixer, self.mixer), *((name, part) for name, part in others if part is not None))


@dataclass(frozen=True, slots=True)
class LearnedPositions:
    """A table of vectors, `model.embed_positions`: row position + offset is added to a token's embedding.

    `waves`: computed, not in the checkpoint; row p is the sines, then the cosines, of p * 10000^(-i / waves).
    """

    rows: int
    offset: int = 0
    waves: int | None = None


@dataclass(frozen=True, slots=True)
class Architecture:
    """A decoder.

    Attributes:
        layers: of the decoder.
        vocab_size: rows of the output matrix.
        spare_rows: additional rows of the embedding table.
        width: hidden size.
        norm: form of all norms except those of heads.
        has_final_norm: the output matrix reads normalised rows.
        positions: learned position embeddings, if any.
        embedding_width: of a token's embedding, if it is not `width`; `model.project_in` and `model.project_out`
        convert between them. normed_embeddings: embeddings are normalised by `model.embed_norm`.
        embedding_scale: factor of embeddings, in the type of the model.
        logit_scale: factor of logits.
        softcap: logits become tanh(logit / softcap) * softcap.
        is_tied: the output matrix is the embedding table.
        head_bias: the output matrix has a bias.
        names: regular expressions for names of weights in a checkpoint, with their replacements.
        transposed: the checkpoint stores the matrices of layers as `[inputs, outputs]`.
        wide: hidden states between layers are float32.
        per_layer: per-layer embeddings (`gemma.py`).
    """

    layers: tuple[Layer, ...]
    vocab_size: int
    width: int
    norm: NormForm
    spare_rows: int = 0
    has_final_norm: bool = True
    positions: LearnedPositions | None = None
    embedding_width: int | None = None
    normed_embeddings: bool = False
    embedding_scale: float | None = None
    logit_scale: float | None = None
    softcap: float | None = None
    is_tied: bool = False
    head_bias: bool = False
    names: tuple[tuple[str, str], ...] = ()
    transposed: bool = False
    wide: bool = False
    per_layer: Any = None

    @property
    def attention(self) -> AttentionLayer:
        """The first attention layer."""
        return next(layer.mixer for layer in self.layers if isinstance(layer.mixer, AttentionLayer))

    def state(self, dtype: torch.dtype, depth: int) -> tuple[StatePart, ...]:
        """The parts of the state of the first `depth` layers, in the order of the pass."""
        return tuple(part for layer in self.layers[:depth] for part in layer.mixer.state(dtype))

    @property
    def kv(self) -> tuple[LayerKV | None, ...]:
        """Each layer's K/V per position."""
        return tuple(layer.mixer.kv for layer in self.layers)


def architecture_of(model: nn.Module) -> Architecture | None:
    """The architecture of a decoder; None for a transformers module."""
    found = getattr(model, "architecture", None)
    return found if isinstance(found, Architecture) else None
