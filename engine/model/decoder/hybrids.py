"""Families with layers that keep a state: short convolutions, gated delta rules, Mamba 1 and 2.

As in `families.py`, a config that asks for what the table does not have gives None.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import torch

from engine.model.decoder.architecture import (
    Architecture,
    AttentionLayer,
    GatedFeed,
    HeadNorm,
    Layer,
    NormForm,
    Norms,
    PlainFeed,
    Shapes,
    StateMixer,
    matrix_shapes,
)
from engine.model.decoder.builders import FULL, gated, grouped
from engine.recurrent.parts import StatePart

LINEAR = "linear_attention"  # as configs call layers that keep a state
_SILU = ("silu", "swish")


@dataclass(frozen=True, slots=True)
class Convolution:
    """A causal convolution of each channel over its newest inputs; `conv1d` in most checkpoints."""

    channels: int
    kernel: int
    bias: bool = False
    name: str = "conv1d"

    def shapes(self) -> Shapes:
        """The shapes of its weights."""
        found: Shapes = {f"{self.name}.weight": (self.channels, 1, self.kernel)}
        return found | ({f"{self.name}.bias": (self.channels,)} if self.bias else {})

    def state(self, dtype: torch.dtype) -> StatePart:
        """The inputs that a later row reads."""
        return StatePart((self.channels, self.kernel - 1), self.channels, dtype)


@dataclass(frozen=True, slots=True)
class ConvLayer(StateMixer):
    """A convolution between two gates: out(c * conv(b * x)) of [b, c, x] = in(row)."""

    width: int
    conv: Convolution

    def state(self, dtype: torch.dtype) -> tuple[StatePart, ...]:
        """See `StateMixer`."""
        return (self.conv.state(dtype),)

    def shapes(self, width: int) -> Shapes:
        """See `LayerPart`."""
        found = matrix_shapes("in_proj", 3 * width, width, has_bias=self.conv.bias)
        return found | matrix_shapes("out_proj", width, width, has_bias=self.conv.bias) | self.conv.shapes()

    def row_sizes(self) -> set[int]:
        """See `LayerPart`."""
        return set()


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
        by_key_head: the checkpoint has two matrices, `in_proj_qkvz` and `in_proj_ba`, whose outputs are sorted by the
            heads of keys; else four.
    """

    heads: int
    key_heads: int
    key_dim: int
    value_dim: int
    kernel: int
    eps: float
    by_key_head: bool = False

    @property
    def sizes(self) -> tuple[int, int]:
        """Numbers of all keys and of all values of a row."""
        return self.key_heads * self.key_dim, self.heads * self.value_dim

    @property
    def conv(self) -> Convolution:
        """That of queries, keys and values."""
        keys, values = self.sizes
        return Convolution(2 * keys + values, self.kernel)

    @property
    def rule(self) -> StatePart:
        """The state of the rule."""
        logged = sum(self.sizes) + self.heads
        return StatePart((self.heads, self.key_dim, self.value_dim), logged, torch.float32)

    @property
    def matrices(self) -> tuple[dict[str, int], dict[str, int]]:
        """Those of queries, keys, values and gates, and those of steps and decays, with their outputs."""
        keys, values = self.sizes
        if self.by_key_head:
            return {"in_proj_qkvz": 2 * (keys + values)}, {"in_proj_ba": 2 * self.heads}
        return {"in_proj_qkv": 2 * keys + values, "in_proj_z": values}, {
            "in_proj_b": self.heads,
            "in_proj_a": self.heads,
        }

    def state(self, dtype: torch.dtype) -> tuple[StatePart, ...]:
        """See `StateMixer`."""
        return self.conv.state(dtype), self.rule

    def shapes(self, width: int) -> Shapes:
        """See `LayerPart`."""
        first, second = self.matrices
        found: Shapes = {f"{name}.weight": (size, width) for name, size in (first | second).items()}
        found |= {"A_log": (self.heads,), "dt_bias": (self.heads,), "norm.weight": (self.value_dim,)}
        return found | {"out_proj.weight": (width, self.sizes[1])} | self.conv.shapes()

    def row_sizes(self) -> set[int]:
        """See `LayerPart`."""
        return {self.sizes[1]}


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
        """The state of the rule."""
        logged = self.groups * self.size + self.inner + self.heads
        return StatePart((self.heads, self.size, self.head_dim), logged, torch.float32)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Numbers of the gate, the input, keys, queries and steps of a row."""
        return self.inner, self.inner, self.groups * self.size, self.groups * self.size, self.heads

    def state(self, dtype: torch.dtype) -> tuple[StatePart, ...]:
        """See `StateMixer`."""
        return self.conv.state(dtype), self.rule

    def shapes(self, width: int) -> Shapes:
        """See `LayerPart`."""
        found = matrix_shapes("in_proj", sum(self.sizes), width, has_bias=self.bias)
        found |= matrix_shapes("out_proj", width, self.inner, has_bias=self.out_bias)
        found |= dict.fromkeys(("A_log", "D", "dt_bias"), (self.heads,))
        return found | self.conv.shapes() | ({} if self.eps is None else {"norm.weight": (self.inner,)})

    def row_sizes(self) -> set[int]:
        """See `LayerPart`."""
        return {self.inner}


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
    """

    inner: int
    size: int
    rank: int
    kernel: int
    conv_bias: bool
    bias: bool = False
    norm: NormForm | None = None

    @property
    def conv(self) -> Convolution:
        """That of inputs."""
        return Convolution(self.inner, self.kernel, self.conv_bias)

    @property
    def rule(self) -> StatePart:
        """The state of the rule."""
        return StatePart((self.size, self.inner), self.size + 2 * self.inner, torch.float32)

    @property
    def norms(self) -> dict[str, int]:
        """The norms, by name, with the sizes of what they norm."""
        sizes = {"dt_layernorm": self.rank, "b_layernorm": self.size, "c_layernorm": self.size}
        return {} if self.norm is None else sizes

    def state(self, dtype: torch.dtype) -> tuple[StatePart, ...]:
        """See `StateMixer`."""
        return self.conv.state(dtype), self.rule

    def shapes(self, width: int) -> Shapes:
        """See `LayerPart`."""
        found = matrix_shapes("in_proj", 2 * self.inner, width, has_bias=self.bias)
        found |= matrix_shapes("x_proj", self.rank + 2 * self.size, self.inner, has_bias=False)
        found |= matrix_shapes("dt_proj", self.inner, self.rank, has_bias=True)
        found |= matrix_shapes("out_proj", width, self.inner, has_bias=self.bias)
        for name, size in self.norms.items():
            assert self.norm is not None
            found |= self.norm.shapes(f"{name}.", size)
        return found | {"A_log": (self.inner, self.size), "D": (self.inner,)} | self.conv.shapes()

    def row_sizes(self) -> set[int]:
        """See `LayerPart`."""
        return {self.inner, self.rank}


