"""Multi-token prediction (DeepSeek-V3, section 2.2 of arXiv 2412.19437): the layer that a target was trained with.

Fed h, the target's feature of position t after its final norm, and token t + 1, the layer computes

    x = W [norm(embedding of the token), norm(h)]      h' = norm(decoder layer(x))      logits = output matrix(h')

and h', the feature of t + 1, is fed back for the next draft. Embedding and output matrix are the target's own, unless
the checkpoint has others. The decoder layer is that of the target's family (`architecture_for` of a config of one
layer), over an arena of its own.

DeepSeek's, GLM's and Qwen's layers read and feed back features after the norm, as transformers and SGLang serve them;
vLLM feeds back those of DeepSeek's and GLM's layers without it. Of several layers the first drafts all tokens; no
other is loaded.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from engine.errors import ModelError
from engine.model.checkpoint import read_config, told_as_model_error
from engine.model.decoder.architecture import Architecture
from engine.model.decoder.families.table import architecture_for
from engine.model.decoder.load import check, prepared
from engine.model.decoder.norms import norm_of
from engine.model.decoder.shapes import Shapes, shapes_of
from engine.model.decoder.weights import HEAD, TABLE, WeightReader, stack_of
from engine.model.gguf.container import gguf_file
from engine.model.published.methods import quantisation_of, read_weights
from engine.model.tap import FINAL
from engine.proposers.heads.base import Head
from engine.proposers.heads.eagle import JoiningHead
from engine.proposers.heads.mtp_tensors import MTPFinder, names_here

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from engine.model.decoder.decoder import DecoderModel
    from engine.model.published.base import Codes, Weights

log = logging.getLogger(__name__)

_NUMBER = "num_nextn_predict_layers"  # of DeepSeek's and GLM's configs
_NORMS, _MATRIX = ("enorm", "hnorm"), "eh_proj"


def load_mtp(name: str, revision: str | None, target: DecoderModel) -> Head:
    """The first MTP layer of the checkpoint that `target` was loaded from, in its type and on its device.

    Raises:
        ModelError: the checkpoint has none, or one of a family that is not known, or it is not whole.
    """
    if gguf_file(name, revision) is not None:
        raise ModelError(f"mtp: {name!r} is a GGUF file, whose MTP layers are not read")
    finder = MTPFinder.of(target.config)
    if finder is None:
        raise ModelError(f"mtp: {name!r} is a {target.config.model_type} model, whose MTP layers are not known")
    with told_as_model_error(f"{name} (MTP layer)"):
        config = read_config(name, revision)
        architecture = architecture_for(_of_one_layer(config))
        if architecture is None:
            raise ModelError(f"mtp: a layer of this {config.model_type} is not in the table of architectures")
        weights = prepared(_weights(name, revision, config, finder), architecture)
        _check(name, architecture, weights)
        reader = WeightReader(weights, target.dtype, keeps_codes=False, device=target.device)
        width, below = architecture.width, reader.below("model.")
        before, after = (norm_of(architecture.norm, below, norm, width) for norm in _NORMS)
        head = JoiningHead(architecture, reader, target, _MATRIX, (before, after))
    return head.over((FINAL,))


def tell_of_mtp(name: str, revision: str | None, target: DecoderModel) -> None:
    """Log that the checkpoint of `target` has MTP layers, if it has: they draft only with the option `mtp`."""
    finder = MTPFinder.of(target.config)
    if finder is not None and finder.has_layers(names_here(name, revision)):
        log.info("%r has layers for multi-token prediction; with the option mtp they draft", name)


def _weights(name: str, revision: str | None, config: PreTrainedConfig, finder: MTPFinder) -> Weights:
    """The first layer's by our names; with an embedding and an output matrix where they are not both the target's."""
    weights = read_weights(name, revision, quantisation_of(name, config))
    found, layers = finder.first_layer(weights)
    if not found:
        raise ModelError(
            f"mtp: {name!r} has no MTP layers among its tensors ({_NUMBER} of its config is "
            f"{getattr(config, _NUMBER, None)}); published copies often leave them out"
        )
    if layers > 1:
        log.info("%r has %d MTP layers; the first one drafts", name, layers)
    shared = finder.of_target(weights)
    if config.tie_word_embeddings and TABLE in shared:
        shared.setdefault(HEAD, shared[TABLE])
    own = {key: found.pop(key) for key in (TABLE, HEAD) if key in found}
    is_shared = all(key in shared and _same(table, shared[key]) for key, table in own.items())
    return found if is_shared else found | shared | own


def _same(one: Tensor | Codes, other: Tensor | Codes) -> bool:
    return isinstance(one, Tensor) and isinstance(other, Tensor) and torch.equal(one, other)


def _of_one_layer(config: PreTrainedConfig) -> PreTrainedConfig:
    """The config of a model of the MTP layer alone: it attends, and has experts if any layer has."""
    by_layer = {"layer_types": ["full_attention"], "mlp_layer_types": ["sparse"], "first_k_dense_replace": 0}
    made: Any = copy.deepcopy(config)
    for key, value in by_layer.items():
        if getattr(config, key, None) is not None:
            setattr(made, key, value)
    made.num_hidden_layers, made.tie_word_embeddings = 1, False
    return made  # type: ignore[no-any-return]


def _check(name: str, architecture: Architecture, weights: Mapping[str, Tensor | Codes]) -> None:
    """Refuse weights that are missing, left over or of another shape; the target's tables need not be there."""
    width, table = architecture.width, torch.empty(architecture.vocab_size, architecture.width, device="meta")
    own: Shapes = {f"model.{norm}.weight": (width,) for norm in _NORMS}
    own[f"model.{_MATRIX}.weight"] = width, 2 * width
    check(f"{name} (MTP layer)", architecture, {TABLE: table, HEAD: table, **weights}, own)
    known = shapes_of(architecture).keys() | own.keys()
    others = sorted(key for key in weights if not {key, stack_of(key)} & known)
    if others:
        raise ModelError(f"mtp: {name!r} has {others[0]} in its MTP layer, which is not known")
