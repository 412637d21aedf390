"""What a model computes, as data: sizes, norms, windows and rotary positions, layer by layer. Reads no weights.

Each part has the shapes of its weights, by the names that they have in a checkpoint below its own name. Which numbers
a family has is in `families/`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from engine.attention.reference import AttentionSpec
from engine.kv.arena import LayerKV
from engine.model.decoder.rotary import QueryGrowth, RotaryTable
from engine.recurrent.arena import StatePart


class Mixer:
    """What looks at other positions: the description of a module that reads the weights of a layer's mixer."""

    @property
    def kv(self) -> LayerKV | None:
        """What the layer keeps of a position."""
        return None

    @property
    def rotary(self) -> RotaryTable:
        """Its rotary positions."""
        return RotaryTable.none(0)

    def state(self, dtype: torch.dtype) -> tuple[StatePart, ...]:
        """The parts of a sequence's state, in the order in which a pass comes to them; `dtype` is that of rows."""
        return ()


@dataclass(frozen=True, slots=True)
class FeedLayer(Mixer):
    """A feed-forward in a mixer's place, which keeps nothing."""

    feed: Any


@dataclass(frozen=True, slots=True)
class NormForm:
    """RMSNorm (Zhang and Sennrich 2019, arXiv 1910.07467), or LayerNorm (Ba et al. 2016, arXiv 1607.06450).

    Attributes:
        eps: what is added to the mean of squares.
        centred: LayerNorm, which takes off the mean first.
        plus_one: the weight is 1 plus what is stored.
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
        extent: each head with one weight for all (`head`) or with its own (`heads`); all heads together (`all`).
        turned: they are applied to what is rotated already.
        listed: the checkpoint has the weight of each head by itself.
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
    """What heads give is multiplied by an activation of gates: one for each number, or `by_head` one for all of a head.

    `name`: of the gates' matrix; None where their rows follow the head's in `q_proj`.
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
        head_dim: numbers of a head.
        spec: scale, window, chunk and cap of the scores.
        rotary: of queries and keys.
        interleaved: pairs that are rotated are neighbours in the checkpoint; else they are halves of what is rotated.
        norm: of queries and keys, if they have any.
        qkv_bias: the products of queries, keys and values have a bias.
        out_bias: the product of the output has one.
        joined: the checkpoint has queries, keys and values in one matrix, `qkv_proj`.
        groups: of its outputs, each of which has queries, keys and values of its own.
        values_first: in a group values come before keys.
        clip: queries, keys and values are between this number and its negative.
        growth: of queries with their positions.
        has_sinks: each head has one more score, which has no value.
        out_norm: of what the output's matrix reads, `attn_sub_norm`.
        gate: of what heads give, if they have any.
        out_name: of the output's matrix.
        reads: numbers of a row that it reads, where they are not those of a row that it gives.
        value_norm: of each head of values.
        same_values: values are the products of keys, before their norm and rotation.
        source: an earlier layer, whose keys and values it reads; it has none of its own.
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
        """Numbers of the queries, keys and values of a row."""
        keys = self.kv_heads * self.head_dim if self.source is None else 0
        return self.heads * self.head_dim, keys, keys

    @property
    def firsts(self) -> dict[str, int]:
        """The matrices that read a row, with their outputs."""
        queries, keys, values = self.sizes
        if self.joined:
            return {"qkv_proj": sum(self.sizes)}
        in_queries = self.gates if self.gate is not None and self.gate.name is None else 0
        found = {"q_proj": queries + in_queries} | ({"k_proj": keys} if keys else {})
        found |= {"v_proj": values} if values and not self.same_values else {}
        return found | ({self.gate.name: self.gates} if self.gate is not None and self.gate.name is not None else {})

    @property
    def normed(self) -> dict[str, int]:
        """Norms of heads that have weights, with how many heads each is for."""
        names = () if self.norm is None else self.norm.names[: 2 if self.source is None else 1]
        return dict(zip(names, (self.heads, self.kv_heads), strict=False))

    @property
    def gates(self) -> int:
        """Gates of a row."""
        return 0 if self.gate is None else self.heads * (1 if self.gate.by_head else self.head_dim)

    def order(self) -> Tensor | None:
        """Which number of a head in the checkpoint each number here is; None where they are the same.

        Here number i is rotated with number i + head_dim / 2, and pairs that stay as they are have a frequency of 0.
        A head of 8 numbers, of which 4 are rotated as neighbours: [0, 2, 4, 5, 1, 3, 6, 7].
        """
        turned = self.head_dim - 2 * self.rotary.still
        if not turned or not (self.interleaved or self.rotary.still):
            return None
        pairs = torch.arange(turned).view(-1, 2).t() if self.interleaved else torch.arange(turned).view(2, -1)
        return torch.cat([pairs, torch.arange(turned, self.head_dim).view(2, -1)], 1).flatten()


