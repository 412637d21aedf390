"""The decoder that runs every architecture of the table (`architecture.py`), over ragged batches.

Its modules have transformers' names, which adapters and heads use. On a CPU all layers run in one C call if it supports
the pass, else module by module with the same bits; on a GPU our kernels run between the matmuls.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import torch
from torch import Tensor, nn

from pilotfish.engine.attention.registry import Ragged
from pilotfish.engine.machine.threads import most_threads
from pilotfish.engine.model.decoder.architecture import Architecture, AttentionLayer, FeedLayer
from pilotfish.engine.model.decoder.attention import GroupedAttention
from pilotfish.engine.model.decoder.experts import Experts, MixtureMLP
from pilotfish.engine.model.decoder.feed_forward import GatedFeed, GatedMLP, PlainFeed, PlainMLP
from pilotfish.engine.model.decoder.gemma import (
    NormedExperts,
    NormedMixture,
    PerLayerEmbeddings,
    ScaledLayer,
    ScaledSums,
    StreamedLayer,
    Streams,
)
from pilotfish.engine.model.decoder.latent import LatentAttention, LatentLayer
from pilotfish.engine.model.decoder.norms import RMSNorm, norm_of
from pilotfish.engine.model.decoder.ops import LayerOps
from pilotfish.engine.model.decoder.recurrent import (
    Beside,
    BesideLayer,
    ConvLayer,
    DeltaLayer,
    GatedDelta,
    Mamba1,
    Mamba1Layer,
    Mamba2,
    Mamba2Layer,
    Shared,
    SharedLayer,
    ShortConv,
)
from pilotfish.engine.model.decoder.rotary import Rotations
from pilotfish.engine.model.decoder.stack import FINAL, Stack
from pilotfish.engine.model.decoder.weights import Embedding, WeightReader
from pilotfish.engine.model.linear.activations import ELEMENTWISE
from pilotfish.engine.model.linear.cuda import Fp8Linear, W4Linear
from pilotfish.engine.model.linear.experts import FusedExperts
from pilotfish.engine.model.linear.grouped import GroupedLinear
from pilotfish.engine.native import PackedMatrix
from pilotfish.engine.recurrent.arena import StatePart

if TYPE_CHECKING:  # its import takes seconds
    from transformers import PreTrainedConfig, PreTrainedModel


class DecoderModel(nn.Module):
    """A model of the table."""

    def __init__(self, architecture: Architecture, config: PreTrainedConfig, weights: WeightReader) -> None:
        """Read the weights, one matrix at a time. Raises ModelError if one cannot be read."""
        super().__init__()
        self.architecture, self.config, self.dtype = architecture, config, weights.dtype
        self.generation_config = None  # the config has the end tokens
        self.lm_head, table = weights.head_and_table(architecture)
        self.model: Any = nn.Module()
        self.model.embed_tokens = table
        self.model.layers = Stack(read_layers(architecture, weights))
        read_ends(self.model, architecture, weights.below("model."))
        self.rotations = Rotations([layer.mixer.rotary for layer in architecture.layers])
        self.to(weights.device)
        self._joins_sums = False

    def use(self, ops: LayerOps) -> None:
        """Run these operations between matmuls, on a GPU instead of our C."""
        use_ops(self, self.architecture, ops, torch.empty(0, dtype=self.dtype, device=self.device))
        is_last = isinstance(self.model.norm, RMSNorm) and self.model.project_out is None
        self._joins_sums = is_last and all(layer.joins_sums for layer in self.model.layers)

    @property
    def state(self) -> tuple[StatePart, ...]:
        """The parts of the state of its layers, in the order in which a pass comes to them."""
        return self.architecture.state(self.dtype, len(self.model.layers))

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    def get_input_embeddings(self) -> nn.Module:
        table: nn.Module = self.model.embed_tokens
        return table

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def forward(
        self,
        input_ids: Tensor,  # [1, T]
        position_ids: Tensor,  # [1, T]
        logits_to_keep: Tensor,  # [R]
        ragged: Ragged,
    ) -> Tensor:
        """Logits `[1, R, vocab]` of these rows."""
        trunk = self.model
        hidden = self._embedded(input_ids, position_ids)
        hidden = hidden.float() if self.architecture.wide else hidden
        ragged = replace(ragged, embedded=hidden)
        turned = self.rotations.of(position_ids[0], self.dtype, len(trunk.layers))
        beside = None
        if trunk.per_layer is not None:
            beside, hidden = trunk.per_layer(input_ids, hidden), trunk.per_layer.spread(hidden)
        has_readers = any(FINAL in tap.places for tap in trunk.layers.taps)
        if self._joins_sums:
            normed = trunk.layers.in_sums(hidden, turned, ragged, trunk.norm)
        else:
            hidden = trunk.layers.run(hidden, turned, ragged, beside)
            normed = self._final(hidden) if has_readers else None
        if normed is not None:
            trunk.layers.keep(FINAL, normed[0])
        kept = self._final(hidden[:, logits_to_keep]) if normed is None else normed[:, logits_to_keep]
        logits: Tensor = self.lm_head(kept.to(self.dtype))
        scale, cap = self.architecture.logit_scale, self.architecture.softcap
        if scale is not None:
            logits = logits * scale
        return logits if cap is None else ELEMENTWISE[torch.tanh](logits / cap) * cap

    def _embedded(self, ids: Tensor, positions: Tensor) -> Tensor:
        """The input of the first layer, `[1, T, width]`."""
        trunk, learned = self.model, self.architecture.positions
        hidden = _through(trunk.project_in, trunk.embed_tokens(ids))
        if learned is not None:
            hidden = hidden + trunk.embed_positions(positions + learned.offset)
        return _through(trunk.embed_norm, hidden)

    def _final(self, hidden: Tensor) -> Tensor:
        """The input of the output matrix: `[1, T, width]` -> `[1, T, width]`."""
        if self.model.per_layer is not None:
            hidden = self.model.per_layer.merge(hidden)
        return _through(self.model.project_out, _through(self.model.norm, hidden))


Model: TypeAlias = "DecoderModel | PreTrainedModel"  # a decoder, or transformers' module


def is_batch_invariant(model: nn.Module) -> bool:
    """Whether each matmul of a model gives a row the same bits in any batch: true of a decoder's except torch's."""
    return isinstance(model, DecoderModel) and not any(isinstance(module, nn.Linear) for module in model.modules())


def runs_in_c(model: nn.Module) -> bool:
    """Whether our C multiplies all matrices of a model, so that little work is left for torch."""
    matmuls = [module for module in model.modules() if isinstance(module, GroupedLinear)]
    return is_batch_invariant(model) and all(isinstance(matmul.pack(), PackedMatrix) for matmul in matmuls)


def _waves(waves: int, rows: int, width: int) -> Tensor:
    """See `LearnedPositions`: float32 `[rows, width]`."""
    turns = 10000 ** (torch.arange(width // 2).float() / -waves)
    angles = torch.arange(rows).float()[:, None] * turns
    return torch.cat([angles.sin(), angles.cos()], 1)


def read_ends(trunk: Any, made: Architecture, weights: WeightReader) -> None:
    """Read the parts between tables and layers."""
    width, size = made.width, made.embedding_width
    for name, is_there in (("norm", made.has_final_norm), ("embed_norm", made.normed_embeddings)):
        setattr(trunk, name, norm_of(made.norm, weights, name, width) if is_there else None)
    trunk.project_in = None if size is None else weights.matrix({"project_in": width}, size, has_bias=False)
    trunk.project_out = None if size is None else weights.matrix({"project_out": size}, width, has_bias=False)
    trunk.per_layer = None
    if made.per_layer is not None:
        trunk.per_layer = PerLayerEmbeddings(cast("Any", made.per_layer), width, weights.below("per_layer."))
    if made.positions is not None and made.positions.waves is not None:
        trunk.embed_positions = Embedding(
            _waves(made.positions.waves, made.positions.rows, width).to(weights.dtype), None
        )
    elif made.positions is not None:
        table = weights.vector("embed_positions.weight", made.positions.rows, width)
        trunk.embed_positions = Embedding(table, None)


def read_layers(architecture: Architecture, weights: WeightReader) -> list[DecoderLayer]:
    """Read all layers, several concurrently, because single conversion steps leave most threads idle.

    Floats to be rounded are read one layer at a time: rounding uses all threads, and two layers would need more memory.
    """
    numbers, here = range(len(architecture.layers)), copy_context()

    def layer(number: int) -> DecoderLayer:
        below = weights.below(f"model.layers.{number}.")
        return here.copy().run(DecoderLayer, architecture, number, below)

    if weights.rounded is not None or weights.device.type != "cpu":
        return [*map(layer, numbers)]
    with ThreadPoolExecutor(most_threads()) as threads:
        return list(threads.map(layer, numbers))


def use_ops(model: nn.Module, architecture: Architecture, ops: LayerOps, like: Tensor) -> None:
    """Let all parts of a model run these operations; `like`: a tensor of its type and device."""
    feeds = [layer.feed.inner for layer in architecture.layers if isinstance(layer.feed, GatedFeed)]
    heads = [module.layer.head_dim for module in model.modules() if isinstance(module, GroupedAttention)]
    sizes = architecture.width, max(feeds, default=16), max(heads, default=16)
    rounded = [module for module in model.modules() if isinstance(module, Fp8Linear)]
    fours = [module for module in model.modules() if isinstance(module, W4Linear)]
    widest = max(fours, key=lambda matmul: matmul.in_features, default=None)
    found = ops.checked(sizes, like, in_fp8=bool(rounded), in_w4=widest)
    for matmul in rounded:
        matmul.round_rows = found.round_rows
    for four in fours:
        four.multiply = found.w4_matmul
    for module in model.modules():
        if isinstance(module, RMSNorm):
            module.use(found)
        elif isinstance(module, GroupedAttention | GatedMLP):
            module.ops = found
        elif isinstance(module, FusedExperts):
            module.mix = found.mix


class DecoderLayer(nn.Module):
    """A mixer and a feed-forward with their norms (`architecture.Layer`)."""

    def __init__(self, architecture: Architecture, number: int, weights: WeightReader) -> None:
        super().__init__()
        layer, width = architecture.layers[number], architecture.width
        self.layer, self.dtype = layer, weights.dtype
        mixer, feed = layer.names
        setattr(self, mixer, _MIXERS[type(layer.mixer)](layer.mixer, number, width, weights.below(f"{mixer}.")))
        if layer.feed is not None:
            setattr(self, feed, _FEEDS[type(layer.feed)](layer.feed, width, weights.below(f"{feed}.")))
        for name in filter(None, (*layer.norms, layer.beside)):
            setattr(self, name, norm_of(architecture.norm, weights, name, width))
        self.around: nn.Module | None = None
        if layer.around is not None:
            self.around = _AROUND[type(layer.around)](layer.around, width, weights.below("around."))

    @property
    def mixer(self) -> Any:
        return self._modules[self.layer.names[0]]

    @property
    def feed(self) -> Any:
        """The feed-forward; None if the layer has none."""
        return self._modules.get(self.layer.names[1])

    @property
    def norms(self) -> list[Any]:
        """In the order of `Layer.norms`."""
        return [None if name is None else self._modules[name] for name in self.layer.norms]

    @property
    def joins_sums(self) -> bool:
        """Whether each of its sums is read only by an RMSNorm, so that one kernel computes both."""
        first, after_mixer, second, after_feed = self.norms
        has_norms = isinstance(first, RMSNorm) and isinstance(second, RMSNorm) and self.feed is not None
        others = all(norm is None or isinstance(norm, RMSNorm) for norm in (after_mixer, after_feed))
        return has_norms and others and self.layer.is_plain and self.layer.beside is None

    @staticmethod
    def rounds(part: Any) -> bool:
        """Whether a part begins with a matmul that reads 8-bit floats."""
        return isinstance(getattr(part, "matmul", None), Fp8Linear)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor], ragged: Ragged, beside: Tensor | None = None) -> Tensor:
        """`[1, T, width]` -> `[1, T, width]`; `beside`: see `Stack.run`."""
        if self.around is None:
            return self.sums(x, rotary, ragged, beside)
        return cast("Tensor", self.around(self, x, rotary, ragged, beside))

    def sums(self, x: Tensor, rotary: tuple[Tensor, Tensor], ragged: Ragged, beside: Tensor | None = None) -> Tensor:
        """Add the results of mixer and feed-forward."""
        layer, feed = self.layer, self.feed
        first, after_mixer, second, after_feed = self.norms
        normed = _through(first, x.to(self.dtype))  # may be float32 between layers
        read = normed
        if layer.beside is not None:
            assert beside is not None, "a layer with `beside` requires a second row"
            read = torch.cat([_through(self._modules[layer.beside], beside), normed], -1)
        total = self._sum(normed if layer.keeps_normed else x, self.mixer(read, rotary, ragged), after_mixer)
        if feed is None:
            return total
        read = total
        if layer.parallel:
            read = normed if second is None else x
        return self._sum(total, feed(_through(second, read)), after_feed)

    def _sum(self, x: Tensor, made: Tensor, norm: nn.Module | None) -> Tensor:
        """Add the result of a part of the layer, normalised."""
        scale = self.layer.scale
        made = made if self.layer.normed_sums else _through(norm, made)
        total = x + (made if scale == 1 else made * scale)
        return _through(norm, total) if self.layer.normed_sums else total


# Modules by description.
_MIXERS: dict[type, Callable[..., nn.Module]] = {
    AttentionLayer: GroupedAttention,
    BesideLayer: Beside,
    ConvLayer: ShortConv,
    DeltaLayer: GatedDelta,
    FeedLayer: lambda layer, _, width, weights: _FEEDS[type(layer.feed)](layer.feed, width, weights),
    Mamba1Layer: Mamba1,
    Mamba2Layer: Mamba2,
    LatentLayer: LatentAttention,
    SharedLayer: Shared,
}
_FEEDS: dict[type, Callable[..., nn.Module]] = {
    GatedFeed: GatedMLP,
    PlainFeed: PlainMLP,
    Experts: MixtureMLP,
    NormedExperts: NormedMixture,
}
_AROUND: dict[type, Callable[..., nn.Module]] = {ScaledSums: ScaledLayer, Streams: StreamedLayer}


def _through(norm: nn.Module | None, x: Tensor) -> Tensor:
    return x if norm is None else cast("Tensor", norm(x))
