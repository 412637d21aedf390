"""Recurrent mixers: short convolutions, gated delta rules, Mamba 1 and 2, and shared blocks.

Each is a description, which reads no weights, and a module over the state slots of a ragged batch.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pilotfish.engine.attention.registry import Ragged
from pilotfish.engine.kv.arena import LayerKV
from pilotfish.engine.model.decoder.architecture import AttentionLayer, Mixer, NormForm
from pilotfish.engine.model.decoder.attention import GroupedAttention, Joined, join
from pilotfish.engine.model.decoder.feed_forward import GatedFeed, GatedMLP
from pilotfish.engine.model.decoder.norms import GatedNorm, norm_of
from pilotfish.engine.model.decoder.rotary import RotaryTable
from pilotfish.engine.model.decoder.weights import SHARED, WeightReader
from pilotfish.engine.model.linear.activations import ELEMENTWISE
from pilotfish.engine.recurrent import native as rules
from pilotfish.engine.recurrent.arena import PassStates, StatePart
from pilotfish.engine.recurrent.rules import softplus

_SHARED_NORMS = ("input_layernorm", "pre_ff_layernorm")
Rotary = tuple[Tensor, Tensor]  # cos and sin; not used by states


@dataclass(frozen=True, slots=True)
class Convolution:
    """A causal depthwise convolution; `conv1d` in most checkpoints."""

    channels: int
    kernel: int
    bias: bool = False
    name: str = "conv1d"

    def state(self, dtype: torch.dtype) -> StatePart:
        """The inputs that later rows read."""
        return StatePart((self.channels, self.kernel - 1), self.channels, dtype)


@dataclass(frozen=True, slots=True)
class ConvLayer(Mixer):
    """A convolution between two gates: out(c * conv(b * x)) of [b, c, x] = in(row)."""

    width: int
    conv: Convolution

    def state(self, dtype: torch.dtype) -> tuple[StatePart, ...]:
        return (self.conv.state(dtype),)


@dataclass(frozen=True, slots=True)
class DeltaLayer(Mixer):
    """The gated delta rule (arXiv 2412.06464) after a convolution of queries, keys and values.

    Attributes:
        heads: of values, and of states.
        key_heads: of queries and keys; a divisor of `heads`.
        key_dim: numbers of a key.
        value_dim: numbers of a value.
        kernel: inputs that the convolution reads.
        eps: of the output norm, which is followed by the gate.
        kind: of the checkpoint's matrices: Qwen 3.5's four are `joined`; Qwen 3 Next's two, `in_proj_qkvz` and
            `in_proj_ba`, are sorted `by_key_head`; others are `apart`.
        by_channel: each element of a key has its own decay (Kimi Delta Attention, arXiv 2510.26692).
        rank: size of the latents of gates and of decays; None: they are projections of the row.
        least: logarithms of decays are this number times a sigmoid; None: they use -softplus.
        step: the maximum step; steps are this number times a sigmoid.
        by_sigmoid: the gate is a sigmoid instead of SiLU.
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
        """Widths of all keys and of all values of a row."""
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
        """The second matrices of gates and decays, if they have latents, with their numbers of outputs."""
        return {} if self.rank is None else {"g_b_proj": self.sizes[1], "f_b_proj": self.decays}

    @property
    def ends(self) -> tuple[str, str]:
        """The names of the norm and of the output projection."""
        return ("o_norm", "o_proj") if self.kind == "apart" else ("norm", "out_proj")

    def state(self, dtype: torch.dtype) -> tuple[StatePart, ...]:
        return self.conv.state(dtype), self.rule


