"""Common code of heads with decoder layers: configs, loading and execution.

A head drafts one token per pass, and is bound by reading its weights. So on a CPU separately trained heads are in
bfloat16, as most are stored, for any type of the target: that may change drafts, but never outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pilotfish.engine.attention.reference import AttentionSpec
from pilotfish.engine.attention.registry import Ragged
from pilotfish.engine.errors import ModelError, shown
from pilotfish.engine.kv.arena import KVLayout
from pilotfish.engine.model.decoder.architecture import Architecture, Layer
from pilotfish.engine.model.decoder.decoder import read_layers, use_ops
from pilotfish.engine.model.decoder.families.builders import gated, grouped
from pilotfish.engine.model.decoder.families.described import SCALINGS, ModelConfig, described_by
from pilotfish.engine.model.decoder.norms import norm_of
from pilotfish.engine.model.decoder.ops import LayerOps
from pilotfish.engine.model.decoder.rotary import Rotations
from pilotfish.engine.model.decoder.shapes import Shapes, shapes_of, wanted_by
from pilotfish.engine.model.decoder.stack import Stack
from pilotfish.engine.model.decoder.weights import HEAD, TABLE, Embedding, WeightReader
from pilotfish.engine.native import multiplies, rows_for
from pilotfish.engine.proposers.base import Proposer
from pilotfish.engine.proposers.heads.base import Head
from pilotfish.engine.proposers.heads.weights import check_fits

if TYPE_CHECKING:
    from pilotfish.engine.model.decoder.decoder import DecoderModel

# Defaults of configs.
_DEFAULTS = {"rms_norm_eps": 1e-6, "bos_token_id": None, "eos_token_id": None, "max_position_embeddings": 2048}


def layer_config(config: Mapping[str, Any], name: str, family: str, **fixed: object) -> ModelConfig:
    """The config of a head's layers in the form of a family's; `fixed`: overridden fields.

    Raises:
        ModelError: it is not a valid config of such layers.
    """
    is_all = "partial_rotary_factor", 1  # the whole head is rotated: the default
    asked = {key: value for key, value in config.items() if value is not None and (key, value) != is_all}
    for key in {"rope_scaling", "rope_parameters"} & asked.keys():
        rope = asked[key]
        kind = rope.get("rope_type", rope.get("type", "default")) if isinstance(rope, dict) else rope
        if isinstance(rope, dict) and "mrope" in (kind, rope.get("type")):
            # In text, all sections have the same position.
            asked[key] = {k: v for k, v in rope.items() if k == "rope_theta"} | {"rope_type": "default"}
        elif kind not in SCALINGS:
            raise ModelError(f"{name!r}: rope_type is {kind!r}; supported: {', '.join(SCALINGS)}")
    found = described_by(_DEFAULTS | asked | fixed, family)
    if found is None:
        raise ModelError(f"cannot load {name!r}: invalid {family} config: {shown(asked, 400)}")
    return found


def check_sizes(name: str, width: int, vocab: int, target: DecoderModel) -> None:
    """Raise ModelError for a head of a target with another width or vocabulary."""
    if (width, vocab) != (want := sizes_of(target)):
        raise ModelError(f"{name!r} is for hidden size {width} and {vocab} tokens; the target has {want}")


def sizes_of(target: DecoderModel) -> tuple[int, int]:
    """Input width and number of tokens of the target's output matrix."""
    return target.architecture.embedding_width or target.architecture.width, target.architecture.vocab_size


def layer_of(
    config: ModelConfig, name: str, keys: Collection[str], number: int, window: int | None = None, **mixer: Any
) -> Layer:
    """A Llama layer with the biases in the checkpoint's `keys`; `mixer`: further fields.

    Raises:
        ModelError: the config has an unsupported activation or invalid heads.
    """
    query, out, gate = (
        f"layers.{number}.{part}_proj.bias" in keys for part in ("self_attn.q", "self_attn.o", "mlp.gate")
    )
    spec = AttentionSpec(config.head_dim**-0.5, window=window)
    try:
        return Layer(grouped(config, qkv_bias=query, out_bias=out, spec=spec, **mixer), gated(config, bias=gate))
    except ModelError as error:
        raise ModelError(f"cannot load {name!r}: {error}") from error


