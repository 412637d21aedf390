"""Multi-token prediction (DeepSeek-V3, section 2.2 of arXiv 2412.19437): a layer that was trained with the target.

Fed h, the target's feature of position t after its final norm, and token t + 1, the layer computes

    x = W [norm(embedding of the token), norm(h)]      h' = norm(decoder layer(x))      logits = output matrix(h')

and h', the feature of t + 1, is fed back for the next draft. Embedding and output matrix are the target's own, unless
the checkpoint has others. The decoder layer is that of the target's family (`architecture_for` of a config of one
layer), over an arena of its own.

DeepSeek's, GLM's and Qwen's layers read and feed back features after the norm, as in transformers and SGLang; vLLM
feeds back those of DeepSeek's and GLM's layers without it. Of several layers only the first is loaded; it drafts all
tokens.
"""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError
from safetensors import safe_open
from torch import Tensor

from pilotfish.engine.errors import ModelError
from pilotfish.engine.model.checkpoint import as_model_error, read_config, shape_of
from pilotfish.engine.model.decoder.architecture import Architecture
from pilotfish.engine.model.decoder.families.table import architecture_for
from pilotfish.engine.model.decoder.load import check, prepared
from pilotfish.engine.model.decoder.norms import norm_of
from pilotfish.engine.model.decoder.shapes import Shapes, shapes_of
from pilotfish.engine.model.decoder.stack import FINAL
from pilotfish.engine.model.decoder.weights import HEAD, TABLE, WeightReader, fused_name
from pilotfish.engine.model.gguf.container import gguf_file
from pilotfish.engine.model.published.methods import quantisation_of, read_weights
from pilotfish.engine.model.text_part import names_in_whole
from pilotfish.engine.proposers.heads.base import Head
from pilotfish.engine.proposers.heads.eagle import JoiningHead
from pilotfish.engine.proposers.heads.proposer import HeadProposer

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from pilotfish.engine.model.decoder.decoder import DecoderModel
    from pilotfish.engine.model.published.base import Codes, Weights

log = logging.getLogger(__name__)

