"""EAGLE-1 (Li et al. 2024, arXiv 2401.15077): one layer that predicts the target's next feature.

EAGLE-2 (arXiv 2406.16858) has the same heads and drafts trees, which are not supported.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from pilotfish.engine.errors import ModelError
from pilotfish.engine.model.decoder.architecture import Architecture, NormForm
from pilotfish.engine.model.decoder.stack import FINAL
from pilotfish.engine.model.decoder.weights import WeightReader
from pilotfish.engine.proposers.heads.base import Head
from pilotfish.engine.proposers.heads.eagle3 import is_eagle3, load_eagle3
from pilotfish.engine.proposers.heads.layers import FeatureHead, check_sizes, layer_config, layer_of, reader_of
from pilotfish.engine.proposers.heads.proposer import HeadProposer
from pilotfish.engine.proposers.heads.weights import KIND, flattened, load_checkpoint, matrix_shapes

if TYPE_CHECKING:
    from pilotfish.engine.model.decoder.decoder import DecoderModel


class JoiningHead(FeatureHead):
    """Its layers read a projection of the concatenated token embedding and feature, both or neither normalised."""

    def __init__(
        self,
        architecture: Architecture,
        weights: WeightReader,
        target: DecoderModel,
        matrix: str,
        norms: tuple[nn.Module | None, nn.Module | None] = (None, None),
    ) -> None:
        """`matrix`: name of the projection; `norms`: of the embedding and of the feature."""
        super().__init__(architecture, weights, target)
        below = weights.below("model.")
        self.joining = below.matrix(
            {matrix: architecture.width}, 2 * architecture.width, has_bias=f"model.{matrix}.bias" in weights.weights
        )
        self.norm_embedded, self.norm_feature = norms

    def inputs(self, ids: Tensor, features: Tensor) -> tuple[Tensor, Tensor | None]:
        """See `FeatureHead`."""
        pairs = zip((self.norm_embedded, self.norm_feature), (self.embedded(ids), features), strict=True)
        joined = torch.cat([x if norm is None else cast("Tensor", norm(x)) for norm, x in pairs], -1)
        return self.joining(joined), None


def load_eagle(name: str, revision: str | None, target: DecoderModel) -> Head:
    """A head from a local folder or a hub id (keys as published: `fc`, `layers.0`); also recognises EAGLE-3.

    Raises:
        ModelError: it is not an EAGLE head, is an unsupported variant, or is incompatible with this target.
    """
    config, tensors = load_checkpoint(name, revision)
    if is_eagle3(config, tensors):
        return load_eagle3(name, config, tensors, target)
    config, tensors = _unwrapped(config, tensors, name)
    tensors.pop("layers.0.self_attn.rotary_emb.inv_freq", None)  # computed from the config
    tensors.pop("lm_head.weight", None)  # a copy of the target's, in some checkpoints
    if config.get("num_hidden_layers", 1) != 1:
        raise ModelError(f"{name!r} has {config['num_hidden_layers']} layers; expected 1 (EAGLE-1)")
    settings = layer_config(config, name, "llama", num_hidden_layers=1)
    width = settings.hidden_size
    check_sizes(name, width, settings.vocab_size, target)
    layer = layer_of(settings, name, tensors, 0)
    if "layers.0.input_layernorm.weight" not in tensors:  # the paper's head has no input norm before its attention
        layer = replace(layer, norms=(None, *layer.norms[1:]))
    made = Architecture((layer,), settings.vocab_size, width, NormForm(settings.rms_norm_eps), has_final_norm=False)
    own = matrix_shapes("fc", width, 2 * width, has_bias="fc.bias" in tensors)
    weights = reader_of(made, tensors, target, name, own)
    return JoiningHead(made, weights, target, "fc").over((FINAL,), HeadProposer)


def _unwrapped(
    config: dict[str, Any], tensors: dict[str, Tensor], name: str
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Convert a head of vLLM's `speculators` to the form of EAGLE's authors; others are unchanged."""
    if KIND not in config:
        return config, tensors
    flat = flattened(config, name, "eagle")
    if flat.get("layernorms"):  # their inputs differ between that library and vLLM
        raise ModelError(f"{name!r}: layernorms is true; EAGLE-1 heads with layernorms are not supported")
    if flat["model_type"] != "llama":
        raise ModelError(f"{name!r}: model_type is {flat['model_type']!r}; EAGLE-1 heads support llama layers only")
    names = {"fusion_fc.": "fc.", "transformer.": "layers.0."}
    named = {
        next((new + key.removeprefix(old) for old, new in names.items() if key.startswith(old)), key): tensor
        for key, tensor in tensors.items()
    }
    return flat | {"num_hidden_layers": 1}, named  # there it is the target's value