def reader_of(
    architecture: Architecture, tensors: Mapping[str, Tensor], target: DecoderModel, name: str, own: Shapes
) -> WeightReader:
    """A reader of a head's tensors, named as published below `model.`; `own`: shapes of those besides its layers.

    Embedding and output matrix may be the target's. On a CPU the head is in bfloat16 if our C supports all of it, else
    in the target's type.

    Raises:
        ModelError: tensors are missing, unexpected or have another shape.
    """
    shared = {key for key in ("embed_tokens.weight", HEAD) if key not in tensors}
    wanted = {key.removeprefix("model."): shape for key, shape in shapes_of(architecture).items()} | own
    check_fits({key: shape for key, shape in wanted.items() if key not in shared}, tensors, name)
    sizes = {architecture.width, architecture.attention.head_dim // 2}
    sizes |= {each.matrix[1] for each in wanted_by(architecture).values() if each.matrix is not None}
    in_c = target.device.type == "cpu" and multiplies(torch.bfloat16) and rows_for(torch.bfloat16, *sizes) is not None
    named = {key if key == HEAD else f"model.{key}": tensor for key, tensor in tensors.items()}
    return WeightReader(named, torch.bfloat16 if in_c else target.dtype, device=target.device)


class FeatureHead(nn.Module):
    """Decoder layers that predict features from features and tokens, and logits from features.

    Embedding and output matrix are the target's if the weights have none. `drafts`: the target's ids of its tokens,
    int64 `[n]`; None: all. `feeds_normed`: the normalised feature is fed back, if it has a final norm.
    """

    def __init__(
        self,
        architecture: Architecture,
        weights: WeightReader,
        target: DecoderModel,
        *,
        drafts: Tensor | None = None,
        feeds_normed: bool = True,
    ) -> None:
        super().__init__()
        self.architecture, self.feeds_normed = architecture, feeds_normed
        self.dtype, self.device = weights.dtype, weights.device
        width, below = architecture.width, weights.below("model.")
        self.layers = Stack(read_layers(architecture, weights))
        self.rotations = Rotations([layer.mixer.rotary for layer in architecture.layers]).to(weights.device)
        self.norm = norm_of(architecture.norm, below, "norm", width) if architecture.has_final_norm else None
        table: nn.Module = target.get_input_embeddings()
        if TABLE in weights.weights:
            table = Embedding(below.vector("embed_tokens.weight", *weights.weights[TABLE].shape), None)
        output, self._output_dtype = target.get_output_embeddings(), target.dtype
        if HEAD in weights.weights:
            output = weights.matrix(
                {"lm_head": weights.weights[HEAD].shape[0]}, width, has_bias=False, dtype=torch.float32
            )
            self._output_dtype = weights.dtype
        self.ends = table, output  # in a tuple, so that parts of the target are not registered
        self._drafts = None if drafts is None else drafts.to(weights.device)

    def over(self, places: tuple[int, ...], proposer_of: Callable[..., Proposer]) -> Head:
        """The head for these places of the target, on a GPU with our kernels between matmuls."""
        if self.device.type == "cuda":
            use_ops(self, self.architecture, LayerOps.kernels(), torch.empty(0, dtype=self.dtype, device=self.device))
        layout = KVLayout(self.architecture.kv, self.dtype)
        return Head(places, layout, partial(proposer_of, self.eval(), places))

    def project(self, features: Tensor) -> Tensor:
        """Project the target's features `[n, width of its places]` to `[n, width]`; by default unchanged."""
        return features.to(self.dtype)

    def embedded(self, ids: Tensor) -> Tensor:
        """`[T]` -> `[T, width]`, unscaled: heads are trained without the target's scale."""
        table = self.ends[0]
        found: Tensor = F.embedding(ids, table.weight) if isinstance(table, nn.Embedding) else table(ids)
        return found.to(self.dtype)

    def inputs(self, ids: Tensor, features: Tensor) -> tuple[Tensor, Tensor | None]:
        """The inputs of the layers, and second rows of those that read two; `[T, width]` each."""
        return features, self.embedded(ids)

    def forward(self, features: Tensor, ragged: Ragged) -> Tensor:
        """Features `[T, width]` of t and the tokens of t + 1 -> features of t + 1 at the last rows, `[R, width]`."""
        batch = ragged.batch
        hidden, beside = self.inputs(batch.input_ids, features)
        rotary = self.rotations.of(batch.position_ids, self.dtype, len(self.layers))
        second = None if beside is None else [beside[None]] * len(rotary)
        made = self.layers.run(hidden[None], rotary, ragged, second)[0]
        made = made if len(batch.logit_rows) == len(made) else made[batch.logit_rows]
        return made if self.norm is None or not self.feeds_normed else cast("Tensor", self.norm(made))

    def logits(self, features: Tensor) -> Tensor:
        """float32 `[R, target's vocab]` of features from `forward`; -inf for tokens outside of its vocabulary."""
        normed = features if self.norm is None or self.feeds_normed else self.norm(features)
        logits: Tensor = self.ends[1](normed.to(self._output_dtype)).float()
        if (cap := self.architecture.softcap) is not None:
            logits = torch.tanh(logits / cap) * cap
        if self._drafts is None:
            return logits
        wide = logits.new_full((len(logits), self.architecture.vocab_size), float("-inf"))
        return wide.index_copy_(1, self._drafts, logits)
