"""Mixers that keep a state, as data: short convolutions, gated delta rules, Mamba 1 and 2. Reads no weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch

from engine.kv.arena import LayerKV
from engine.model.decoder.architecture import AttentionLayer, NormForm, StateMixer
from engine.model.decoder.feed_forward import GatedFeed
from engine.model.decoder.rotary import RotaryTable
from engine.model.decoder.weights import SHARED
from engine.recurrent.arena import StatePart


@dataclass(frozen=True, slots=True)
class Convolution:
    """A causal convolution of each channel over its newest inputs; `conv1d` in most checkpoints."""

    channels: int
    kernel: int
    bias: bool = False
    name: str = "conv1d"

    def state(self, dtype: torch.dtype) -> StatePart:
        """The inputs that a later row reads."""
        return StatePart((self.channels, self.kernel - 1), self.channels, dtype)


@dataclass(frozen=True, slots=True)
class ConvLayer(StateMixer):
    """A convolution between two gates: out(c * conv(b * x)) of [b, c, x] = in(row)."""

    width: int
    conv: Convolution

    def state(self, dtype: torch.dtype) -> tuple[StatePart, ...]:
        return (self.conv.state(dtype),)


@dataclass(frozen=True, slots=True)
class DeltaLayer(StateMixer):
    """The gated delta rule (arXiv 2412.06464) over what a convolution makes of queries, keys and values.

    Attributes:
        heads: of values, and of states.
        key_heads: of queries and keys; a divisor of `heads`.
        key_dim: numbers of a key.
        value_dim: numbers of a value.
        kernel: inputs that the convolution reads.
        eps: of the norm of what the rule gives, which is then gated.
        kind: of the checkpoint's matrices: Qwen 3.5's four are `joined`; Qwen 3 Next's two, `in_proj_qkvz` and
            `in_proj_ba`, are sorted `by_key_head`; others are `apart`.
        by_channel: each number of a key has a decay of its own (Kimi Delta Attention, arXiv 2510.26692).
        rank: numbers of what gates and decays are products of, each of its own; None where they are of the row.
        least: logarithms of decays are between this number and 0: this one times a sigmoid; else -softplus is in them.
        step: the largest; all are this number times a sigmoid.
        by_sigmoid: what is normed is gated by a sigmoid, and not by SiLU.
    """

    heads: int
    key_heads: int
    key_dim: int
    value_dim: int
    kernel: int
    eps: float
    kind: Literal["joined", "by_key_head", "apart"] = "joined"
    by_channel: bool = False
    rank: int | None = None
    least: float | None = None
    step: float = 1.0
    by_sigmoid: bool = False

    @property
    def sizes(self) -> tuple[int, int]:
        """Numbers of all keys and of all values of a row."""
        return self.key_heads * self.key_dim, self.heads * self.value_dim

    @property
    def decays(self) -> int:
        return self.heads * (self.key_dim if self.by_channel else 1)

    @property
    def conv(self) -> Convolution:
        """That of queries, keys and values."""
        keys, values = self.sizes
        return Convolution(2 * keys + values, self.kernel)

    @property
    def rule(self) -> StatePart:
        logged = sum(self.sizes) + self.decays
        return StatePart((self.heads, self.key_dim, self.value_dim), logged, torch.float32)

    @property
    def matrices(self) -> tuple[dict[str, int], dict[str, int]]:
        """Those of queries, keys, values and gates, and those of steps and decays, with their outputs."""
        keys, values = self.sizes
        if self.kind == "by_key_head":
            return {"in_proj_qkvz": 2 * (keys + values)}, {"in_proj_ba": 2 * self.heads}
        if self.kind == "joined":
            return {"in_proj_qkv": 2 * keys + values, "in_proj_z": values}, {
                "in_proj_b": self.heads,
                "in_proj_a": self.heads,
            }
        first = {"q_proj": keys, "k_proj": keys, "v_proj": values}
        if self.rank is None:
            return first | {"g_proj": values}, {"b_proj": self.heads, "f_proj": self.decays}
        return first | {"g_a_proj": self.rank}, {"b_proj": self.heads, "f_a_proj": self.rank}

    @property
    def seconds(self) -> dict[str, int]:
        """The matrices whose products are gates and decays, where those of a row are not; with their outputs."""
        return {} if self.rank is None else {"g_b_proj": self.sizes[1], "f_b_proj": self.decays}

    @property
    def ends(self) -> tuple[str, str]:
        """The names of the norm and of the output's matrix."""
        return ("o_norm", "o_proj") if self.kind == "apart" else ("norm", "out_proj")

    def state(self, dtype: torch.dtype) -> tuple[StatePart, ...]:
        return self.conv.state(dtype), self.rule


