"""The families of the table: one function per family fills an `Architecture` from a config.

The result is None for configs with unsupported features; transformers' own module runs such models.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pilotfish.engine.attention.reference import AttentionSpec
from pilotfish.engine.errors import ModelError
from pilotfish.engine.model.decoder.architecture import (
    NORMS_AFTER,
    Architecture,
    AttentionLayer,
    HeadNorm,
    LearnedPositions,
    NormForm,
)
from pilotfish.engine.model.decoder.families.builders import (
    after_rotation,
    cohere,
    decoder,
    gated,
    granite_factors,
    grouped,
    normed_heads,
    of_kinds,
    plain,
    refuse,
    rotary_in_windows,
    with_attention,
    with_bases,
    with_windows,
)
from pilotfish.engine.model.decoder.families.gemma import GEMMA
from pilotfish.engine.model.decoder.families.hybrid import HYBRIDS
from pilotfish.engine.model.decoder.families.mixtures import MIXTURES
from pilotfish.engine.model.decoder.rotary import QueryGrowth, RotaryTable
from pilotfish.engine.model.text_part import NAMES_IN_WHOLE

if TYPE_CHECKING:  # its import takes seconds
    from transformers import PreTrainedConfig


log = logging.getLogger(__name__)


def architecture_for(config: PreTrainedConfig) -> Architecture | None:
    """The architecture of a config; None if it is not in the table."""
    family = FAMILIES.get(config.model_type)
    try:
        return None if family is None else family(config)
    except (ModelError, AttributeError, KeyError, TypeError) as error:  # a scaling that only transformers may have, or
        log.debug("%s runs in transformers: %r", config.model_type, error)  # a number that the config lacks
        return None


def _llama(config: Any) -> Architecture:
    return decoder(config, grouped(config), gated(config))


def _windowed(config: Any) -> Architecture:
    """Mistral. A list of layer types has no effect here: such models are `ministral`."""
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
    mixer = grouped(config, norm=normed_heads(config))
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
    """Granite with scaled logits and output norms."""
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
    mixer = grouped(config, bias=False, norm=normed_heads(config))
    made = decoder(config, mixer, gated(config, bias=False), {"norms": NORMS_AFTER})
    return (with_windows if config.sliding_window is None else rotary_in_windows)(config, made)


def _exaone(config: Any) -> Architecture:
    return decoder(config, grouped(config), gated(config), names=_EXAONE)


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


_ONE_NORM = {"norms": ("input_layernorm", None, None, None), "parallel": True}


def _layer_norm(eps: float, **more: Any) -> NormForm:
    return NormForm(eps, **{"centred": True, "has_bias": True} | more)


def _still(config: Any) -> RotaryTable:
    """No rotary positions."""
    return RotaryTable.none(config.hidden_size // config.num_attention_heads)


def _many_heads(config: Any, **more: Any) -> AttentionLayer:
    """Each head has its own keys and values."""
    return grouped(config, kv_heads=config.num_attention_heads, **more)


def _gpt2(config: Any) -> Architecture:
    refuse(config.add_cross_attention, "add_cross_attention")
    heads, inner = config.num_attention_heads, config.n_inner or 4 * config.hidden_size
    scale = (config.hidden_size // heads) ** -0.5 if config.scale_attn_weights else 1.0
    kv_heads = 1 if getattr(config, "multi_query", False) else heads
    mixer = grouped(config, bias=True, kv_heads=kv_heads, joined=True, rotary=_still(config), spec=AttentionSpec(scale))
    norm = _layer_norm(config.layer_norm_epsilon)
    feed = plain(inner, config.activation_function, bias=True, names=("c_fc", "c_proj"))
    positions = LearnedPositions(config.max_position_embeddings)
    made = decoder(config, mixer, feed, norm=norm, positions=positions, names=_GPT2, transposed=True)
    if not getattr(config, "scale_attn_by_inverse_layer_idx", False):
        return made
    return with_attention(made, [{"spec": AttentionSpec(scale / number)} for number in range(1, len(made.layers) + 1)])


def _gpt_bigcode(config: Any) -> Architecture:
    """Its matrices are not transposed."""
    made = _gpt2(config)
    groups = 1 if config.multi_query else config.num_attention_heads
    return replace(with_attention(made, [{"groups": groups} for _ in made.layers]), transposed=False)


def _openai_gpt(config: Any) -> Architecture:
    """The first GPT: norms after sums, and no final norm."""
    act = {"gelu": "gelu_new", "swish": "silu"}.get(config.afn, config.afn)
    feed = plain(4 * config.n_embd, act, bias=True, names=("c_fc", "c_proj"))
    mixer = _many_heads(config, bias=True, joined=True, rotary=_still(config))
    layer = {"norms": (None, "input_layernorm", None, "post_attention_layernorm"), "normed_sums": True}
    ends = {"has_final_norm": False, "positions": LearnedPositions(config.n_positions)}
    norm = _layer_norm(config.layer_norm_epsilon)
    return decoder(config, mixer, feed, layer, norm=norm, **ends, names=_GPT2, transposed=True)


def _opt(config: Any) -> Architecture:
    """Norms before each part, or after its sum; embeddings may be narrower than layers."""
    first, has_weights = config.do_layer_norm_before, config.layer_norm_elementwise_affine
    norm = _layer_norm(1e-5, has_weight=has_weights, has_bias=has_weights)
    mixer = _many_heads(config, bias=config.enable_bias, rotary=_still(config), out_name="out_proj")
    feed = plain(config.ffn_dim, config.activation_function, bias=config.enable_bias, names=("fc1", "fc2"))
    names = ("input_layernorm", "post_attention_layernorm")
    layer = {} if first else {"norms": (None, names[0], None, names[1]), "normed_sums": True}
    size = config.word_embed_proj_dim
    ends = {
        "positions": LearnedPositions(config.max_position_embeddings + 2, 2),
        "embedding_width": None if size == config.hidden_size else size,
        "has_final_norm": first and not config._remove_final_layer_norm,  # noqa: SLF001
    }
    return decoder(config, mixer, feed, layer, norm=norm, **ends, names=_OPT)


def _biogpt(config: Any) -> Architecture:
    mixer = _many_heads(config, bias=True, rotary=_still(config), out_name="out_proj")
    feed = plain(config.intermediate_size, config.hidden_act, bias=True, names=("fc1", "fc2"))
    ends: dict[str, Any] = {"positions": LearnedPositions(config.max_position_embeddings + 2, 2)}
    scale = config.hidden_size**0.5 if config.scale_embedding else None
    return decoder(config, mixer, feed, norm=_layer_norm(1e-5), **ends, embedding_scale=scale, names=_OPT)


def _gpt_neox(config: Any) -> Architecture:
    """Queries, keys and values of each head are adjacent."""
    heads, bias = config.num_attention_heads, config.attention_bias
    mixer = _many_heads(config, bias=bias, joined=True, groups=heads, out_name="dense")
    feed = plain(config.intermediate_size, config.hidden_act, bias=True, names=("dense_h_to_4h", "dense_4h_to_h"))
    layer = {"parallel": config.use_parallel_residual}
    return decoder(config, mixer, feed, layer, norm=_layer_norm(config.layer_norm_eps), names=_NEOX)


def _gpt_neo(config: Any) -> Architecture:
    """Scores without a scale, and a window in every second layer."""
    mixer = _many_heads(
        config, qkv_bias=False, out_bias=True, rotary=_still(config), spec=AttentionSpec(1.0), out_name="out_proj"
    )
    inner, norm = config.intermediate_size or 4 * config.hidden_size, _layer_norm(config.layer_norm_epsilon)
    feed = plain(inner, config.activation_function, bias=True, names=("c_fc", "c_proj"))
    positions = LearnedPositions(config.max_position_embeddings)
    made = decoder(config, mixer, feed, norm=norm, positions=positions, names=_GPT2)
    kinds = config.attention_layers
    return with_attention(made, [{"window": config.window_size if kind == "local" else None} for kind in kinds])


def _falcon(config: Any) -> Architecture:
    """Query heads are adjacent to the keys and values that they share."""
    heads, is_new = config.num_attention_heads, config.new_decoder_architecture
    refuse(config.alibi or (is_new and not config.parallel_attn), "alibi, or the new decoder without parallel_attn")
    kv_heads = config.num_kv_heads if is_new else 1 if config.multi_query else heads
    mixer = grouped(config, bias=config.bias, kv_heads=kv_heads, joined=True, groups=kv_heads, out_name="dense")
    names = ("dense_h_to_4h", "dense_4h_to_h")
    feed = plain(config.ffn_hidden_size, config.activation, bias=config.bias, names=names)
    has_two = is_new and config.num_ln_in_parallel_attn in (None, 2)
    layer = _ONE_NORM if config.parallel_attn and not has_two else {"parallel": config.parallel_attn}
    return decoder(config, mixer, feed, layer, norm=_layer_norm(config.layer_norm_epsilon), names=_FALCON + _GPT2)


def _persimmon(config: Any) -> Architecture:
    norm = _layer_norm(config.layer_norm_eps)
    of_heads = HeadNorm(norm, names=("q_layernorm", "k_layernorm")) if config.qk_layernorm else None
    heads = config.num_attention_heads
    mixer = _many_heads(config, bias=True, joined=True, groups=heads, out_name="dense", norm=of_heads)
    feed = plain(config.intermediate_size, config.hidden_act, bias=True, names=("dense_h_to_4h", "dense_4h_to_h"))
    return decoder(config, mixer, feed, norm=norm, names=_NEOX)


def _phi(config: Any) -> Architecture:
    norm = _layer_norm(config.layer_norm_eps)
    of_heads = HeadNorm(norm, names=("q_layernorm", "k_layernorm")) if config.qk_layernorm else None
    mixer = grouped(config, bias=True, out_name="dense", norm=of_heads)
    feed = plain(config.intermediate_size, config.hidden_act, bias=True, names=("fc1", "fc2"))
    return decoder(config, mixer, feed, _ONE_NORM, norm=norm, head_bias=True, names=_NEOX)


def _gptj(config: Any, **joined: Any) -> Architecture:
    """Part of a head is rotated, as adjacent pairs."""
    refuse(config.rotary_dim is None, "a rotary_dim of None")
    head_dim = config.hidden_size // config.num_attention_heads
    rotary = RotaryTable.of({"rope_theta": 10000.0}, head_dim, config.rotary_dim)
    mixer = _many_heads(config, bias=False, rotary=rotary, interleaved=True, out_name="out_proj", **joined)
    inner, norm = config.n_inner or 4 * config.n_embd, _layer_norm(config.layer_norm_epsilon)
    feed = plain(inner, config.activation_function, bias=True, names=("fc_in", "fc_out"))
    return decoder(config, mixer, feed, _ONE_NORM, norm=norm, head_bias=True, names=_GPT2)


def _codegen(config: Any) -> Architecture:
    """Its matrices consist of four parts."""
    refuse(config.num_attention_heads % 4, f"num_attention_heads {config.num_attention_heads}")
    return _gptj(config, joined=True, groups=4, values_first=True)


def _ctrl(config: Any) -> Architecture:
    refuse(config.layer_norm_epsilon != 1e-6, f"layer_norm_epsilon {config.layer_norm_epsilon}")  # layers have 1e-6
    mixer = _many_heads(config, bias=True, rotary=_still(config))
    positions = LearnedPositions(config.n_positions, waves=config.n_embd // 2)
    ends: dict[str, Any] = {"positions": positions, "embedding_scale": config.n_embd**0.5, "head_bias": True}
    feed = plain(config.dff, "relu", bias=True, names=("0", "2"))
    return decoder(config, mixer, feed, norm=_layer_norm(1e-6), **ends, names=_CTRL + _GPT2)


def _xglm(config: Any) -> Architecture:
    is_first = (config.pad_token_id or 0) <= 1  # the row of any other number would be zeros
    refuse(config.add_cross_attention or not is_first, "add_cross_attention, or a pad_token_id above 1")
    mixer = _many_heads(config, bias=True, rotary=_still(config), out_name="out_proj")
    feed = plain(config.ffn_dim, config.activation_function, bias=True, names=("fc1", "fc2"))
    positions = LearnedPositions(config.max_position_embeddings + 2, 2, config.d_model // 2 - 1)
    scale = config.d_model**0.5 if config.scale_embedding else None
    return decoder(config, mixer, feed, norm=_layer_norm(1e-5), positions=positions, embedding_scale=scale, names=_OPT)


def _mllama(whole: Any) -> Architecture:
    """Llama without the cross-attention layers for images; the other layers are renumbered."""
    config = whole.get_text_config()
    made = decoder(config, grouped(config, bias=False), gated(config, bias=False), spare_rows=8)
    kept = [number for number in range(config.num_hidden_layers) if number not in config.cross_attention_layers]
    refuse(config.tie_word_embeddings, "tie_word_embeddings")
    names = [(rf"^model\.layers\.{number}\.", "of_images.") for number in config.cross_attention_layers]
    names += [(rf"^model\.layers\.{old}\.", f"model.layers.{new}.") for new, old in enumerate(kept)]
    return replace(made, layers=made.layers[: len(kept)], names=(*NAMES_IN_WHOLE.items(), *names))


def _arcee(config: Any) -> Architecture:
    return decoder(config, grouped(config), plain(config.intermediate_size, config.hidden_act, bias=config.mlp_bias))


def _nemotron(config: Any) -> Architecture:
    norm = _layer_norm(config.norm_eps, plus_one=True)
    feed = plain(config.intermediate_size, config.hidden_act, bias=config.mlp_bias)
    return decoder(config, grouped(config), feed, norm=norm)


def _jais2(config: Any) -> Architecture:
    feed = plain(config.intermediate_size, config.hidden_act, bias=config.mlp_bias)
    return decoder(config, grouped(config), feed, norm=_layer_norm(config.layer_norm_eps))


def _apertus(config: Any) -> Architecture:
    mixer = grouped(config, norm=normed_heads(config))
    layer = {"norms": ("attention_layernorm", None, "feedforward_layernorm", None)}
    return decoder(config, mixer, plain(config.intermediate_size, config.hidden_act), layer)


def _apertus_of_text(config: Any) -> Architecture:
    """The output matrix may have fewer rows than the embedding table."""
    refuse(config.output_vocab_size is not None, "output_vocab_size")
    return _apertus(config)


def _olmo(config: Any) -> Architecture:
    norm = NormForm(1e-5, centred=True, has_weight=False)
    return decoder(config, grouped(config, clip=config.clip_qkv), gated(config, bias=False), norm=norm)


def _helium(config: Any) -> Architecture:
    return decoder(config, grouped(config, out_bias=False, interleaved=True), gated(config))


def _nanochat(config: Any) -> Architecture:
    """Norms have no weights, heads are normalised after the rotation, which has the opposite direction."""
    norm = NormForm(config.rms_norm_eps, has_weight=False)
    mixer = grouped(config, norm=HeadNorm(norm, turned=True))
    back = replace(mixer.rotary, frequencies=tuple(-each for each in mixer.rotary.frequencies))
    feed = plain(config.intermediate_size, config.hidden_act, names=("fc1", "fc2"))
    ends = {"normed_embeddings": True, "softcap": config.final_logit_softcapping}
    return decoder(config, replace(mixer, rotary=back), feed, norm=norm, **ends)


def _bitnet(config: Any) -> Architecture:
    norm = NormForm(config.rms_norm_eps)
    return decoder(config, grouped(config, out_norm=norm), gated(config, bias=False, norm=norm))


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
_GPT2 = (
    (r"^(?:transformer\.)?(?:wte|tokens_embed)\.", "model.embed_tokens."),
    (r"^(?:transformer\.)?(?:wpe|positions_embed)\.", "model.embed_positions."),
    (r"^(?:transformer\.)?h\.", "model.layers."),
    (r"^(?:transformer\.)?ln_f\.", "model.norm."),
    (r"\.ln_1\.", ".input_layernorm."),
    (r"\.ln_2\.", ".post_attention_layernorm."),
    (r"\.attn\.attention\.", ".self_attn."),
    (r"\.attn\.c_attn\.", ".self_attn.qkv_proj."),
    (r"\.attn\.c_proj\.", ".self_attn.o_proj."),
    (r"\.attn\.", ".self_attn."),
)
_CTRL = (
    (r"^transformer\.w\.", "model.embed_tokens."),
    (r"^transformer\.layernorm\.", "model.norm."),
    (r"\.layernorm1\.", ".input_layernorm."),
    (r"\.layernorm2\.", ".post_attention_layernorm."),
    (r"\.multi_head_attention\.W([qkv])\.", r".self_attn.\1_proj."),
    (r"\.multi_head_attention\.dense\.", ".self_attn.o_proj."),
    (r"\.ffn\.", ".mlp."),
)
_OPT = (
    (r"^(?:model\.)?(?:decoder|biogpt)\.", "model."),
    (r"^output_projection\.", "lm_head."),
    (r"^model\.(?:final_layer_norm|layer_norm)\.", "model.norm."),
    (r"\.self_attn_layer_norm\.", ".input_layernorm."),
    (r"(\.\d+)\.final_layer_norm\.", r"\1.post_attention_layernorm."),
    (r"\.(fc[12])\.", r".mlp.\1."),
)
_NEOX = (
    (r"^gpt_neox\.embed_in\.", "model.embed_tokens."),
    (r"^gpt_neox\.", "model."),
    (r"^embed_out\.", "lm_head."),
    (r"^model\.final_layer_?norm\.", "model.norm."),
    (r"\.attention\.", ".self_attn."),
    (r"\.query_key_value\.", ".qkv_proj."),
)
_FALCON = (
    (r"^transformer\.word_embeddings\.", "model.embed_tokens."),
    (r"\.self_attention\.query_key_value\.", ".self_attn.qkv_proj."),
    (r"\.self_attention\.", ".self_attn."),
    (r"\.ln_attn\.", ".input_layernorm."),
    (r"\.ln_mlp\.", ".post_attention_layernorm."),
)
# By model type.
FAMILIES: dict[str, Callable[[Any], Architecture]] = (
    {
        "apertus": _apertus,
        "apertus1p5_text": _apertus_of_text,
        "arcee": _arcee,
        "biogpt": _biogpt,
        "bitnet": _bitnet,
        "codegen": _codegen,
        "cohere": cohere,
        "cohere2": _cohere2,
        "cohere_compass_text": _cohere_compass,
        "ctrl": _ctrl,
        "cwm": _cwm,
        "ernie4_5": _ernie,
        "exaone": _exaone,
        "exaone4": _exaone4,
        "falcon": _falcon,
        "glm": _glm,
        "glm4": _glm4,
        "gpt2": _gpt2,
        "gpt_bigcode": _gpt_bigcode,
        "gpt_neo": _gpt_neo,
        "gpt_neox": _gpt_neox,
        "gptj": _gptj,
        "granite": _granite,
        "granite_swa": _granite_swa,
        "helium": _helium,
        "hunyuan_v1_dense": _hunyuan,
        "hyperclovax": _hyperclovax,
        "internlm3": _llama,
        "iquestcoder": _llama,
        "jais2": _jais2,
        "llama": _llama,
        "ministral": _ministral,
        "ministral3": _ministral3,
        "mistral": _windowed,
        "mllama": _mllama,
        "mllama_text_model": _mllama,
        "nanochat": _nanochat,
        "nemotron": _nemotron,
        "olmo": _olmo,
        "olmo2": _olmo2,
        "olmo3": _olmo3,
        "openai-gpt": _openai_gpt,
        "opt": _opt,
        "persimmon": _persimmon,
        "phi": _phi,
        "phi3": _phi3,
        "phi4_multimodal": _phi3,
        "qwen2": _qwen2,
        "qwen3": _qwen3,
        "seed_oss": _seed_oss,
        "smollm3": _smollm3,
        "stablelm": _stablelm,
        "starcoder2": _starcoder2,
        "xglm": _xglm,
    }
    | GEMMA
    | HYBRIDS
    | MIXTURES
)