_NUMBER = "num_nextn_predict_layers"  # of DeepSeek's and GLM's configs
_NORMS, _MATRIX = ("enorm", "hnorm"), "eh_proj"
FAMILIES = frozenset({"deepseek_v3", "glm4_moe", "glm4_moe_lite", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"})
# The location of such layers by family. DeepSeek and GLM: after the target's last layer, each with all of its parts.
# Qwen: in a separate model, whose layers share the other parts.
_PLACE = re.compile(r"(?:model\.layers\.(?P<layer>\d+)|mtp(?:\.layers\.(?P<of_qwen>\d+))?)\.(?P<rest>.+)")
# Their names of the modules besides the decoder layer, and ours, which are DeepSeek's for those that decoders do not
# have.
_PARTS = {
    **{part: f"model.{part}" for part in (*_NORMS, _MATRIX, "embed_tokens")},
    "shared_head.norm": "model.norm", "shared_head.head": "lm_head",
    "pre_fc_norm_embedding": "model.enorm", "pre_fc_norm_hidden": "model.hnorm", "fc": "model.eh_proj",
    "norm": "model.norm",
}  # fmt: skip
T = TypeVar("T")


def load_mtp(name: str, revision: str | None, target: DecoderModel) -> Head:
    """The first MTP layer of the checkpoint that `target` was loaded from, in its type and on its device.

    Raises:
        ModelError: the checkpoint has none, its family is not supported, or the layer is incomplete.
    """
    if gguf_file(name, revision) is not None:
        raise ModelError(f"mtp: {name!r} is a GGUF file, whose MTP layers are not supported")
    if target.config.model_type not in FAMILIES:
        raise ModelError(f"mtp: {name!r} is a {target.config.model_type} model, whose MTP layers are not supported")
    with as_model_error(f"{name} (MTP layer)"):
        config = read_config(name, revision)
        architecture = architecture_for(_of_one_layer(config))
        if architecture is None:
            raise ModelError(f"mtp: a layer of this {config.model_type} is not in the table of architectures")
        weights = prepared(_weights(name, revision, config, target.config), architecture)
        _check(name, architecture, weights)
        reader = WeightReader(weights, target.dtype, keeps_codes=False, device=target.device)
        width, below = architecture.width, reader.below("model.")
        before, after = (norm_of(architecture.norm, below, norm, width) for norm in _NORMS)
        head = JoiningHead(architecture, reader, target, _MATRIX, (before, after))
    return head.over((FINAL,), HeadProposer)


def log_mtp_layers(name: str, revision: str | None, target: DecoderModel) -> None:
    """Log whether the checkpoint of `target` has MTP layers, which are used only with `draft mtp`."""
    if target.config.model_type not in FAMILIES:
        return
    if first_layer(dict.fromkeys(_names_here(name, revision)), target.config)[1]:
        log.info("%r has MTP layers; use them for drafting with --draft mtp", name)


def _names_here(name: str, revision: str | None) -> Iterator[str]:
    """The names of a checkpoint's tensors, from local files; nothing is downloaded."""
    try:
        folder = name if Path(name).is_dir() else snapshot_download(name, revision=revision, local_files_only=True)
    except (LocalEntryNotFoundError, HFValidationError):  # not a hub checkpoint
        return
    for path in Path(folder).glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            yield from file.keys()


def first_layer(tensors: Mapping[str, T], config: PreTrainedConfig) -> tuple[dict[str, T], int]:
    """The tensors of a target's first MTP layer by our names, and the number of such layers."""
    found, layers, depth = dict[str, T](), set[int](), shape_of(config, "num_hidden_layers")
    for key, tensor in tensors.items():
        match = _PLACE.fullmatch(_alone(key, config))
        if match is None:
            continue
        number = int(match["layer"]) - depth if match["layer"] else int(match["of_qwen"] or 0)
        if number >= 0:  # others are layers of the target
            layers.add(number)
        if number == 0:
            module, _, kind = match["rest"].rpartition(".")
            name = f"{_PARTS[module]}.{kind}" if module in _PARTS else f"model.layers.0.{match['rest']}"
            found[name] = tensor
    return found, len(layers)


def _alone(key: str, config: PreTrainedConfig) -> str:
    """The name without the prefix of a multimodal model."""
    for pattern, short in (names_in_whole(config) or {}).items():
        key = re.sub(pattern, short, key)
    return key


def _weights(name: str, revision: str | None, config: PreTrainedConfig, target: PreTrainedConfig) -> Weights:
    """The first layer's weights by our names, with embedding and output matrix unless both are the target's."""
    weights = read_weights(name, revision, quantisation_of(name, config))
    found, layers = first_layer(weights, target)
    if not found:
        raise ModelError(
            f"mtp: {name!r} has no MTP layers among its tensors ({_NUMBER} of its config is "
            f"{getattr(config, _NUMBER, None)}); published copies often omit them"
        )
    if layers > 1:
        log.info("%r has %d MTP layers; only the first one is used", name, layers)
    shared = {alone: weight for key, weight in weights.items() if (alone := _alone(key, target)) in (TABLE, HEAD)}
    if config.tie_word_embeddings and TABLE in shared:
        shared.setdefault(HEAD, shared[TABLE])
    own = {key: found.pop(key) for key in (TABLE, HEAD) if key in found}
    is_shared = all(key in shared and _same(table, shared[key]) for key, table in own.items())
    return found if is_shared else found | shared | own


def _same(one: Tensor | Codes, other: Tensor | Codes) -> bool:
    return isinstance(one, Tensor) and isinstance(other, Tensor) and torch.equal(one, other)


def _of_one_layer(config: PreTrainedConfig) -> PreTrainedConfig:
    """The config of a model of only the MTP layer: with attention, and with experts if any layer has them."""
    by_layer = {"layer_types": ["full_attention"], "mlp_layer_types": ["sparse"], "first_k_dense_replace": 0}
    made: Any = copy.deepcopy(config)
    for key, value in by_layer.items():
        if getattr(config, key, None) is not None:
            setattr(made, key, value)
    made.num_hidden_layers, made.tie_word_embeddings = 1, False
    return made  # type: ignore[no-any-return]


def _check(name: str, architecture: Architecture, weights: Mapping[str, Tensor | Codes]) -> None:
    """Refuse missing or unexpected weights and other shapes; the target's tables are optional."""
    width, table = architecture.width, torch.empty(architecture.vocab_size, architecture.width, device="meta")
    own: Shapes = {f"model.{norm}.weight": (width,) for norm in _NORMS}
    own[f"model.{_MATRIX}.weight"] = width, 2 * width
    check(f"{name} (MTP layer)", architecture, {TABLE: table, HEAD: table, **weights}, own)
    known = shapes_of(architecture).keys() | own.keys()
    others = sorted(key for key in weights if not {key, fused_name(key)} & known)
    if others:
        raise ModelError(f"mtp: {name!r} has an unexpected tensor {others[0]} in its MTP layer")
