"""The language model of a multimodal checkpoint (text only): its config, and the names of its weights.

Only text is served, so the other parts need neither memory nor preprocessing libraries.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

# Text parts without a class of their own, and equivalent families for text only: all three coordinates of a token's
# position are then equal, so rotary tables by coordinate are the usual ones.
_SAME_AS = {"emu3_text_model": "llama", "qwen2_vl_text": "qwen2", "qwen2_5_vl_text": "qwen2", "qwen3_vl_text": "qwen3"}
# Names of the language model within the whole model, in old and new checkpoints.
NAMES_IN_WHOLE = {r"^(?:model\.)?(?:language_model|text_model)\.lm_head\.": "lm_head.",
          r"^(?:model\.)?(?:language_model|text_model)\.(?:model\.)?": "model."}  # fmt: skip


def text_part(config: PreTrainedConfig) -> PreTrainedConfig:
    """The config of the language model in `config`, or `config` itself if there is no such part.

    It inherits end tokens, type of weights, quantisation and tied embeddings from the whole.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    text = config.get_text_config(decoder=True)
    kind = _SAME_AS.get(text.model_type, text.model_type)
    if text is config or config.is_encoder_decoder or kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return config
    part = copy.deepcopy(text) if kind == text.model_type else _same(text, kind)
    for name in ("dtype", "eos_token_id", "quantization_config"):
        if getattr(config, name, None) is not None:
            setattr(part, name, getattr(config, name))
    part.tie_word_embeddings = config.tie_word_embeddings  # if both are stored, transformers uses both
    part.part_of = config.model_type
    return part


def names_in_whole(config: PreTrainedConfig) -> dict[str, str] | None:
    """Regular expressions for names of weights in the whole, with replacements; None if `config` is not a part."""
    return NAMES_IN_WHOLE if getattr(config, "part_of", None) else None


@contextmanager
def without_load_report(config: PreTrainedConfig) -> Iterator[None]:
    """Suppress transformers' list of unused weights when only the language model is loaded."""
    from transformers.utils import logging

    before = logging.get_verbosity()
    if names_in_whole(config) is not None:
        logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


def _same(text: PreTrainedConfig, kind: str) -> PreTrainedConfig:
    from transformers import AutoConfig

    rope = dict(text.rope_parameters)
    for name in ("mrope_section", "mrope_interleaved"):
        rope.pop(name, None)
    if rope.get("rope_type") == "mrope":
        rope["rope_type"] = "default"
    fields = text.to_dict() | {"rope_parameters": rope}
    fields.pop("model_type")
    part: PreTrainedConfig = AutoConfig.for_model(kind, **fields)
    return part
