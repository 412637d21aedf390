"""The config of a DFlash draft, in the authors' form or that of `speculators`; what we lack is refused.

In the authors' form (`dflash_config`) the target's layer i is read after it, in `speculators` before it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from engine.errors import ModelError
from engine.model.checkpoint import shape_of
from engine.model.decoder.architecture import Architecture, HeadNorm, NormForm
from engine.model.decoder.families.builders import FULL, SLIDING
from engine.model.linear.rows import matmul_shape
from engine.proposers.heads.layers import layer_config, layer_of
from engine.proposers.heads.weights import number

if TYPE_CHECKING:
    from engine.model.decoder.decoder import DecoderModel
    from engine.model.decoder.families.described import ModelConfig

_ARCHITECTURES = frozenset({"DFlashDraftModel", "DFlashSpeculator"})
_BACKBONES = ("qwen3", "llama")  # the layers are Qwen3's all the same
_OLD_NAMES = frozenset({"torch_dtype", "rope_theta", "rope_scaling"})
# Fields of Qwen3's configs, and those of any.
_QWEN3 = frozenset(
    {"vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "head_dim",
     "num_key_value_heads", "hidden_act", "max_position_embeddings", "initializer_range", "rms_norm_eps", "use_cache",
     "tie_word_embeddings", "rope_parameters", "attention_bias", "use_sliding_window", "sliding_window",
     "max_window_layers", "layer_types", "attention_dropout", "model_type", "architectures", "dtype",
     "transformers_version", "bos_token_id", "eos_token_id", "pad_token_id", "_name_or_path", "id2label", "label2id",
     "return_dict", "chunk_size_feed_forward", "is_encoder_decoder", "output_attentions", "output_hidden_states",
     "problem_type"}
)  # fmt: skip
_BESIDE_QWEN3 = _OLD_NAMES | {
    "auto_map",
    "block_size",
    "dflash_config",
    "num_target_layers",
    "is_causal",
    "final_logit_softcapping",
}
_DFLASH = frozenset({"mask_token_id", "target_layer_ids", "block_size", "num_target_layers", "causal"})
_SPECULATORS = frozenset(
    {"speculators_model_type", "speculators_version", "speculators_config", "transformer_layer_config", "auto_map"}
    | {"draft_vocab_size", "block_size", "target_hidden_size", "aux_hidden_state_layer_ids", "mask_token_id"}
    | {"sliding_window_non_causal", "sample_from_anchor", "torch_dtype"}
)


@dataclass(frozen=True, slots=True)
class DFlashConfig:
    """What a draft is, for one target."""

    architecture: Architecture  # of its layers
    places: tuple[int, ...]  # of the target that it reads (`Tap`)
    block: int  # rows of a block: the newest token and a mask for each draft
    mask: int  # id of the mask token, which stands for a token to be drafted
    is_causal: tuple[bool, ...]  # by layer: whether a row of the block sees those before it alone
    draft_vocab: int  # tokens that it drafts


def read_dflash_config(
    name: str, config: Mapping[str, Any], target: DecoderModel, tensors: Mapping[str, Tensor]
) -> DFlashConfig:
    """Read the config of the draft `name`, whose `tensors` tell the size of its heads.

    Raises:
        ModelError: it is that of another kind of draft, asks for what is not served, or does not fit this target.
    """
    asked = _speculators_form(name, config) if "speculators_model_type" in config else _authors_form(name, config)
    settings = _settings(name, asked.layers, tensors)
    depth, vocab = shape_of(target.config, "num_hidden_layers"), settings.vocab_size
    want = matmul_shape(target.get_output_embeddings())
    if (settings.hidden_size, vocab) != want:
        raise ModelError(f"{name!r} is for {settings.hidden_size} features and {vocab} tokens; the target has {want}")
    if asked.depth not in (None, depth):
        raise ModelError(f"{name!r} is for a target of num_target_layers {asked.depth}; this one has {depth} layers")
    if not all(0 <= place < depth for place in asked.places):
        # After the last layer some implementations read before the final norm, and others after it.
        raise ModelError(f"{name!r} reads the target at {asked.said}; expected layers before the last of its {depth}")
    if not 0 <= asked.mask < vocab:
        raise ModelError(f"{name!r}: mask_token_id is {asked.mask}; the target has {vocab} tokens")
    if asked.block < 2:
        raise ModelError(f"{name!r}: block_size is {asked.block}; expected a place for a draft behind the first")
    is_causal = tuple(_is_causal(name, kind, asked.causal) for kind in settings.layer_types)
    form = NormForm(settings.rms_norm_eps)
    layers = tuple(
        layer_of(settings, name, tensors, i, settings.sliding_window if kind == SLIDING else None, norm=HeadNorm(form))
        for i, kind in enumerate(settings.layer_types)
    )
    made = Architecture(layers, vocab, settings.hidden_size, form, softcap=asked.softcap)
    return DFlashConfig(made, asked.places, asked.block, asked.mask, is_causal, asked.draft_vocab or vocab)


@dataclass(frozen=True, slots=True)
class _Asked:
    """What both forms say."""

    layers: Mapping[str, Any]  # a config of transformers
    places: tuple[int, ...]
    said: str  # where that stands, for messages
    block: int
    mask: int
    causal: bool | None  # of all layers; None: it depends on their kind
    draft_vocab: int | None = None
    depth: int | None = None  # of the target
    softcap: float | None = None


def _authors_form(name: str, config: Mapping[str, Any]) -> _Asked:
    own = config.get("dflash_config")
    if not isinstance(own, dict):
        raise ModelError(f"{name!r}: config.json has neither dflash_config nor speculators_model_type: no DFlash draft")
    _check_architecture(name, config)
    _refuse_unknown(name, config, _BESIDE_QWEN3 | _QWEN3, "")
    _refuse_unknown(name, own, _DFLASH, "dflash_config.")
    ids = own.get("target_layer_ids")
    block = config if config.get("block_size") is not None else own
    causal = config.get("is_causal") if config.get("is_causal") is not None else own.get("causal")
    return _Asked(
        layers={key: value for key, value in config.items() if key not in ("dflash_config", "is_causal")},
        places=tuple(i + 1 for i in _ids(name, "target_layer_ids", ids)),
        said=f"target_layer_ids {ids}",
        block=number(block, "block_size", name),
        mask=_token(name, own.get("mask_token_id")),
        causal=causal,
        depth=config.get("num_target_layers") or own.get("num_target_layers"),
        softcap=config.get("final_logit_softcapping"),
    )


def _speculators_form(name: str, config: Mapping[str, Any]) -> _Asked:
    kind, layers = config["speculators_model_type"], config.get("transformer_layer_config")
    if kind != "dflash":
        raise ModelError(f"{name!r}: speculators_model_type is {kind!r}; expected 'dflash'")
    if not isinstance(layers, dict):
        raise ModelError(f"{name!r}: config.json has no transformer_layer_config")
    _check_architecture(name, config)
    _refuse_unknown(name, config, _SPECULATORS | _QWEN3, "")
    _refuse_unknown(name, layers, _QWEN3 | _OLD_NAMES, "transformer_layer_config.")
    if config.get("sample_from_anchor"):
        raise ModelError(f"{name!r}: sample_from_anchor is true: the row of the newest token drafts nothing here")
    width = config.get("target_hidden_size")
    if width not in (None, layers.get("hidden_size")):
        raise ModelError(f"{name!r}: target_hidden_size is {width} beside a hidden_size of {layers.get('hidden_size')}")
    slides = SLIDING in (layers.get("layer_types") or ())
    if slides and config.get("sliding_window_non_causal") is not False:
        said = config.get("sliding_window_non_causal")
        raise ModelError(f"{name!r}: sliding_window_non_causal is {said}: such a window is served where it is false")
    ids = config.get("aux_hidden_state_layer_ids")
    return _Asked(
        layers=layers,
        places=_ids(name, "aux_hidden_state_layer_ids", ids),
        said=f"aux_hidden_state_layer_ids {ids}",
        block=number(config, "block_size", name),
        mask=_token(name, config.get("mask_token_id")),
        causal=None,
        draft_vocab=number(config, "draft_vocab_size", name),
    )


def _settings(name: str, layers: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> ModelConfig:
    """The config of the layers, as Qwen3's."""
    kind = layers.get("model_type", "qwen3")
    if kind not in _BACKBONES:
        raise ModelError(f"{name!r}: model_type is {kind!r}; served are drafts of {' and '.join(_BACKBONES)}")
    norm = tensors.get("layers.0.self_attn.q_norm.weight")
    if norm is None:
        raise ModelError(f"{name!r} does not fit the target: layers.0.self_attn.q_norm.weight is missing")
    # The default of head_dim differs from family to family; the tensors know.
    settings = layer_config(layers, name, "qwen3", head_dim=len(norm))
    kinds = settings.layer_types
    others = sorted(set(kinds) - {FULL, SLIDING})
    if others or len(kinds) != settings.num_hidden_layers:
        raise ModelError(f"{name!r}: layer_types is {kinds}; expected {FULL} or {SLIDING} for each layer")
    if SLIDING in kinds and settings.sliding_window is None:
        raise ModelError(f"{name!r}: layers with {SLIDING} need sliding_window, and use_sliding_window true")
    return settings