@dataclass(frozen=True, slots=True)
class Mamba2Layer(Mixer):
    """The state space of Mamba 2 (arXiv 2405.21060).

    Attributes:
        heads: of states.
        head_dim: size of a head.
        size: numbers of a key: rows of a state.
        groups: number of groups of heads that share keys and queries.
        conv: of inputs, keys and queries.
        eps: of the output norm; None: no norm.
        norm_groups: parts of a row that are normalised separately.
        norm_first: the norm precedes the gate.
        limits: of step sizes.
        bias: the product of the input has one.
        out_bias: the product of the output has one.
        factors: of the gate, the input, keys, queries and steps, after their projection.
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
        """Width of all heads of a row."""
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
        """Widths of the gate, the input, keys, queries and steps of a row."""
        return self.inner, self.inner, self.groups * self.size, self.groups * self.size, self.heads

    def state(self, dtype: torch.dtype) -> tuple[StatePart, ...]:
        return self.conv.state(dtype), self.rule


@dataclass(frozen=True, slots=True)
class Mamba1Layer(Mixer):
    """The selective state space of Mamba (arXiv 2312.00752).

    Attributes:
        inner: inner width.
        size: numbers of a key: rows of a state.
        rank: size of the latent of step sizes.
        kernel: inputs that the convolution reads.
        conv_bias: the convolution has a bias.
        bias: the products of the input and of the output have one.
        norm: of the latent of steps, of keys and of queries, if any.
        heads: parts of a row with separate steps, keys and queries, and separate matrices for them (Zamba), which stay
        floats; inputs and gates of `in_proj` are then adjacent. None: no heads.
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
        """Width of a head; of the whole row without heads."""
        return self.inner // (self.heads or 1)

    @property
    def rule(self) -> StatePart:
        """The state of the rule, of a head."""
        return StatePart((self.size, self.each), self.size + 2 * self.each, torch.float32)

    @property
    def norms(self) -> dict[str, int]:
        """The norms, by name, with their sizes."""
        sizes = {"dt_layernorm": self.rank, "b_layernorm": self.size, "c_layernorm": self.size}
        return {} if self.norm is None else sizes

    def state(self, dtype: torch.dtype) -> tuple[StatePart, ...]:
        return self.conv.state(dtype), *[self.rule] * (self.heads or 1)


@dataclass(frozen=True, slots=True)
class BesideLayer(Mixer):
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
class SharedBlock:
    """feed(norm(attention(norm([x, embeddings])))), shared by several layers (Zamba, arXiv 2405.16712).

    Attributes:
        number: of the block.
        attention: reads both halves.
        feed: of the block.
        norm: form of all norms.
        ranks: of each layer's low-rank additions to the matrices of attention and of the feed-forward (arXiv
        2411.15242); 0: none.
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
        """A layer's low-rank additions to attention and feed-forward: names of pairs of matrices, with outputs."""
        parts = {f"linear_{part}_adapter_list": size for part, size in zip("qkv", self.attention.sizes, strict=True)}
        both = parts, {"gate_up_proj_adapter_list": 2 * self.feed.inner}
        first, second = ({f"{name}.{layer}": size for name, size in each.items()} for each in both)
        return first, second


@dataclass(frozen=True, slots=True)
class SharedLayer(Mixer):
    """mamba(norm(x + linear(block([x, embeddings])))); `number`: index among these layers."""

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


class CausalConv(nn.Module):
    """A convolution whose latest inputs are part of the state."""

    def __init__(self, conv: Convolution, weights: WeightReader, *, bends: bool = True) -> None:
        """`bends`: apply SiLU to the output."""
        super().__init__()
        self.bias: Tensor | None
        below = weights.below(f"{conv.name}.")
        self.part, self.activation = conv.state(weights.dtype), "silu" if bends else None
        _keep(self, weight=below.vector("weight", conv.channels, 1, conv.kernel).squeeze(1).float())
        bias = below.vector("bias", conv.channels).float() if conv.bias else None
        self.register_buffer("bias", bias, persistent=False)

    def forward(self, x: Tensor, states: PassStates) -> Tensor:
        """`[T, channels]` -> `[T, channels]`."""
        weight = cast("Tensor", self.weight)
        return rules.conv(states.slots(self.part), x.contiguous(), weight, self.bias, self.activation)