@dataclass(frozen=True, slots=True)
class Mamba2Layer(StateMixer):
    """The state space of Mamba 2 (arXiv 2405.21060).

    Attributes:
        heads: of states.
        head_dim: numbers of a head.
        size: numbers of a key: rows of a state.
        groups: of heads that share keys and queries.
        conv: of inputs, keys and queries.
        eps: of the norm of what is gated; None where there is none.
        norm_groups: parts of a row that are normed each by itself.
        norm_first: what is normed is gated, and not what is gated normed.
        limits: of step sizes.
        bias: the product of the input has one.
        out_bias: the product of the output has one.
        factors: of the gate, the input, keys, queries and steps, after their product.
    """

    heads: int
    head_dim: int
    size: int
    groups: int
    kernel: int
    conv_bias: bool
    eps: float | None
    norm_groups: int = 1
    norm_first: bool = False
    limits: tuple[float, float] = (0.0, float("inf"))
    bias: bool = False
    out_bias: bool = False
    factors: tuple[float, ...] | None = None

    @property
    def inner(self) -> int:
        """Numbers of all heads of a row."""
        return self.heads * self.head_dim

    @property
    def conv(self) -> Convolution:
        """That of inputs, keys and queries."""
        return Convolution(self.inner + 2 * self.groups * self.size, self.kernel, self.conv_bias)

    @property
    def rule(self) -> StatePart:
        logged = self.groups * self.size + self.inner + self.heads
        return StatePart((self.heads, self.size, self.head_dim), logged, torch.float32)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Numbers of the gate, the input, keys, queries and steps of a row."""
        return self.inner, self.inner, self.groups * self.size, self.groups * self.size, self.heads

    def state(self, dtype: torch.dtype) -> tuple[StatePart, ...]:
        return self.conv.state(dtype), self.rule


@dataclass(frozen=True, slots=True)
class Mamba1Layer(StateMixer):
    """The selective state space of Mamba (arXiv 2312.00752).

    Attributes:
        inner: numbers of a row inside of the layer.
        size: numbers of a key: rows of a state.
        rank: numbers that step sizes are made of.
        kernel: inputs that the convolution reads.
        conv_bias: the convolution has a bias.
        bias: the products of the input and of the output have one.
        norm: of what steps, keys and queries are made of, if any.
        heads: parts of a row, each of which has steps, keys and queries of its own, and matrices that make them
            (Zamba), which stay floats; inputs and gates of `in_proj` are then neighbours. None where there are none.
    """

    inner: int
    size: int
    rank: int
    kernel: int
    conv_bias: bool
    bias: bool = False
    norm: NormForm | None = None
    heads: int | None = None

    @property
    def conv(self) -> Convolution:
        return Convolution(self.inner, self.kernel, self.conv_bias)

    @property
    def each(self) -> int:
        """Numbers of a head; of the whole row where there are none."""
        return self.inner // (self.heads or 1)

    @property
    def rule(self) -> StatePart:
        """The state of the rule, of a head."""
        return StatePart((self.size, self.each), self.size + 2 * self.each, torch.float32)

    @property
    def norms(self) -> dict[str, int]:
        """The norms, by name, with the sizes of what they norm."""
        sizes = {"dt_layernorm": self.rank, "b_layernorm": self.size, "c_layernorm": self.size}
        return {} if self.norm is None else sizes

    def state(self, dtype: torch.dtype) -> tuple[StatePart, ...]:
        return self.conv.state(dtype), *[self.rule] * (self.heads or 1)


@dataclass(frozen=True, slots=True)
class BesideLayer(StateMixer):
    """Mamba 2 and attention that read the same row; results are multiplied by `scales` and added."""

    mamba: Mamba2Layer
    attention: AttentionLayer
    scales: tuple[float, float]

    @property
    def kv(self) -> LayerKV:
        return self.attention.kv

    @property
    def rotary(self) -> RotaryTable:
        return self.attention.rotary

    def state(self, dtype: torch.dtype) -> tuple[StatePart, ...]:
        return self.mamba.state(dtype)


@dataclass(frozen=True, slots=True)
class FeedLayer(StateMixer):
    """A feed-forward in a mixer's place, which keeps nothing."""

    feed: Any

    def state(self, dtype: torch.dtype) -> tuple[StatePart, ...]:
        return ()


@dataclass(frozen=True, slots=True)
class SharedBlock:
    """feed(norm(attention(norm([x, embeddings])))), shared by several layers (Zamba, arXiv 2405.16712).

    Attributes:
        number: of the block.
        attention: reads both halves.
        feed: of the block.
        norm: form of all norms.
        ranks: of what each layer adds to the matrices of attention and of the feed-forward (arXiv 2411.15242); 0 for
            nothing.
    """

    number: int
    attention: AttentionLayer
    feed: GatedFeed
    norm: NormForm
    ranks: tuple[int, int] = (0, 0)

    @property
    def path(self) -> str:
        return f"{SHARED}{self.number}."

    def added(self, layer: int) -> tuple[dict[str, int], dict[str, int]]:
        """What a layer adds to attention and to the feed-forward: names of pairs of matrices, with their outputs."""
        parts = {f"linear_{part}_adapter_list": size for part, size in zip("qkv", self.attention.sizes, strict=True)}
        both = parts, {"gate_up_proj_adapter_list": 2 * self.feed.inner}
        first, second = ({f"{name}.{layer}": size for name, size in each.items()} for each in both)
        return first, second


@dataclass(frozen=True, slots=True)
class SharedLayer(StateMixer):
    """mamba(norm(x + linear(block([x, embeddings])))); `number`: which of such layers it is."""

    block: SharedBlock
    mamba: Mamba1Layer | Mamba2Layer
    number: int

    @property
    def kv(self) -> LayerKV:
        return self.block.attention.kv

    @property
    def rotary(self) -> RotaryTable:
        return self.block.attention.rotary

    def state(self, dtype: torch.dtype) -> tuple[StatePart, ...]:
        return self.mamba.state(dtype)
