"""Runs all layers of a decoder in one call of our C, where that can run the pass; else layer by layer.

In a small model the Python code between two matmuls takes longer than the matmuls.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from typing import Any, cast

import torch
from torch import Tensor, nn

from engine.attention import native
from engine.attention.registry import Ragged
from engine.kv.arena import KVArena
from engine.model.decoder.attention import GroupedAttention
from engine.model.decoder.feed_forward import GatedMLP
from engine.model.decoder.norms import RMSNorm
from engine.model.linear.packed import packed_of
from engine.model.tap import FINAL, Tap
from engine.native import rows_for
from engine.native.layers import LayerParts, Layers

Rotary = tuple[Tensor, Tensor]  # cos and sin, [1, T, head_dim]


class Stack(nn.ModuleList):
    """The layers of a decoder."""

    def __init__(self, layers: Iterable[nn.Module]) -> None:
        super().__init__(layers)
        parts = [_parts(layer) for layer in self]
        self._parts = [part for part in parts if part is not None] if None not in parts else []  # none: not in C
        self._ready: tuple[KVArena, Layers] | None = None  # for the arena that was used last
        self.taps: tuple[Tap, ...] = ()  # read hidden states between layers

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_ready": None, "taps": ()}  # a copy has its own arena, and nobody reads it

    def run(
        self, hidden_states: Tensor, rotary: Seq[Rotary], ragged: Ragged, beside: Seq[Tensor] | None = None
    ) -> Tensor:
        """Run all layers `[1, T, width]` -> `[1, T, width]`; `rotary` has cos and sin for each.

        `beside`: what each layer reads beside its hidden state, where it reads more.
        """
        run = self.at_once if self.serves(hidden_states, rotary, ragged) else self.layer_by_layer
        return run(hidden_states, rotary, ragged, beside)

    def layer_by_layer(
        self, hidden_states: Tensor, rotary: Seq[Rotary], ragged: Ragged, beside: Seq[Tensor] | None = None
    ) -> Tensor:
        """Run layer after layer."""
        for place, (layer, each) in enumerate(zip(self, rotary, strict=True)):
            self.keep(place, hidden_states[0])
            hidden_states = layer(hidden_states, each, ragged, None if beside is None else beside[place])
        self.keep(len(self), hidden_states[0])
        return hidden_states

    def in_sums(self, hidden: Tensor, rotary: Seq[Rotary], ragged: Ragged, final: RMSNorm) -> Tensor:
        """Run all layers and the final norm, each sum in one kernel with the norm that reads it; the normed rows."""
        added, after = cast("tuple[Tensor | None, RMSNorm | None]", (None, None))  # what is still to be added
        for place, (each, turned) in enumerate(zip(self, rotary, strict=True)):
            layer: Any = each
            first, after_mixer, second, after_feed = layer.norms
            parts = (hidden, None, None) if added is None else (added, hidden, after)
            normed, hidden = first.of_sum(*parts, rounds=layer.rounds(layer.mixer))
            self.keep(place, hidden[0])
            mixed = layer.mixer(normed, turned, ragged)
            normed, hidden = second.of_sum(mixed, hidden, after_mixer, rounds=layer.rounds(layer.feed))
            added, after = layer.feed(normed), after_feed
        assert added is not None, "a decoder has layers"
        normed, hidden = final.of_sum(added, hidden, after, rounds=False)
        self.keep(len(self), hidden[0])
        assert isinstance(normed, Tensor)
        return normed

    def keep(self, place: int, rows: Tensor) -> None:
        """Give rows `[T, width]` of a place to who reads them."""
        for tap in self.taps:
            if place in tap.places:
                tap.keep(place, rows)

    def at_once(
        self, hidden_states: Tensor, rotary: Seq[Rotary], ragged: Ragged, beside: Seq[Tensor] | None = None
    ) -> Tensor:
        """Run all layers in C, with the same bits as `layer_by_layer`."""
        shape, first = ragged.arena.layout.same, cast("Any", self._modules["0"])
        assert shape is not None, "`serves` said no"
        where = native.args_of(ragged.batch, first.layer.mixer.heads, shape.heads, shape.key_dim)
        keys = ragged.arena.k[0]
        where.key_stride = where.value_stride = keys.stride(0)
        where.rounded = ragged.arena.layout.is_rounded
        hidden, depth = hidden_states[0].clone(), len(self)
        places = {place for tap in self.taps for place in tap.places if place != FINAL}
        read = {place: torch.empty_like(hidden) for place in places}
        dense = {key: (cos[0].contiguous(), sin[0].contiguous()) for key, (cos, sin) in _distinct(rotary).items()}
        angles = [dense[id(each)] for each in rotary]
        second = None if beside is None else beside[0][0].contiguous()  # the same of each that C knows
        self._layers(ragged.arena).run(hidden, angles, ragged.batch.kv_rows, where, second, read)
        for place, rows in read.items():
            self.keep(place, hidden if place == depth else rows)
        return hidden[None]

    def serves(self, hidden: Tensor, rotary: Seq[Rotary], ragged: Ragged) -> bool:
        """Whether C can run this pass."""
        layout, shape = ragged.arena.layout, ragged.arena.layout.same
        if not self._parts or shape is None or shape.key_dim % 2 or ragged.batch.has_adapters:
            return False
        ours = getattr(ragged.attend, "func", ragged.attend) is native.attend
        fits = layout.takes(hidden.dtype) and hidden.is_cpu
        turns = all(
            cos.dtype == hidden.dtype and cos.shape[::2] == (1, shape.key_dim) for cos, _ in _distinct(rotary).values()
        )
        return ours and fits and turns and rows_for(hidden.dtype, hidden.shape[-1], shape.key_dim // 2) is not None

    def _layers(self, arena: KVArena) -> Layers:
        """All layers, over this arena."""
        if self._ready is None or self._ready[0] is not arena:
            depth = len(self._parts)
            self._ready = arena, Layers(self._parts, arena.k[:depth], arena.v[:depth])
        return self._ready[1]


def _distinct(rotary: Seq[Rotary]) -> dict[int, Rotary]:
    """By identity: most layers share one."""
    return {id(each): each for each in rotary}


def _parts(module: nn.Module) -> LayerParts | None:
    """The parts of a decoder layer, where our C runs it; else None."""
    here = cast("Any", module)
    layer, attention, gate = here.layer, here.mixer, here.feed
    if (
        any(layer.summed)
        or not layer.is_plain
        or not isinstance(attention, GroupedAttention)
        or not isinstance(gate, GatedMLP)
    ):
        return None
    norms, heads, spec = here.norms, attention.joined_norms, attention.spec
    fits = (
        None not in (heads, gate.activation)
        and attention.layer.growth is None
        and attention.layer.clip is None
        and attention.attn_sub_norm is None
        and attention.layer.gate is None
        and not attention.layer.same_values
        and attention.layer.source is None
        and spec.chunk is None
        and spec.sinks is None
    )
    if not fits or norms[2] is None or not all(isinstance(n, RMSNorm) for n in norms if n):
        return None
    matmuls = attention.matmul, attention.out, gate.matmul, gate.down_proj
    matrices = [packed_of(matmul) for matmul in matmuls]
    if None in matrices:
        return None
    parts: dict[str, Any] = dict(zip(("qkv", "out", "gate_up", "down"), matrices, strict=True))
    parts |= zip(
        ("norm_attention", "after_attention", "norm_mlp", "after_mlp"),
        (None if norm is None else norm.parts for norm in norms),
        strict=True,
    )
    assert heads is not None
    parts |= {"norm_query": heads[0], "norm_key": heads[1], "activation": gate.activation}
    if layer.beside is not None:
        parts |= {"norm_beside": here.get_submodule(layer.beside).parts, "normed_residual": layer.keeps_normed}
    return LayerParts(scale=spec.scale, softcap=spec.softcap, window=spec.window, **parts)