class ShortConv(nn.Module):
    """See `ConvLayer`."""

    def __init__(self, layer: ConvLayer, number: int, width: int, weights: WeightReader) -> None:
        super().__init__()
        self.layer_idx, has_bias = number, layer.conv.bias
        self.in_proj = weights.matrix({"in_proj": 3 * width}, width, has_bias=has_bias)
        self.out_proj = weights.matrix({"out_proj": width}, width, has_bias=has_bias)
        self.conv = CausalConv(layer.conv, weights, bends=False)

    def forward(self, x: Tensor, _: Rotary, ragged: Ragged) -> Tensor:
        """`[1, T, width]` -> `[1, T, width]`."""
        before, after, row = self.in_proj(x)[0].chunk(3, -1)
        return cast("Tensor", self.out_proj((after * self.conv(before * row, states_of(ragged)))[None]))


class GatedDelta(nn.Module):
    """See `DeltaLayer`."""

    def __init__(self, layer: DeltaLayer, number: int, width: int, weights: WeightReader) -> None:
        super().__init__()
        self.layer, self.layer_idx = layer, number
        orders = _by_kind(layer) if layer.kind == "by_key_head" else None
        # Separate, because quantised files often have the small matrices in floats.
        self._rows = [join(self, weights, sizes, width, has_bias=False, orders=orders) for sizes in layer.matrices]
        for name, size in layer.seconds.items():
            setattr(self, name, weights.matrix({name: size}, layer.rank or 0, has_bias=False))
        norm, out = layer.ends
        setattr(self, out, weights.matrix({out: width}, layer.sizes[1], has_bias=False))
        self.conv1d = CausalConv(layer.conv, weights)
        gate = torch.sigmoid if layer.by_sigmoid else F.silu
        weight = weights.vector(f"{norm}.weight", layer.value_dim)
        setattr(self, norm, GatedNorm(weight, layer.eps, norm_first=True, gate=gate))
        stored = (layer.heads,) if layer.rank is None else (1, 1, layer.heads, 1)
        decay = _decay(weights, *stored).flatten().repeat_interleave(layer.decays // layer.heads)
        _keep(self, decay=decay, dt_bias=weights.vector("dt_bias", layer.decays).float())

    def forward(self, x: Tensor, _: Rotary, ragged: Ragged) -> Tensor:
        """`[1, T, width]` -> `[1, T, width]`."""
        layer, states = self.layer, states_of(ragged)
        keys, values = layer.sizes
        first, second = (rows(x)[0] for rows in self._rows)
        rows, gate = first.tensor_split([2 * keys + values], -1)
        step, decay = second.tensor_split([layer.heads], -1)
        if layer.rank is not None:
            gate, decay = (
                self.get_submodule(name)(part[None].contiguous())[0]
                for name, part in zip(layer.seconds, (gate, decay), strict=True)
            )
        query, key, value = self.conv1d(rows, states).float().split([keys, keys, values], -1)
        query, key = (_of_length_one(part.unflatten(-1, (-1, layer.key_dim))) for part in (query, key))
        value = value.unflatten(-1, (-1, layer.value_dim)).contiguous()
        steps = ELEMENTWISE[torch.sigmoid](step.float().contiguous()) * layer.step
        parts = query * layer.key_dim**-0.5, key, value, self._decays(decay.float().contiguous()), steps
        out = rules.delta(states.slots(layer.rule), *parts)
        norm, matmul = map(self.get_submodule, layer.ends)
        made = norm(out, gate.unflatten(-1, (-1, layer.value_dim)))
        return cast("Tensor", matmul(made.flatten(1).to(x.dtype)[None]))

    def _decays(self, rows: Tensor) -> Tensor:
        """Logarithms of decays, float32 `[T, heads]` or `[T, heads, key_dim]`, from the output of their matrix."""
        layer, decay = self.layer, cast("Tensor", self.decay)
        rows = rows + cast("Tensor", self.dt_bias)
        made: Tensor
        if layer.least is None:
            made = decay * ELEMENTWISE[F.softplus](rows)
        else:
            made = layer.least * ELEMENTWISE[torch.sigmoid](-decay * rows)
        return made.unflatten(-1, (layer.heads, -1)) if layer.by_channel else made


class Mamba2(nn.Module):
    """See `Mamba2Layer`."""

    def __init__(self, layer: Mamba2Layer, number: int, width: int, weights: WeightReader) -> None:
        super().__init__()
        self.layer, self.layer_idx = layer, number
        self.in_proj = weights.matrix({"in_proj": sum(layer.sizes)}, width, has_bias=layer.bias)
        self.out_proj = weights.matrix({"out_proj": width}, layer.inner, has_bias=layer.out_bias)
        self.conv1d = CausalConv(layer.conv, weights)
        self.norm: GatedNorm | None = None
        if layer.eps is not None:
            weight = weights.vector("norm.weight", layer.inner)
            self.norm = GatedNorm(weight.view(layer.norm_groups, -1), layer.eps, norm_first=layer.norm_first)
        _keep(self, decay=_decay(weights, layer.heads), skip=weights.vector("D", layer.heads).float())
        _keep(self, dt_bias=weights.vector("dt_bias", layer.heads).float())
        if layer.factors is not None:
            each = zip(layer.factors, layer.sizes, strict=True)
            _keep(self, factors=torch.cat([torch.full((size,), factor) for factor, size in each]).to(weights.dtype))

    def forward(self, x: Tensor, _: Rotary, ragged: Ragged) -> Tensor:
        """`[1, T, width]` -> `[1, T, width]`."""
        layer, states = self.layer, states_of(ragged)
        projected = self.in_proj(x)[0]
        if layer.factors is not None:
            projected = projected * self.factors
        gate, rows, step = projected.split([layer.inner, layer.conv.channels, layer.heads], -1)
        fed, key, query = self.conv1d(rows, states).float().split(layer.sizes[1:4], -1)
        fed = fed.unflatten(-1, (layer.heads, -1)).contiguous()
        key, query = (part.unflatten(-1, (layer.groups, -1)).contiguous() for part in (key, query))
        step = softplus(step.float() + self.dt_bias).clamp(*layer.limits)
        decay, skip = cast("Tensor", self.decay), cast("Tensor", self.skip)
        out = rules.mamba2(states.slots(layer.rule), fed, step, decay, key, query, skip)
        if self.norm is None:
            out = out.flatten(1) * ELEMENTWISE[F.silu](gate.float())
        else:
            parts = (layer.norm_groups, layer.inner // layer.norm_groups)
            out = self.norm(out.reshape(-1, *parts), gate.unflatten(-1, parts)).flatten(1)
        return cast("Tensor", self.out_proj(out.to(x.dtype)[None]))


class Mamba1(nn.Module):
    """See `Mamba1Layer`."""

    def __init__(self, layer: Mamba1Layer, number: int, width: int, weights: WeightReader) -> None:
        super().__init__()
        self.layer, self.layer_idx = layer, number
        orders = {} if layer.heads is None else {"in_proj": torch.arange(2 * layer.inner).view(-1, 2).t().flatten()}
        self.in_proj = weights.matrix({"in_proj": 2 * layer.inner}, width, has_bias=layer.bias, orders=orders)
        if layer.heads is None:
            self.x_proj = weights.matrix({"x_proj": layer.rank + 2 * layer.size}, layer.inner, has_bias=False)
            self.dt_proj = weights.matrix({"dt_proj": layer.inner}, layer.rank, has_bias=True)
        else:
            floats, made = replace(weights, rounded=None, converted=None), layer.rank + 2 * layer.size
            for name, outputs, inputs in (("x_proj", made, layer.each), ("dt_proj", layer.each, layer.rank)):
                form = {"has_bias": name == "dt_proj", "transposed": False}
                stack = floats.experts(f"{name}_weight", (), layer.heads, outputs, inputs, **form)
                setattr(self, name, nn.ModuleList(stack))
        self.out_proj = weights.matrix({"out_proj": width}, layer.inner, has_bias=layer.bias)
        self.conv1d = CausalConv(layer.conv, weights)
        parts = (layer.inner,) if layer.heads is None else (layer.heads, layer.each)
        _keep(self, decay=_decay(weights, *parts, layer.size).view(-1, layer.size))
        _keep(self, skip=weights.vector("D", *parts).flatten().float())
        for name, size in layer.norms.items():
            assert layer.norm is not None
            setattr(self, name, norm_of(layer.norm, weights, name, size))

    def forward(self, x: Tensor, _: Rotary, ragged: Ragged) -> Tensor:
        """`[1, T, width]` -> `[1, T, width]`."""
        states, heads = states_of(ragged), self.layer.heads or 1
        rows, gate = self.in_proj(x)[0].chunk(2, -1)
        decays, skips = cast("Tensor", self.decay).chunk(heads), cast("Tensor", self.skip).chunk(heads)
        each = zip(self.conv1d(rows, states).chunk(heads, -1), decays, skips, strict=True)
        out = torch.cat([self._scanned(head, *parts, states) for head, parts in enumerate(each)], -1)
        return cast("Tensor", self.out_proj((out * ELEMENTWISE[F.silu](gate.float())).to(x.dtype)[None]))

    def _scanned(self, head: int, fed: Tensor, decay: Tensor, skip: Tensor, states: PassStates) -> Tensor:
        """The output of a head for its part of the rows: float32 `[T, each]`."""
        layer, (makes, to_steps) = self.layer, (self.x_proj, self.dt_proj)
        if layer.heads is not None:
            makes, to_steps = cast("nn.ModuleList", makes)[head], cast("nn.ModuleList", to_steps)[head]
        fed = fed.contiguous()
        parts = makes(fed[None])[0].split([layer.rank, layer.size, layer.size], -1)
        if layer.norms:
            parts = [self.get_submodule(name)(part.contiguous()) for name, part in zip(layer.norms, parts, strict=True)]
        step, key, query = (part.contiguous() for part in parts)
        step = softplus(to_steps(step[None])[0].float())
        slots = states.slots(layer.rule)
        return rules.mamba1(slots, fed.float(), step, decay, key.float(), query.float(), skip)


class Beside(nn.Module):
    """See `BesideLayer`."""

    def __init__(self, layer: BesideLayer, number: int, width: int, weights: WeightReader) -> None:
        super().__init__()
        self.layer, self.layer_idx = layer, number
        self.mamba = Mamba2(layer.mamba, number, width, weights.below("mamba."))
        self.self_attn = GroupedAttention(layer.attention, number, width, weights.below("self_attn."))

    def forward(self, x: Tensor, rotary: Rotary, ragged: Ragged) -> Tensor:
        """`[1, T, width]` -> `[1, T, width]`."""
        of_mamba, of_attention = self.layer.scales
        first: Tensor = self.mamba(x, rotary, ragged)
        second: Tensor = self.self_attn(x, rotary, ragged)
        return first * of_mamba + second * of_attention


class Shared(nn.Module):
    """See `SharedLayer`: the matrices of the block are shared with other layers."""

    def __init__(self, layer: SharedLayer, number: int, width: int, weights: WeightReader) -> None:
        super().__init__()
        self.layer_idx, block, own = number, layer.block, weights.below("mamba_decoder.")
        self.linear = weights.matrix({"linear": width}, width, has_bias=False)
        self.norm = norm_of(block.norm, own, "input_layernorm", width)
        kind = Mamba1 if isinstance(layer.mamba, Mamba1Layer) else Mamba2
        self.mamba: nn.Module = kind(layer.mamba, number, width, own.below("mamba."))  # type: ignore[arg-type]
        shared = replace(weights, path=block.path)  # on the device of this layer's own weights
        attention, feed = shared.below("self_attn."), shared.below("feed_forward.")
        self.self_attn = GroupedAttention(block.attention, number, width, attention)
        self.feed_forward = GatedMLP(block.feed, width, feed)
        for name, size in zip(_SHARED_NORMS, (2 * width, width), strict=True):
            setattr(self, name, norm_of(block.norm, shared, name, size))
        (of_attention, of_feed), (rank, rank_of_feed) = block.added(layer.number), block.ranks
        if rank:
            joined: Joined = cast("Any", self.self_attn).q_proj.joined
            joined.matmul = LowRank(joined.matmul, attention, of_attention, 2 * width, rank)
        if rank_of_feed:
            self.feed_forward.gate_up_proj = LowRank(self.feed_forward.gate_up_proj, feed, of_feed, width, rank_of_feed)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor], ragged: Ragged) -> Tensor:
        """`[1, T, width]` -> `[1, T, width]`."""
        assert ragged.embedded is not None, "the pass has no embeddings"
        first, second = map(self.get_submodule, _SHARED_NORMS)
        mixed = self.self_attn(first(torch.cat([x, ragged.embedded], -1)), rotary, ragged)
        read = self.norm(x + self.linear(self.feed_forward(second(mixed))))
        return cast("Tensor", self.mamba(read, rotary, ragged))


