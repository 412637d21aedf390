"""Layers that share a block of attention and feed-forward, which also reads embeddings (Zamba, arXiv 2405.16712)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from engine.attention.registry import Ragged
from engine.kv.arena import LayerKV
from engine.model.decoder.architecture import AttentionLayer, NormForm, StateMixer
from engine.model.decoder.attention import GroupedAttention, Joined
from engine.model.decoder.feed_forward import GatedFeed, GatedMLP
from engine.model.decoder.norms import norm_of
from engine.model.decoder.rotary import RotaryTable
from engine.model.decoder.states.layers import Mamba1Layer, Mamba2Layer
from engine.model.decoder.states.modules import Mamba1, Mamba2
from engine.model.decoder.weights import SHARED, WeightReader
from engine.recurrent.states import StatePart

_NORMS = ("input_layernorm", "pre_ff_layernorm")


@dataclass(frozen=True, slots=True)
class SharedBlock:
    """feed(norm(attention(norm([x, embeddings])))).

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
        """Of its weights."""
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
        """See `StateMixer`."""
        return self.block.attention.kv

    @property
    def rotary(self) -> RotaryTable:
        """See `StateMixer`."""
        return self.block.attention.rotary

    def state(self, dtype: torch.dtype) -> tuple[StatePart, ...]:
        """See `StateMixer`."""
        return self.mamba.state(dtype)


class Shared(nn.Module):
    """See `SharedLayer`: the matrices of the block are those of other layers too."""

    def __init__(self, layer: SharedLayer, number: int, width: int, weights: WeightReader) -> None:
        super().__init__()
        self.layer_idx, block, own = number, layer.block, weights.below("mamba_decoder.")
        self.linear = weights.matrix({"linear": width}, width, has_bias=False)
        self.norm = norm_of(block.norm, own, "input_layernorm", width)
        kind = Mamba1 if isinstance(layer.mamba, Mamba1Layer) else Mamba2
        self.mamba: nn.Module = kind(layer.mamba, number, width, own.below("mamba."))  # type: ignore[arg-type]
        shared = weights.at(block.path)
        attention, feed = shared.below("self_attn."), shared.below("feed_forward.")
        self.self_attn = GroupedAttention(block.attention, number, width, attention)
        self.feed_forward = GatedMLP(block.feed, width, feed)
        for name, size in zip(_NORMS, (2 * width, width), strict=True):
            setattr(self, name, norm_of(block.norm, shared, name, size))
        (of_attention, of_feed), (rank, rank_of_feed) = block.added(layer.number), block.ranks
        if rank:
            joined: Joined = cast("Any", self.self_attn).q_proj.joined
            joined.matmul = LowRank(joined.matmul, attention, of_attention, 2 * width, rank)
        if rank_of_feed:
            self.feed_forward.gate_up_proj = LowRank(self.feed_forward.gate_up_proj, feed, of_feed, width, rank_of_feed)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor], ragged: Ragged) -> Tensor:
        """`[1, T, width]` -> `[1, T, width]`."""
        assert ragged.embedded is not None, "the decoder hands it down"
        first, second = map(self.get_submodule, _NORMS)
        mixed = self.self_attn(first(torch.cat([x, ragged.embedded], -1)), rotary, ragged)
        read = self.norm(x + self.linear(self.feed_forward(second(mixed))))
        return cast("Tensor", self.mamba(read, rotary, ragged))


class LowRank(nn.Module):
    """The product of a shared matrix, and what a layer adds: products of narrow rows (arXiv 2106.09685)."""

    def __init__(self, inner: nn.Module, weights: WeightReader, sizes: dict[str, int], inputs: int, rank: int) -> None:
        """`sizes`: outputs of each pair of matrices, by its name."""
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