def _is_causal(name: str, kind: str, causal: bool | None) -> bool:
    """Of a layer: with a window it is causal, and else not, unless the config says so for all."""
    if kind == SLIDING and causal is False:
        raise ModelError(f"{name!r}: causal is false beside {SLIDING}: a window that is not causal is not served")
    return kind == SLIDING if causal is None else bool(causal)


def _check_architecture(name: str, config: Mapping[str, Any]) -> None:
    for one in config.get("architectures") or ():
        if one not in _ARCHITECTURES:
            raise ModelError(f"{name!r} is a {one}; served are {', '.join(sorted(_ARCHITECTURES))}")


def _refuse_unknown(name: str, config: Mapping[str, Any], known: Collection[str], where: str) -> None:
    """What is not known might change what is computed, unless it is off."""
    for key, value in config.items():
        if key not in known and value not in (None, False, 0, {}, []):
            raise ModelError(f"{name!r}: {where}{key} is {value!r}, which is not known")


def _ids(name: str, key: str, ids: object) -> tuple[int, ...]:
    if not isinstance(ids, list) or not ids or not all(type(i) is int for i in ids):
        raise ModelError(f"{name!r}: config.json has {key} {ids!r}; expected a list of layers")
    return tuple(ids)


def _token(name: str, token: object) -> int:
    if not isinstance(token, int):
        raise ModelError(f"{name!r}: config.json has mask_token_id {token!r}; expected a token")
    return token