class LowRank(nn.Module):
    """The product of a shared matrix plus a layer's low-rank product (arXiv 2106.09685)."""

    def __init__(self, inner: nn.Module, weights: WeightReader, sizes: dict[str, int], inputs: int, rank: int) -> None:
        """`sizes`: outputs of each pair of matrices, by name."""
        super().__init__()
        self.inner, self.rank = inner, rank
        self.down = weights.matrix({f"{name}.0": rank for name in sizes}, inputs, has_bias=False)
        self.ups = nn.ModuleList(
            weights.matrix({f"{name}.1": size}, rank, has_bias=False) for name, size in sizes.items()
        )

    def forward(self, x: Tensor) -> Tensor:
        """`[1, T, inputs]` -> `[1, T, outputs]`."""
        narrow: Iterable[Tensor] = self.down(x).split(self.rank, -1)
        added = [up(part.contiguous()) for up, part in zip(self.ups, narrow, strict=True)]
        return cast("Tensor", self.inner(x) + torch.cat(added, -1))


def states_of(ragged: Ragged) -> PassStates:
    """The states of a pass."""
    assert isinstance(ragged.states, PassStates), "a model with states requires a state arena"
    return ragged.states


def _keep(module: nn.Module, **tensors: Tensor) -> None:
    """Register tensors as buffers, so that a model of the first layers shares them."""
    for name, tensor in tensors.items():
        module.register_buffer(name, tensor, persistent=False)


def _decay(weights: WeightReader, *size: int) -> Tensor:
    """The negative decay rate."""
    return -weights.vector("A_log", *size).float().exp()


def _of_length_one(rows: Tensor) -> Tensor:
    """Normalised keys or queries."""
    return (rows * torch.rsqrt((rows * rows).sum(-1, keepdim=True) + 1e-6)).contiguous()


def _by_kind(layer: DeltaLayer) -> dict[str, Tensor]:
    """For each matrix, the index in the checkpoint of each output: there, outputs are grouped by key head."""
    each = layer.heads // layer.key_heads
    sizes = [layer.key_dim, layer.key_dim, each * layer.value_dim, each * layer.value_dim]
    parts: dict[str, Any] = {"in_proj_qkvz": sizes, "in_proj_ba": [each, each]}
    return {
        name: torch.cat(
            [part.flatten() for part in torch.arange(layer.key_heads * sum(own)).view(-1, sum(own)).split(own, 1)]
        )
        for name, own in parts.items()
    }
