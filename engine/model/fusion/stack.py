"""Runs all decoder layers of a fused model in one call of our C; uses shapes of modules and no family by name.

In a small model the Python code between two matmuls takes longer than the matmuls.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from collections.abc import Sequence as Seq
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
from engine.model.fusion.kernel_layers import NAMES
from engine.model.fusion.straight import Rotary, bypass_model_code
from engine.model.linear.equivalence import agree, random_rows
from engine.model.linear.packed import packed_of
from engine.model.runner import kv_layout
from engine.model.tap import FINAL, Tap
from engine.native import rows_for
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
    """A list of layers of which, where C can run the pass, the last one runs all when the model calls them in turn."""

    def __init__(self, layers: nn.ModuleList) -> None:
        super().__init__(layers)
        self._ready: tuple[KVArena, Layers] | None = None  # for the arena that was used last
        self.taps: tuple[Tap, ...] = ()  # read hidden states between layers

    def __iter__(self) -> Iterator[nn.Module]:
        told: list[Rotary] = []
        return iter([cast("nn.Module", partial(self._step, layer, told)) for layer in self._modules.values()])

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):  # the model iterates over the first n of n layers
            kept = list(self._modules.values())[index]
            return self if len(kept) == len(self) else Stack(nn.ModuleList(kept))
        return super().__getitem__(index)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_ready": None, "taps": ()}  # a copy has its own arena, and nobody reads it

    def _step(
        self,
        layer: Any,
        told: list[Rotary],
        hidden_states: Tensor,  # [1, T, width]
        position_embeddings: Rotary | None = None,
        ragged: Ragged | None = None,
        **others: Any,
    ) -> Tensor:
        """Take the place of a layer in the model's loop: in a ragged batch the last one runs all of them."""
        if ragged is None or position_embeddings is None:
            others |= {} if ragged is None else {"ragged": ragged}
            return cast("Tensor", layer(hidden_states, position_embeddings=position_embeddings, **others))
        told.append(position_embeddings)
        if len(told) < len(self):
            return hidden_states
        if self.serves(hidden_states, told, ragged):
            return self.at_once(hidden_states, told, ragged)
        return self.one_by_one(hidden_states, told, ragged=ragged, **others)

    def one_by_one(self, hidden_states: Tensor, rotary: Seq[Rotary], **others: Any) -> Tensor:
        """Run layer after layer; `rotary` has an item for each."""
        for layer, each in zip(self._modules.values(), rotary, strict=True):
            hidden_states = cast("Any", layer)(hidden_states, position_embeddings=each, **others)
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
        if shape is None or shape.key_dim % 2 or ragged.batch.has_adapters:
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
            parts = [cast("LayerParts", _parts(layer)) for layer in self._modules.values()]
            self._ready = arena, Layers(parts, arena.k[: len(parts)], arena.v[: len(parts)])
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


def _agrees(together: Stack, model: PreTrainedModel) -> bool:
    """Whether an equivalence test gives the same result in C and module by module."""
    layout = kv_layout(model.config, model.dtype)
    if layout.same is None:
        return False
    arena = KVArena(layout, 1, _PAGE, model.device)
    ragged = Ragged(RaggedBatch.of([Feed([0] * _ROWS, 4, [0])], _PAGE, model.device), arena, native.attend)
    angles = random_rows(model, 1, _ROWS, layout.same.key_dim // 2).float().repeat(1, 1, 2) * 3
    # Not the same in two layers: some families have several.
    rotary = [((angles + i).cos().to(model.dtype), (angles + i).sin().to(model.dtype)) for i in range(len(together))]
    x = random_rows(model, 1, _ROWS, model.config.get_text_config().hidden_size)
    if not together.serves(x, rotary, ragged):
        return False
    ways = (together.one_by_one, together.at_once)
    return agree(lambda way: cast("Any", way)(x, rotary, ragged=ragged), *cast("Any", ways))
