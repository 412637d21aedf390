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
from engine.model.fusion.fuse import Gated, RMSNorm, RotaryAttention
from engine.model.fusion.kernel_layers import NAMES
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

    def run(self, hidden_states: Tensor, rotary: Seq[Rotary], ragged: Ragged) -> Tensor:
        """Run all layers `[1, T, width]` -> `[1, T, width]`; `rotary` has cos and sin for each."""
        if self.serves(hidden_states, rotary, ragged):
            return self.at_once(hidden_states, rotary, ragged)
        return self.one_by_one(hidden_states, rotary, ragged)

    def one_by_one(self, hidden_states: Tensor, rotary: Seq[Rotary], ragged: Ragged) -> Tensor:
        """Run layer after layer."""
        for layer, each in zip(self, rotary, strict=True):
            hidden_states = cast("Any", layer)(hidden_states, each, ragged=ragged)
        return hidden_states

    def at_once(self, hidden_states: Tensor, rotary: Seq[Rotary], ragged: Ragged) -> Tensor:
        """Run all layers in C, with the same bits as `one_by_one`."""
        shape, first = ragged.arena.layout.same, cast("Any", self._modules["0"])
        assert shape is not None, "`serves` said no"
        where = native.args_of(ragged.batch, first.self_attn.seen.heads, shape.heads, shape.key_dim)
        keys = ragged.arena.k[0]
        where.key_stride = where.value_stride = keys.stride(0)
        where.rounded = ragged.arena.layout.is_rounded
        hidden, depth = hidden_states[0].clone(), len(self)
        places = {place for tap in self.taps for place in tap.places if place != FINAL}
        read = {place: torch.empty_like(hidden) for place in places}
        dense = {key: (cos[0].contiguous(), sin[0].contiguous()) for key, (cos, sin) in _distinct(rotary).items()}
        angles = [dense[id(each)] for each in rotary]
        self._layers(ragged.arena).run(hidden, angles, ragged.batch.kv_rows, where, read=read)
        if depth in read:
            read[depth].copy_(hidden)
        for tap in self.taps:
            for place in tap.places:
                if place in read:
                    tap.keep(place, read[place])
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


def _parts(layer: nn.Module) -> LayerParts | None:
    """The parts of a layer, if it is norms, attention and MLP, and all are replacement modules; None if not."""
    inside = {name: module for name, module in layer.named_children() if not isinstance(module, nn.Dropout)}
    attention, mlp = inside.pop("self_attn", None), inside.pop("mlp", None)
    names = next((names for names in NAMES if inside.keys() == set(names) - {None}), None)
    kinds = (
        isinstance(attention, RotaryAttention),
        isinstance(mlp, Gated),
        *(isinstance(x, RMSNorm) for x in inside.values()),
    )
    if names is None or not all(kinds):
        return None
    inner, gate, spec = cast("Any", attention).inner, cast("Any", mlp).inner, cast("Any", attention).seen.spec
    qkv = inner.q_proj.joined.matmul if hasattr(inner, "q_proj") else inner.qkv_proj
    heads, norms = cast("Any", attention).head_norms(), [inside[name] if name else None for name in names]
    matrices = [packed_of(matmul) for matmul in (qkv, inner.o_proj, gate.gate_proj.joined.matmul, gate.down_proj)]
    if None in matrices or heads is None or spec.chunk is not None or spec.sinks is not None:
        return None
    parts: dict[str, Any] = dict(zip(("qkv", "out", "gate_up", "down"), matrices, strict=True))
    parts |= zip(
        ("norm_attention", "after_attention", "norm_mlp", "after_mlp"),
        (None if norm is None else (norm.scale.data, norm.eps) for norm in cast("Any", norms)),
        strict=True,
    )
    parts |= {"norm_query": heads[0], "norm_key": heads[1], "activation": cast("Any", mlp).activation}
    return LayerParts(scale=spec.scale, softcap=spec.softcap, window=spec.window, **parts)
