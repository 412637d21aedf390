"""Models outside of the table of architectures (`decoder`): transformers' own module, unpatched, in floats.

Attention is ours, through transformers' attention interface; a model whose class does not support it, or that has more
state than keys and values, runs in `unbatched`. Imports transformers.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
from huggingface_hub.errors import StrictDataclassFieldValidationError
from torch import Tensor
from transformers import AttentionInterface, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.utils import logging

from pilotfish.engine.attention.registry import ATTENTION_NAME, hook
from pilotfish.engine.kv.arena import KVLayout, LayerKV
from pilotfish.engine.model.checkpoint import (
    as_model_error,
    check_complete,
    check_size,
    read_config,
    read_end_tokens,
    shape_of,
)
from pilotfish.engine.model.published.base import Codes
from pilotfish.engine.model.published.methods import quantisation_of, read_weights, without_quantisation
from pilotfish.engine.model.text_part import names_in_whole, without_load_report


class _Dequantised:
    """A quantised weight, dequantised when transformers reads it."""

    def __init__(self, codes: Codes, dtype: torch.dtype) -> None:
        self._codes, self._dtype = codes, dtype

    def __getitem__(self, _: object) -> Tensor:
        return self._codes.dequantised().to(self._dtype)


def on_meta(config: PreTrainedConfig) -> PreTrainedModel:
    """The model of a config without weights, on the meta device."""
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(copy.deepcopy(config))
    return model


def load_model(name: str, revision: str | None, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """Load a causal language model, without running code of its own; codes of any checkpoint are dequantised.

    Raises:
        ModelError: the checkpoint cannot be loaded, or a weight is missing or has another shape.
    """
    logging.disable_progress_bar()  # it would write to the server's log
    with as_model_error(name):
        config = read_config(name, revision, of_transformers=True)
        weights = read_weights(name, revision, quantisation_of(name, config))
        config = without_quantisation(config)
        bare = on_meta(config)
        check_size(name, bare, sum(math.prod(weight.shape) for weight in weights.values()))
        given = {key: x if isinstance(x, Tensor) else _Dequantised(x, dtype) for key, x in weights.items()}
        read = partial(
            type(bare).from_pretrained,
            None,
            state_dict=given,
            dtype=dtype,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # `check_complete` has a clearer message
            key_mapping=names_in_whole(config),
        )
        with without_load_report(config):
            model, report = _read(read, config)
        check_complete(name, report)
    ends = read_end_tokens(name, revision)
    if model.generation_config is not None and ends:
        model.generation_config.eos_token_id = ends
    return cast("PreTrainedModel", model.to(device).eval())


def _read(read: Callable[..., Any], config: PreTrainedConfig) -> tuple[Any, Any]:
    """Read a model with our attention; one with its own attention, or that requires a pad token, unchanged."""
    own = copy.deepcopy(config)
    try:
        prepare(config)
        model, report = read(config=config, attn_implementation=ATTENTION_NAME)
    except (KeyError, StrictDataclassFieldValidationError) as error:
        is_attention, is_pad = error.args == (ATTENTION_NAME,), "pad_token_id" in str(error)
        if not is_attention and not is_pad:
            raise
        return tuple(read(config=own))
    return model, report


def prepare(config: PreTrainedConfig) -> None:
    """Change a config of any family so that the model can run ragged batches, and register our attention."""
    AttentionInterface.register(ATTENTION_NAME, hook)
    # Some embeddings treat the pad token specially and read it on the host; a ragged batch has no padding.
    if getattr(config, "pad_token_id", None) is not None:
        config.pad_token_id = None


def kv_layout(config: PreTrainedConfig, dtype: torch.dtype) -> KVLayout:
    """Read the shape of K/V from a transformers config of any family."""
    text, heads = config.get_text_config(), shape_of(config, "num_attention_heads")
    if getattr(text, "kv_lora_rank", None) and getattr(text, "qk_nope_head_dim", None):  # latents, which it expands
        key_dim = shape_of(text, "qk_nope_head_dim") + shape_of(text, "qk_rope_head_dim")
        layer = LayerKV(heads, key_dim, shape_of(text, "v_head_dim"))
    else:
        kv_heads = 1 if getattr(text, "multi_query", False) else getattr(text, "num_key_value_heads", None) or heads
        head_dim = getattr(text, "head_dim", None) or shape_of(text, "hidden_size") // heads
        layer = LayerKV(kv_heads, head_dim, getattr(text, "v_head_dim", None) or head_dim)
    return KVLayout((layer,) * shape_of(config, "num_hidden_layers"), dtype)