# Names of a layer's norms: before the mixer, of what the mixer gives, before the feed-forward, of what that gives.
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
        mixer: what looks at other positions.
        feed: what looks at one; None in families whose layers have a mixer only.
        norms: names of the norms, as `TWO_NORMS` has them.
        parallel: both read x as it was before the layer; without a second norm they read the same normed row.
        scale: what both results are multiplied by before they are added.
        normed_sums: the norms of results are of the sums of x and the results.
        names: of the mixer and of the feed-forward.
        around: what the layer is a part of, with the same rows (`gemma.py`).
        summed: the results of both are summed over shares (`share.py`).
        beside, keeps_normed: the norm of a second row, which the mixer reads first; it adds to its own row, normed.
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
        """Whether results are added as they are, one after the other."""
        return self.scale == 1 and not self.parallel and not self.normed_sums and self.around is None

    @property
    def parts(self) -> tuple[tuple[str, Any], ...]:
        """Mixer, feed-forward and what is around them, by name."""
        mixer, feed = self.names
        others = (feed, self.feed), ("around", self.around)
        return ((mixer, self.mixer), *((name, part) for name, part in others if part is not None))


@dataclass(frozen=True, slots=True)
class LearnedPositions:
    """A table of vectors, `model.embed_positions`: row position + offset is added to a token's embedding.

    `waves`: no checkpoint has it; row p is the sines, then the cosines, of p * 10000^(-i / waves).
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
        spare_rows: that the table of embeddings has besides.
        width: numbers of a hidden state.
        norm: of every norm but those of heads.
        has_final_norm: the output matrix reads normed rows.
        positions: that embeddings are added to, if they are learned.
        embedding_width: of a token's embedding, where it is not `width`; `model.project_in` and `model.project_out`
            are between the two.
        normed_embeddings: the first layer reads what `model.embed_norm` makes of embeddings.
        embedding_scale: what embeddings are multiplied by, in the type of the model.
        logit_scale: what logits are multiplied by.
        softcap: logits become tanh(logit / softcap) * softcap.
        is_tied: the output matrix is the table of embeddings.
        head_bias: the output matrix has a bias.
        names: regular expressions for names of weights in a checkpoint, with what they become.
        transposed: the checkpoint has the matrices of layers as `[inputs, outputs]`.
        wide: hidden states between layers are float32.
        per_layer: what each layer is given of a token's embedding (`gemma.py`).
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
        """That of the first layer that is one."""
        return next(layer.mixer for layer in self.layers if isinstance(layer.mixer, AttentionLayer))

    def state(self, dtype: torch.dtype, depth: int) -> tuple[StatePart, ...]:
        """The parts of the state of the first `depth` layers, in the order in which a pass comes to them."""
        return tuple(part for layer in self.layers[:depth] for part in layer.mixer.state(dtype))

    @property
    def kv(self) -> tuple[LayerKV | None, ...]:
        """What each layer keeps of a position."""
        return tuple(layer.mixer.kv for layer in self.layers)


def architecture_of(model: nn.Module) -> Architecture | None:
    """The architecture of a decoder, None for a module of transformers."""
    found = getattr(model, "architecture", None)
    return found if isinstance(found, Architecture) else None
