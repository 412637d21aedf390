"""The config of the model in a GGUF file."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch

from engine.errors import ModelError
from engine.model.decoder.families.described import described_by
from engine.model.gguf.blocks import float_type
from engine.model.gguf.container import Container
from engine.model.gguf.families import family_of
from engine.model.gguf.keys import EPSILON, Keys, rope_of
from engine.model.gguf.tokenizer import check_tokens, end_tokens_in

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_RMS_EPSILON = "attention.layer_norm_rms_epsilon"
METHOD, HAS_CODES = "gguf", "has_codes"  # in `quantization_config`, with which configs of GGUF files are marked


def config_of(container: Container, *, of_transformers: bool = False) -> PreTrainedConfig:
    """The config of the model in a file; with `of_transformers` always one of transformers' classes.

    Raises:
        ModelError: the file holds a model that is not read, or lacks a number of its config.
    """
    keys = Keys(container)
    family = family_of(keys)
    has_codes = any(not tensor.kind.is_float for tensor in container.tensors.values())
    fields = _common(keys) | family.describe(keys)
    _check_heads(keys, fields["rope_parameters"])
    fields["quantization_config"] = {"quant_method": METHOD, HAS_CODES: has_codes}
    own: Any = None if of_transformers else described_by(fields, family.model_type)
    if own is not None:
        return cast("PreTrainedConfig", own)
    from transformers import AutoConfig

    config: PreTrainedConfig = AutoConfig.for_model(family.model_type, **fields)
    return config


def _common(keys: Keys) -> dict[str, Any]:
    container = keys.container
    embedding = container.tensors.get("token_embd.weight")
    if embedding is None:
        raise ModelError(f"{container.path} has no tensor token_embd.weight")
    check_tokens(container)
    ends = end_tokens_in(container)
    return {
        "vocab_size": embedding.shape[0],
        "hidden_size": keys.size("embedding_length"),
        "intermediate_size": keys.need("feed_forward_length"),  # of no tensor where all layers have experts
        "num_hidden_layers": keys.layers,
        "num_attention_heads": keys.heads,
        "num_key_value_heads": keys.kv_heads,
        "head_dim": keys.head_dim,
        "rms_norm_eps": keys.epsilon(EPSILON if keys.full(EPSILON) in container.metadata else _RMS_EPSILON),
        "max_position_embeddings": keys.need("context_length", least=2),
        "tie_word_embeddings": "output.weight" not in container.tensors,
        "bos_token_id": container.get("tokenizer.ggml.bos_token_id", int),
        "eos_token_id": ends[0] if len(ends) == 1 else ends or None,
        "pad_token_id": None,
        "rope_parameters": rope_of(keys),
        "dtype": _float_type(container),
    }


def _check_heads(keys: Keys, rope: dict[str, Any]) -> None:
    """Refuse heads that are too many, have values of another size, or of which only a part is rotated in the family."""
    keys.check_width("attention.head_count", keys.heads * keys.head_dim)
    if keys.integer("attention.value_length", keys.head_dim) != keys.head_dim:
        raise keys.fault("attention.value_length", keys.need("attention.value_length"), f"{keys.head_dim}, as of keys")
    if "partial_rotary_factor" not in rope and keys.rotated != keys.head_dim:
        raise keys.fault("rope.dimension_count", keys.rotated, f"the size of a head, {keys.head_dim}")


def _float_type(container: Container) -> torch.dtype:
    """The type of most numbers that are stored as floats; bfloat16 where most are codes, which lose least in it."""
    counts: dict[torch.dtype | None, int] = {}
    for tensor in container.tensors.values():
        kind = float_type(tensor.kind)
        counts[kind] = counts.get(kind, 0) + tensor.num_weights
    most = max(counts, key=lambda kind: counts[kind])
    return torch.bfloat16 if most is None else most
