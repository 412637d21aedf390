"""One of several equal shards of a decoder: its layers, and its rows and columns of their matrices.

Results of attention and of feed-forwards are summed over all shards. Tables, norms, routers and the output matrix are
replicated, and so are parts with a norm over elements of all shards.
"""

from __future__ import annotations

import re
from collections import UserDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from pilotfish.engine.errors import ModelError
from pilotfish.engine.machine.mapped import release_mapped
from pilotfish.engine.model.decoder.architecture import Architecture, AttentionLayer, Layer
from pilotfish.engine.model.decoder.experts import Experts
from pilotfish.engine.model.decoder.feed_forward import GatedFeed, PlainFeed
from pilotfish.engine.model.decoder.latent import LatentLayer
from pilotfish.engine.model.decoder.shapes import shapes_of
from pilotfish.engine.model.decoder.weights import fused_name
from pilotfish.engine.native.experts import ExpertGate

if TYPE_CHECKING:
    from pilotfish.engine.model.decoder.decoder import DecoderModel
    from pilotfish.engine.model.published.base import Codes

_Part = TypeVar("_Part")
_STEM = re.compile(r"[._](weight|bias)$")
_HEADS, _INNER = {"heads": "num_attention_heads"}, {"inner": "intermediate_size"}
# By type of part: the sizes that are divided, with their usual names in configs.
_CUT: dict[type, dict[str, str]] = {
    AttentionLayer: _HEADS | {"kv_heads": "num_key_value_heads"},
    LatentLayer: _HEADS,
    GatedFeed: _INNER,
    PlainFeed: _INNER,
    Experts: {"inner": "moe_intermediate_size"},
}


@dataclass(frozen=True, slots=True)
class Share:
    """The shard of a process: number `number` of `size`; `total` sums `[1, T, width]` over all shards."""

    number: int
    size: int
    total: Callable[[Tensor], Tensor]


def share_of(architecture: Architecture, size: int) -> Architecture:
    """The architecture of the shard of each of `size` processes.

    Raises:
        ModelError: layers are recurrent or nested, or a size is not divisible; the message contains the field and both
        numbers.
    """
    if size == 1:
        return architecture
    return replace(architecture, layers=tuple(_layer(layer, size) for layer in architecture.layers))


def _layer(layer: Layer, size: int) -> Layer:
    if type(layer.mixer) not in _CUT:
        raise ModelError(f"tensor_parallel_size is {size}; recurrent layers cannot be sharded")
    if layer.around is not None:
        raise ModelError(f"tensor_parallel_size is {size}; nested layers (Gemma 3n and 4) cannot be sharded")
    mixer, feed = _part(layer.mixer, size), None if layer.feed is None else _part(layer.feed, size)
    return replace(layer, mixer=mixer, feed=feed, summed=(mixer != layer.mixer, feed != layer.feed))


def _part(part: _Part, size: int) -> _Part:
    """The shard of a part; the part itself if it cannot be divided."""
    changes: dict[str, Any] = {}
    match part:
        case AttentionLayer(norm=norm, out_norm=out_norm):
            if out_norm is not None or (norm is not None and (norm.listed or norm.extent == "all")):
                return part
            if part.groups > 1:
                changes["groups"] = _divided("the groups of qkv_proj", part.groups, size)
        case GatedFeed(norm=norm) if norm is not None:
            return part
        case Experts(shared=shared) if shared is not None:
            changes["shared"] = _part(shared, size)
    for field, name in _CUT.get(type(part), {}).items():
        changes[field] = _divided(name, getattr(part, field), size)
    return replace(part, **changes) if changes else part  # type: ignore[type-var]


def _divided(name: str, count: int, size: int) -> int:
    if count % size:
        raise ModelError(f"tensor_parallel_size is {size}, which does not divide {name} ({count})")
    return count // size


class ShareOfWeights(UserDict[str, "Tensor | Codes"]):
    """The weights of one shard, each cut from that of the whole model when it is read."""

    def __init__(self, weights: Mapping[str, Tensor | Codes], whole: Architecture, share: Share) -> None:
        """`weights` have the names and shapes of `whole`."""
        super().__init__(weights)
        self._share = share
        own = shapes_of(share_of(whole, share.size))
        # From the end, because a checkpoint may have separate matrices of a stack.
        self._axes = {
            key: next(axis - len(shape) for axis, count in enumerate(shape) if own[key][axis] != count)
            for key, shape in shapes_of(whole).items()
            if own[key] != shape
        }
        self._joined = {
            f"model.layers.{number}.{name}.{matrix}": sizes
            for number, layer in enumerate(whole.layers)
            for name, part in layer.parts
            for matrix, sizes in _joined(part).items()
        }

    def __getitem__(self, key: str) -> Tensor | Codes:
        found, axis, stem = self.data[key], self._axes.get(fused_name(key)), _STEM.sub("", key)
        if axis is None:
            # A bias is added only once to the sum over all shards.
            is_of_sum = key.endswith("bias") and not self._axes.keys().isdisjoint((stem, f"{stem}.weight"))
            return torch.zeros(found.shape) if is_of_sum and self._share.number else found
        whole = found if isinstance(found, Tensor) else found.dequantised()
        parts = whole.split(self._joined.get(stem, whole.shape[axis]), axis)
        cut = torch.cat([part.chunk(self._share.size, axis)[self._share.number] for part in parts], axis)
        release_mapped(whole)
        return cut


def _joined(part: object) -> dict[str, list[int]]:
    """By name of a matrix: the outputs of each of its parts that the checkpoint has in one matrix, concatenated."""
    match part:
        case AttentionLayer(joined=True, groups=1):
            return {"qkv_proj": [*part.sizes]}
        case GatedFeed(joined=True):
            return {"gate_up_proj": [part.inner] * 2}
        case Experts(gate=ExpertGate(interleaved=interleaved, ungated=ungated)):
            found = {} if interleaved or ungated else {"experts.gate_up_proj": [part.inner] * 2}
            shared = {} if part.shared is None else _joined(part.shared)
            return found | {f"{part.shared_name}.{matrix}": sizes for matrix, sizes in shared.items()}
    return {}


def sum_results(model: DecoderModel, share: Share) -> None:
    """Let the layers of a shard sum their results over all shards."""
    for layer in model.model.layers:
        for part, is_summed in zip((layer.mixer, layer.feed), layer.layer.summed, strict=True):
            if is_summed:
                part.register_forward_hook(lambda _module, _given, result: share.total(result))