Feeds = GatedFeed | PlainFeed


def of_kinds(config: Any, kinds: Seq[str], layers: Mapping[str, Layer | None], **more: Any) -> Architecture | None:
    """A model whose layers are of these kinds; None where one of them is not in the table."""
    found = [layers.get(kind) for kind in kinds]
    made = tuple(layer for layer in found if layer is not None)
    if len(made) != len(found):
        return None
    return Architecture(made, config.vocab_size, config.hidden_size, is_tied=bool(config.tie_word_embeddings), **more)


def layer(
    mixer: AttentionLayer | StateMixer | None, feed: Feeds | None, norms: Norms, names: tuple[str, str]
) -> Layer | None:
    """A layer; None where one of its parts is not in the table."""
    return None if mixer is None or feed is None else Layer(mixer, feed, norms, names=names)


def _lfm2(config: Any) -> Architecture | None:
    norm, norms, feed = NormForm(config.norm_eps), ("operator_norm", None, "ffn_norm", None), "feed_forward"
    inner = config.intermediate_size
    if config.block_auto_adjust_ff_dim:
        inner = int(2 * inner / 3)
        if config.block_ffn_dim_multiplier is not None:
            whole = config.block_multiple_of
            inner = -(-int(config.block_ffn_dim_multiplier * inner) // whole) * whole
    mlp = GatedFeed(inner, "silu")
    conv = ConvLayer(
        config.hidden_size, Convolution(config.hidden_size, config.conv_L_cache, bool(config.conv_bias), "conv")
    )
    of_heads = HeadNorm(norm, names=("q_layernorm", "k_layernorm"))
    attention = grouped(config, bias=False, norm=of_heads, out_name="out_proj")
    made = {"conv": layer(conv, mlp, norms, ("conv", feed)), FULL: layer(attention, mlp, norms, ("self_attn", feed))}
    return of_kinds(config, config.layer_types, made, norm=norm, names=_LFM2)


def _delta(config: Any, **more: Any) -> DeltaLayer | None:
    """The delta rule of Qwen's families."""
    heads, key_heads = config.linear_num_value_heads, config.linear_num_key_heads
    if heads % key_heads or config.hidden_act not in _SILU:
        return None
    sizes = heads, key_heads, config.linear_key_head_dim, config.linear_value_head_dim, config.linear_conv_kernel_dim
    return DeltaLayer(*sizes, config.rms_norm_eps, **more)


def _qwen3_5(config: Any) -> Architecture | None:
    norm, norms = (
        NormForm(config.rms_norm_eps, plus_one=True),
        ("input_layernorm", None, "post_attention_layernorm", None),
    )
    attention, feed = grouped(config, norm=HeadNorm(norm), gated=True), gated(config, bias=False)
    made = {
        LINEAR: layer(_delta(config), feed, norms, ("linear_attn", "mlp")),
        FULL: layer(attention, feed, norms, ("self_attn", "mlp")),
    }
    return of_kinds(config, config.layer_types, made, norm=norm)


def _mamba2(config: Any) -> Architecture | None:
    inner = config.num_heads * config.head_dim
    if config.hidden_act not in _SILU or inner != int(config.expand * config.hidden_size):
        return None
    low, high = config.time_step_limit
    mixer = Mamba2Layer(
        config.num_heads, config.head_dim, config.state_size, config.n_groups, config.conv_kernel,
        bool(config.use_conv_bias), config.layer_norm_epsilon, config.n_groups, limits=(low, high),
        bias=bool(config.use_bias), out_bias=bool(config.use_bias),
    )  # fmt: skip
    return _alone(config, mixer)


def _mamba(config: Any) -> Architecture | None:
    if config.hidden_act not in _SILU:
        return None
    mixer = Mamba1Layer(
        config.intermediate_size, config.state_size, config.time_step_rank, config.conv_kernel,
        bool(config.use_conv_bias), bool(config.use_bias),
    )  # fmt: skip
    return _alone(config, mixer)


def _alone(config: Any, mixer: StateMixer) -> Architecture:
    """A model whose layers are a mixer alone."""
    only = Layer(mixer, None, ("norm", None, None, None), names=("mamba", ""))
    return Architecture(
        (only,) * config.num_hidden_layers, config.vocab_size, config.hidden_size,
        NormForm(config.layer_norm_epsilon), is_tied=bool(config.tie_word_embeddings), names=_MAMBA,
        wide=bool(config.residual_in_fp32),
    )  # fmt: skip


_FEED = (
    (r"\.feed_forward\.w1\.", ".feed_forward.gate_proj."),
    (r"\.feed_forward\.w3\.", ".feed_forward.up_proj."),
    (r"\.feed_forward\.w2\.", ".feed_forward.down_proj."),
)
_LFM2 = ((r"(^|\.)embedding_norm\.", r"\1norm."), *_FEED)
_MAMBA = (
    (r"^(?:backbone|model)\.embeddings?\.", "model.embed_tokens."),
    (r"^backbone\.", "model."),
    (r"^model\.norm_f\.", "model.norm."),
    (r"\.mixer\.", ".mamba."),
)
# By model type.
HYBRIDS: dict[str, Callable[[Any], Architecture | None]] = {
    "lfm2": _lfm2,
    "mamba": _mamba,
    "mamba2": _mamba2,
    "qwen3_5_text": _qwen3_5,
}
