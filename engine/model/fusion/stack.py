"""Runs all decoder layers of a fused model in one call of our C; uses shapes of modules and no family by name.

In a small model the Python code between two matmuls takes longer than the matmuls.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from engine.attention import native
from engine.attention.registry import Ragged
from engine.kv.arena import KVArena
from engine.kv.batch import Feed, RaggedBatch
from engine.model.fusion.fuse import Gated, RMSNorm, RotaryAttention
from engine.model.fusion.straight import bypass_model_code
from engine.model.linear.equivalence import agree, random_rows
from engine.model.linear.packed import packed_of
from engine.model.runner import kv_layout
from engine.model.tap import FINAL, Tap
from engine.native import PackedMatrix, rows_for
from engine.native.layers import LayerParts, Layers
from engine.verdicts import verdict

log = logging.getLogger(__name__)

_PAGE, _ROWS = 8, 3  # of the equivalence test


def stack(model: PreTrainedModel) -> bool:
    """Make the decoder layers of a fused `model` run in one call, if all their parts are known; returns whether."""
    for name, layers in list(model.named_modules()):
        if not isinstance(layers, nn.ModuleList) or not len(layers):
            continue
        parts = [_parts(layer) for layer in layers]
        if all(part is not None for part in parts):
            together = Stack(layers)
            if verdict(partial(_agrees, together, model)):
                model.set_submodule(name, together)
                log.info("%d layers run in one call", len(layers))
                bypass_model_code(model, together)
                return True
    return False


class Stack(nn.ModuleList):
    """A list of layers that yields one item when iterated: a callable that runs all layers at once."""

    def __init__(self, layers: nn.ModuleList) -> None:
        super().__init__(layers)
        self._ready: tuple[KVArena, Layers] | None = None  # for the arena that was used last
        self.taps: tuple[Tap, ...] = ()  # read hidden states between layers

    def __iter__(self) -> Iterator[nn.Module]:
        return iter((cast("nn.Module", self.run),))

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):  # the model iterates over the first n of n layers
            kept = list(self._modules.values())[index]
            return self if len(kept) == len(self) else Stack(nn.ModuleList(kept))
        return super().__getitem__(index)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_ready": None, "taps": ()}  # a copy has its own arena, and nobody reads it

    def run(
        self,
        hidden_states: Tensor,  # [1, T, width]
        position_embeddings: tuple[Tensor, Tensor] | None = None,  # cos and sin, [1, T, head_dim]
        ragged: Ragged | None = None,
        **others: Any,
    ) -> Tensor:
        """Compute what the layers compute one after the other; they run in that way where C cannot run the pass."""
        if ragged is not None and position_embeddings is not None:
            if self.serves(hidden_states, position_embeddings, ragged):
                return self.at_once(hidden_states, position_embeddings, ragged)
            others["ragged"] = ragged
        return self.one_by_one(hidden_states, position_embeddings, **others)

    def one_by_one(
        self, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor] | None, **others: Any
    ) -> Tensor:
        """Run layer after layer."""
        for layer in self._modules.values():
            hidden_states = cast("Any", layer)(hidden_states, position_embeddings=position_embeddings, **others)
        return hidden_states

    def at_once(self, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], ragged: Ragged) -> Tensor:
        """Run all layers in C, with the same bits as `one_by_one`."""
        cos, sin = (x[0].contiguous() for x in position_embeddings)
        shape, first = ragged.arena.layout.same, cast("Any", self._modules["0"])
        assert shape is not None, "`serves` said no"
        where = native.args_of(ragged.batch, first.self_attn.seen.heads, shape.heads, shape.key_dim)
        keys = ragged.arena.k[0]
        where.key_stride = where.value_stride = keys.stride(0)
        where.rounded = ragged.arena.layout.is_rounded
        hidden, depth = hidden_states[0].clone(), len(self)
        places = {place for tap in self.taps for place in tap.places if place != FINAL}
        read = {place: torch.empty_like(hidden) for place in places}
        self._layers(ragged.arena).run(hidden, cos, sin, ragged.batch.kv_rows, where, read=read)
        if depth in read:
            read[depth].copy_(hidden)
        for tap in self.taps:
            for place in tap.places:
                if place in read:
                    tap.keep(place, read[place])
        return hidden[None]

    def serves(self, hidden: Tensor, rotary: tuple[Tensor, Tensor], ragged: Ragged) -> bool:
        """Whether C can run this pass."""
        layout, shape = ragged.arena.layout, ragged.arena.layout.same
        if shape is None or shape.key_dim % 2 or ragged.batch.has_adapters:
            return False
        ours = getattr(ragged.attend, "func", ragged.attend) is native.attend
        fits = hidden.dtype == rotary[0].dtype and layout.takes(hidden.dtype)
        one_type = fits and hidden.is_cpu and rotary[0].shape[0] == 1
        return ours and one_type and rows_for(hidden.dtype, hidden.shape[-1], shape.key_dim // 2) is not None

    def _layers(self, arena: KVArena) -> Layers:
        """All layers, over this arena."""
        if self._ready is None or self._ready[0] is not arena:
            parts = [cast("LayerParts", _parts(layer)) for layer in self._modules.values()]
            self._ready = arena, Layers(parts, arena.k[: len(parts)], arena.v[: len(parts)])
        return self._ready[1]


def _parts(layer: nn.Module) -> LayerParts | None:
    """The parts of a layer, if it is norm, attention, norm, MLP, and all are replacement modules; None if not."""
    inside = {name: module for name, module in layer.named_children() if not isinstance(module, nn.Dropout)}
    kinds = (inside.pop(name, None) for name in ("input_layernorm", "self_attn", "post_attention_layernorm", "mlp"))
    match (*kinds, *inside):
        case RMSNorm() as first, RotaryAttention() as attention, RMSNorm() as second, Gated() as mlp:
            inner, gate = cast("Any", attention.inner), cast("Any", mlp.inner)
            qkv = inner.q_proj.joined.matmul if hasattr(inner, "q_proj") else inner.qkv_proj
            matrices = map(packed_of, (qkv, inner.o_proj, gate.gate_proj.joined.matmul, gate.down_proj))
            norms = (first.scale.data, first.eps), (second.scale.data, second.eps)
            spec = attention.seen.spec
            plain = getattr(inner, "q_norm", None) is None and spec.chunk is None and spec.sinks is None
            match tuple(matrices):
                case (
                    PackedMatrix() as qkv, PackedMatrix() as out, PackedMatrix() as up, PackedMatrix() as down
                ) if plain:  # fmt: skip
                    return LayerParts(qkv, out, up, down, *norms, spec.scale, spec.softcap, spec.window)
    return None


def _agrees(together: Stack, model: PreTrainedModel) -> bool:
    """Whether an equivalence test gives the same result in C and module by module."""
    layout = kv_layout(model.config, model.dtype)
    if layout.same is None:
        return False
    arena = KVArena(layout, 1, _PAGE, model.device)
    ragged = Ragged(RaggedBatch.of([Feed([0] * _ROWS, 4, [0])], _PAGE, model.device), arena, native.attend)
    angles = random_rows(model, 1, _ROWS, layout.same.key_dim // 2).float().repeat(1, 1, 2) * 3
    rotary = angles.cos().to(model.dtype), angles.sin().to(model.dtype)
    x = random_rows(model, 1, _ROWS, model.config.get_text_config().hidden_size)
    if not together.serves(x, rotary, ragged):
        return False
    ways = (together.one_by_one, together.at_once)
    return agree(lambda way: cast("Any", way)(x, rotary, ragged=ragged), *cast("Any", ways))
