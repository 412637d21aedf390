"""Runs all layers of a decoder in one C call if possible, else layer by layer; taps read hidden states.

In a small model the Python code between two matmuls takes longer than the matmuls.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from typing import Any, cast

import torch
from torch import Tensor, nn

from pilotfish.engine.attention import native
from pilotfish.engine.attention.registry import Ragged
from pilotfish.engine.errors import ModelError
from pilotfish.engine.kv.arena import KVArena
from pilotfish.engine.model.decoder.attention import GroupedAttention
from pilotfish.engine.model.decoder.feed_forward import GatedMLP
from pilotfish.engine.model.decoder.norms import RMSNorm
from pilotfish.engine.model.linear.grouped import packed_of
from pilotfish.engine.native import rows_for
from pilotfish.engine.native.layers import LayerParts, Layers

FINAL = -1  # the place after the final norm: the input of the output matrix
Rotary = tuple[Tensor, Tensor]  # cos and sin, [1, T, head_dim]


class Tap:
    """Keeps hidden states of a decoder's last pass: `[T, hidden]` for each place, one row per token of the batch.

    A place is the number of layers before it: 0 is the embedding, the model's depth the output of its last layer
    before the final norm, and `FINAL` the input of the output matrix.

    Raises:
        ModelError: the model has no such place.
    """

    def __init__(self, model: Any, places: Iterable[int] = (FINAL,)) -> None:
        self.places, self._rows = frozenset(places), dict[int, Tensor]()
        between, layers = sorted(self.places - {FINAL}), model.model.layers
        if between and not 0 <= between[0] <= between[-1] <= len(layers):
            raise ModelError(f"the head reads the target after layers {between}; it has {len(layers)} layers")
        layers.taps = (*layers.taps, self)

    def read(self, places: Seq[int]) -> Tensor | None:
        """The rows of the last pass at `places`, `[T, len(places) * hidden]`; None before any pass."""
        if not all(place in self._rows for place in places):
            return None
        return torch.cat([self._rows[place] for place in places], -1) if len(places) > 1 else self._rows[places[0]]

    def keep(self, place: int, rows: Tensor) -> None:
        """Store rows `[T, hidden]` of the current pass; they are read before the next one."""
        self._rows[place] = rows


class Stack(nn.ModuleList):
    """The layers of a decoder."""

    def __init__(self, layers: Iterable[nn.Module]) -> None:
        super().__init__(layers)
        parts = [_parts(layer) for layer in self]
        self._parts = [part for part in parts if part is not None] if None not in parts else []  # empty: not in C
        self._ready: tuple[KVArena, Layers] | None = None  # for the last used arena
        self.taps: tuple[Tap, ...] = ()  # read hidden states between layers

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_ready": None, "taps": ()}  # a copy has its own arena and no taps

    def run(
        self, hidden_states: Tensor, rotary: Seq[Rotary], ragged: Ragged, beside: Seq[Tensor] | None = None
    ) -> Tensor:
        """Run all layers `[1, T, width]` -> `[1, T, width]`; `rotary`: cos and sin for each.

        `beside`: further inputs of each layer besides its hidden state.
        """
        run = self.in_one_call if self.serves(hidden_states, rotary, ragged) else self.layer_by_layer
        return run(hidden_states, rotary, ragged, beside)

    def layer_by_layer(
        self, hidden_states: Tensor, rotary: Seq[Rotary], ragged: Ragged, beside: Seq[Tensor] | None = None
    ) -> Tensor:
        for place, (layer, each) in enumerate(zip(self, rotary, strict=True)):
            self.keep(place, hidden_states[0])
            hidden_states = layer(hidden_states, each, ragged, None if beside is None else beside[place])
        self.keep(len(self), hidden_states[0])
        return hidden_states

    def in_sums(self, hidden: Tensor, rotary: Seq[Rotary], ragged: Ragged, final: RMSNorm) -> Tensor:
        """Run all layers and the final norm, each sum in one kernel with its norm; returns the normalised rows."""
        added, after = cast("tuple[Tensor | None, RMSNorm | None]", (None, None))  # the pending addend
        for place, (each, turned) in enumerate(zip(self, rotary, strict=True)):
            layer: Any = each
            first, after_mixer, second, after_feed = layer.norms
            parts = (hidden, None, None) if added is None else (added, hidden, after)
            normed, hidden = first.of_sum(*parts, rounds=layer.rounds(layer.mixer))
            self.keep(place, hidden[0])
            mixed = layer.mixer(normed, turned, ragged)
            normed, hidden = second.of_sum(mixed, hidden, after_mixer, rounds=layer.rounds(layer.feed))
            added, after = layer.feed(normed), after_feed
        assert added is not None, "a decoder without layers"
        normed, hidden = final.of_sum(added, hidden, after, rounds=False)
        self.keep(len(self), hidden[0])
        assert isinstance(normed, Tensor)
        return normed

    def keep(self, place: int, rows: Tensor) -> None:
        """Pass rows `[T, width]` of a place to the taps that read it."""
        for tap in self.taps:
            if place in tap.places:
                tap.keep(place, rows)

    def in_one_call(
        self, hidden_states: Tensor, rotary: Seq[Rotary], ragged: Ragged, beside: Seq[Tensor] | None = None
    ) -> Tensor:
        """Run all layers in C, with the same bits as `layer_by_layer`."""
        shape, first = ragged.arena.layout.same, cast("Any", self._modules["0"])
        assert shape is not None, "`serves` was not checked"
        where = native.args_of(ragged.batch, first.layer.mixer.heads, shape.heads, shape.key_dim)
        keys = ragged.arena.k[0]
        where.key_stride = where.value_stride = keys.stride(0)
        where.rounded = ragged.arena.layout.is_rounded
        hidden, depth = hidden_states[0].clone(), len(self)
        places = {place for tap in self.taps for place in tap.places if place != FINAL}
        read = {place: torch.empty_like(hidden) for place in places}
        dense = {key: (cos[0].contiguous(), sin[0].contiguous()) for key, (cos, sin) in _distinct(rotary).items()}
        angles = [dense[id(each)] for each in rotary]
        second = None if beside is None else beside[0][0].contiguous()  # equal for all layers in C
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
        if self._ready is None or self._ready[0] is not arena:
            depth = len(self._parts)
            self._ready = arena, Layers(self._parts, arena.k[:depth], arena.v[:depth])
        return self._ready[1]


def _distinct(rotary: Seq[Rotary]) -> dict[int, Rotary]:
    """Remove duplicates by identity: most layers share one."""
    return {id(each): each for each in rotary}


def _parts(module: nn.Module) -> LayerParts | None:
    """The parts of a decoder layer that our C can run; else None."""
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
