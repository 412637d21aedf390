"""The families of the table: one function for each fills an `Architecture` from a config.

It gives None where the config asks for anything that the table does not have; transformers' own module runs such a
model.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from engine.attention.reference import AttentionSpec
from engine.errors import ModelError
from engine.model.decoder.architecture import NORMS_AFTER, Architecture, HeadNorm, NormForm
from engine.model.decoder.families.builders import (
    after_rotation,
    cohere,
    decoder,
    gated,
    granite_factors,
    grouped,
    of_kinds,
    plain,
    rotary_in_windows,
    with_attention,
    with_bases,
    with_windows,
)
from engine.model.decoder.families.dense import DENSE
from engine.model.decoder.families.gemma import GEMMA
from engine.model.decoder.families.hybrid import HYBRIDS
from engine.model.decoder.families.mixtures import MIXTURES
from engine.model.decoder.families.sparse import SPARSE
from engine.model.decoder.rotary import QueryGrowth, RotaryTable

if TYPE_CHECKING:  # its import takes seconds
    from transformers import PreTrainedConfig


log = logging.getLogger(__name__)


def architecture_for(config: PreTrainedConfig) -> Architecture | None:
    """The architecture that a config describes; None where it is not in the table."""
    family = FAMILIES.get(config.model_type)
    try:
        return None if family is None else family(config)
    except (ModelError, AttributeError, KeyError, TypeError) as error:  # a scaling that only transformers may have, or
        log.debug("%s runs in transformers: %r", config.model_type, error)  # a number that the config lacks
        return None


def _llama(config: Any) -> Architecture:
    return decoder(config, grouped(config), gated(config))


def _windowed(config: Any) -> Architecture:
    """Mistral. A list of kinds of layers has no meaning here: those models are `ministral`."""
    made = decoder(config, grouped(config, bias=False), gated(config, bias=False))
    return with_attention(made, [{"window": config.sliding_window} for _ in made.layers])


def _ministral(config: Any) -> Architecture:
    return with_windows(config, decoder(config, grouped(config, bias=False), gated(config, bias=False)))


def _ministral3(config: Any) -> Architecture:
    """Queries grow with their positions."""
    made, rope = _windowed(config), config.rope_parameters
    growth = QueryGrowth(rope["llama_4_scaling_beta"], rope["original_max_position_embeddings"])
    return with_attention(made, [{"growth": growth} for _ in made.layers])


def _cwm(config: Any) -> Architecture:
    return with_windows(config, decoder(config, grouped(config, bias=False), gated(config)))


def _qwen2(config: Any) -> Architecture:
    mixer = grouped(config, qkv_bias=True, out_bias=False)
    return with_windows(config, decoder(config, mixer, gated(config, bias=False)))


def _qwen3(config: Any) -> Architecture:
    mixer = grouped(config, norm=HeadNorm(NormForm(config.rms_norm_eps)))
    return with_windows(config, decoder(config, mixer, gated(config, bias=False)))


def _seed_oss(config: Any) -> Architecture:
    return decoder(config, grouped(config, out_bias=config.attention_out_bias), gated(config))


def _smollm3(config: Any) -> Architecture:
    """Some layers have no rotary positions."""
    made = decoder(config, grouped(config), gated(config))
    still = RotaryTable.none(made.attention.head_dim)
    made = with_attention(made, [{} if turns else {"rotary": still} for turns in config.no_rope_layers])
    return with_windows(config, made) if config.use_sliding_window else made


def _phi3(config: Any) -> Architecture:
    mixer, feed = grouped(config, bias=False, joined=True), gated(config, bias=False, joined=True)
    made = decoder(config, mixer, feed)
    return with_attention(made, [{"window": config.sliding_window} for _ in made.layers])


def _granite(config: Any) -> Architecture:
    mixer, (layer, more) = grouped(config, spec=AttentionSpec(config.attention_multiplier)), granite_factors(config)
    return decoder(config, mixer, gated(config), layer, **more)


def _granite_swa(config: Any) -> Architecture:
    return with_bases(config, _granite(config))


def _hyperclovax(config: Any) -> Architecture:
    """Granite that multiplies its logits, with norms of results."""
    made, norms = _granite(config), ("input_layernorm", "post_norm1", "post_attention_layernorm", "post_norm2")
    layers = made.layers if not config.use_post_norm else tuple(replace(layer, norms=norms) for layer in made.layers)
    return replace(made, layers=layers, logit_scale=float(config.logits_scaling))


def _olmo2(config: Any) -> Architecture:
    norm = HeadNorm(NormForm(config.rms_norm_eps), extent="all")
    return decoder(config, grouped(config, norm=norm), gated(config, bias=False), {"norms": NORMS_AFTER})


def _olmo3(config: Any) -> Architecture:
    return of_kinds(config, with_windows(config, _olmo2(config)))


def _exaone4(config: Any) -> Architecture:
    """Layers without a window have no rotary positions, in models that have windows."""
    mixer = grouped(config, bias=False, norm=HeadNorm(NormForm(config.rms_norm_eps)))
    made = decoder(config, mixer, gated(config, bias=False), {"norms": NORMS_AFTER})
    return (with_windows if config.sliding_window is None else rotary_in_windows)(config, made)


def _exaone(config: Any) -> Architecture:
    made = decoder(config, grouped(config), gated(config))
    return replace(made, names=_EXAONE)


def _glm(config: Any) -> Architecture:
    mixer = grouped(config, out_bias=False, interleaved=True)
    return decoder(config, mixer, gated(config, bias=False, joined=True))


def _glm4(config: Any) -> Architecture:
    made = _glm(config)
    names = ("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm")
    return replace(made, layers=tuple(replace(layer, norms=names) for layer in made.layers))


def _ernie(config: Any) -> Architecture:
    bias = bool(config.use_bias)
    return decoder(config, grouped(config, bias=bias, interleaved=True), gated(config, bias=bias))


def _hunyuan(config: Any) -> Architecture:
    return decoder(config, after_rotation(config), gated(config, bias=False))


def _cohere2(config: Any) -> Architecture:
    return rotary_in_windows(config, cohere(config))


def _cohere_compass(config: Any) -> Architecture:
    """Cohere 2 that rotates halves; its layer types determine which have rotary positions."""
    made = of_kinds(config, with_windows(config, cohere(config)))
    return with_attention(made, [{"interleaved": False} for _ in made.layers])


def _starcoder2(config: Any) -> Architecture:
    bias, norm = bool(config.use_bias), NormForm(config.norm_epsilon, centred=True, has_bias=True)
    feed = plain(config.intermediate_size, config.hidden_act, bias=bias, names=("c_fc", "c_proj"))
    made = decoder(config, grouped(config, bias=bias), feed, norm=norm)
    return with_attention(made, [{"window": config.sliding_window} for _ in made.layers])


def _stablelm(config: Any) -> Architecture:
    norm = NormForm(config.layer_norm_eps, centred=True, has_bias=True)
    of_heads = HeadNorm(replace(norm, has_bias=False), "heads", listed=True, names=("q_layernorm", "k_layernorm"))
    mixer = grouped(
        config, qkv_bias=config.use_qkv_bias, out_bias=False, norm=of_heads if config.qk_layernorm else None
    )
    layer = {"norms": ("input_layernorm", None, None, None), "parallel": True} if config.use_parallel_residual else {}
    return decoder(config, mixer, gated(config, bias=False), layer, norm=norm)


_EXAONE = (
    (r"^transformer\.wte\.", "model.embed_tokens."),
    (r"^transformer\.h\.", "model.layers."),
    (r"^transformer\.ln_f\.", "model.norm."),
    (r"\.attn\.attention\.out_proj\.", ".self_attn.o_proj."),
    (r"\.attn\.attention\.", ".self_attn."),
    (r"\.ln_1\.", ".input_layernorm."),
    (r"\.ln_2\.", ".post_attention_layernorm."),
    (r"\.mlp\.c_fc_0\.", ".mlp.gate_proj."),
    (r"\.mlp\.c_fc_1\.", ".mlp.up_proj."),
    (r"\.mlp\.c_proj\.", ".mlp.down_proj."),
)
# By model type.
FAMILIES: dict[str, Callable[[Any], Architecture]] = (
    {
        "cohere": cohere,
        "cohere2": _cohere2,
        "cohere_compass_text": _cohere_compass,
        "cwm": _cwm,
        "ernie4_5": _ernie,
        "exaone": _exaone,
        "exaone4": _exaone4,
        "glm": _glm,
        "glm4": _glm4,
        "granite": _granite,
        "granite_swa": _granite_swa,
        "hunyuan_v1_dense": _hunyuan,
        "hyperclovax": _hyperclovax,
        "internlm3": _llama,
        "iquestcoder": _llama,
        "llama": _llama,
        "ministral": _ministral,
        "ministral3": _ministral3,
        "mistral": _windowed,
        "olmo2": _olmo2,
        "olmo3": _olmo3,
        "phi3": _phi3,
        "phi4_multimodal": _phi3,
        "qwen2": _qwen2,
        "qwen3": _qwen3,
        "seed_oss": _seed_oss,
        "smollm3": _smollm3,
        "stablelm": _stablelm,
        "starcoder2": _starcoder2,
    }
    | DENSE
    | GEMMA
    | HYBRIDS
    | MIXTURES
    | SPARSE
)
