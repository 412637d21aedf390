"""Dense families that are not like Llama: learned positions, joined matrices, feed-forwards without a gate.

Each function fills an `Architecture` from a config, as those of `table.py` do.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from engine.attention.reference import AttentionSpec
from engine.model.decoder.architecture import Architecture, AttentionLayer, HeadNorm, LearnedPositions, NormForm
from engine.model.decoder.families.builders import decoder, gated, grouped, plain, refuse, with_attention
from engine.model.decoder.rotary import RotaryTable
from engine.model.text_part import NAMES_IN_WHOLE

_ONE_NORM = {"norms": ("input_layernorm", None, None, None), "parallel": True}


def _layer_norm(eps: float, **more: Any) -> NormForm:
    return NormForm(eps, **{"centred": True, "has_bias": True} | more)


def _still(config: Any) -> RotaryTable:
    """No rotary positions."""
    return RotaryTable.none(config.hidden_size // config.num_attention_heads)


def _many_heads(config: Any, **more: Any) -> AttentionLayer:
    """Each head has keys and values of its own."""
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
    """Its matrices lie as those of others do."""
    made = _gpt2(config)
    groups = 1 if config.multi_query else config.num_attention_heads
    return replace(with_attention(made, [{"groups": groups} for _ in made.layers]), transposed=False)


def _openai_gpt(config: Any) -> Architecture:
    """The first GPT: norms of sums, and none at the end."""
    act = {"gelu": "gelu_new", "swish": "silu"}.get(config.afn, config.afn)
    feed = plain(4 * config.n_embd, act, bias=True, names=("c_fc", "c_proj"))
    mixer = _many_heads(config, bias=True, joined=True, rotary=_still(config))
    layer = {"norms": (None, "input_layernorm", None, "post_attention_layernorm"), "normed_sums": True}
    ends = {"has_final_norm": False, "positions": LearnedPositions(config.n_positions)}
    norm = _layer_norm(config.layer_norm_epsilon)
    return decoder(config, mixer, feed, layer, norm=norm, **ends, names=_GPT2, transposed=True)


def _opt(config: Any) -> Architecture:
    """Norms come before each part, or after its sum; embeddings may be narrower than the layers."""
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
    """Queries, keys and values of a head lie side by side."""
    heads, bias = config.num_attention_heads, config.attention_bias
    mixer = _many_heads(config, bias=bias, joined=True, groups=heads, out_name="dense")
    feed = plain(config.intermediate_size, config.hidden_act, bias=True, names=("dense_h_to_4h", "dense_4h_to_h"))
    layer = {"parallel": config.use_parallel_residual}
    return decoder(config, mixer, feed, layer, norm=_layer_norm(config.layer_norm_eps), names=_NEOX)


def _gpt_neo(config: Any) -> Architecture:
    """Scores have no scale, and half of the layers a window."""
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
    """Heads that share keys and values lie side by side with them."""
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
    """Few numbers of a head are rotated, as neighbours."""
    refuse(config.rotary_dim is None, "a rotary_dim of None")
    head_dim = config.hidden_size // config.num_attention_heads
    rotary = RotaryTable.of({"rope_theta": 10000.0}, head_dim, config.rotary_dim)
    mixer = _many_heads(config, bias=False, rotary=rotary, interleaved=True, out_name="out_proj", **joined)
    inner, norm = config.n_inner or 4 * config.n_embd, _layer_norm(config.layer_norm_epsilon)
    feed = plain(inner, config.activation_function, bias=True, names=("fc_in", "fc_out"))
    return decoder(config, mixer, feed, _ONE_NORM, norm=norm, head_bias=True, names=_GPT2)


def _codegen(config: Any) -> Architecture:
    """Its matrices were trained in four parts."""
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
    """Llama without the layers that look at an image, for there is none; the others close ranks."""
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
    mixer = grouped(config, norm=HeadNorm(NormForm(config.rms_norm_eps)))
    layer = {"norms": ("attention_layernorm", None, "feedforward_layernorm", None)}
    return decoder(config, mixer, plain(config.intermediate_size, config.hidden_act), layer)


def _apertus_of_text(config: Any) -> Architecture:
    """Its output matrix may have fewer rows than the table."""
    refuse(config.output_vocab_size is not None, "output_vocab_size")
    return _apertus(config)


def _olmo(config: Any) -> Architecture:
    norm = NormForm(1e-5, centred=True, has_weight=False)
    return decoder(config, grouped(config, clip=config.clip_qkv), gated(config, bias=False), norm=norm)


def _helium(config: Any) -> Architecture:
    return decoder(config, grouped(config, out_bias=False, interleaved=True), gated(config))


def _nanochat(config: Any) -> Architecture:
    """No norm has weights, heads are normed after the rotation, and it turns the other way."""
    norm = NormForm(config.rms_norm_eps, has_weight=False)
    mixer = grouped(config, norm=HeadNorm(norm, turned=True))
    back = replace(mixer.rotary, frequencies=tuple(-each for each in mixer.rotary.frequencies))
    feed = plain(config.intermediate_size, config.hidden_act, names=("fc1", "fc2"))
    ends = {"normed_embeddings": True, "softcap": config.final_logit_softcapping}
    return decoder(config, replace(mixer, rotary=back), feed, norm=norm, **ends)


def _bitnet(config: Any) -> Architecture:
    norm = NormForm(config.rms_norm_eps)
    return decoder(config, grouped(config, out_norm=norm), gated(config, bias=False, norm=norm))


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
DENSE: dict[str, Callable[[Any], Architecture]] = {
    "apertus": _apertus,
    "apertus1p5_text": _apertus_of_text,
    "arcee": _arcee,
    "biogpt": _biogpt,
    "bitnet": _bitnet,
    "codegen": _codegen,
    "ctrl": _ctrl,
    "falcon": _falcon,
    "gpt2": _gpt2,
    "gpt_bigcode": _gpt_bigcode,
    "gpt_neo": _gpt_neo,
    "gpt_neox": _gpt_neox,
    "gptj": _gptj,
    "helium": _helium,
    "jais2": _jais2,
    "mllama": _mllama,
    "mllama_text_model": _mllama,
    "nanochat": _nanochat,
    "nemotron": _nemotron,
    "olmo": _olmo,
    "openai-gpt": _openai_gpt,
    "opt": _opt,
    "persimmon": _persimmon,
    "phi": _phi,
    "xglm": _xglm,
}
