"""Further mixtures of experts: newer and less used ones (see `table.py`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from engine.model.decoder.architecture import Architecture, HeadGate, HeadNorm, Layer, NormForm
from engine.model.decoder.experts import Experts, Router
from engine.model.decoder.families.builders import (
    FULL,
    SLIDING,
    cohere,
    decoder,
    gated,
    grouped,
    of_kinds,
    refuse,
    rotary_in_windows,
    with_attention,
    with_bases,
    with_windows,
)
from engine.model.decoder.families.hybrid import LINEAR, delta, mixed
from engine.model.decoder.families.mixtures import (
    BLOCK,
    CORRECTION,
    GATES,
    W123,
    after_dense,
    deepseek_v3,
    experts,
    glm4_moe,
    granitemoe,
    mixture,
    of_deepseek,
    of_qwen,
    sparse_steps,
    with_experts,
)
from engine.model.decoder.rotary import RotaryTable
from engine.native.experts import ExpertGate


def _normed_heads(config: Any) -> HeadNorm:
    return HeadNorm(NormForm(config.rms_norm_eps))


def _with_shared(config: Any, router: Router, inner: int, **more: Any) -> Experts:
    """Experts beside a feed-forward of this size for all rows."""
    return experts(config, router, shared=gated(config, bias=False, inner=inner), **more)


def _afmoe(config: Any) -> Architecture:
    """Arcee's Trinity: what heads give has gates."""
    router = Router(
        config.num_experts, config.num_experts_per_tok, "sigmoid", scale=config.route_scale, correction="expert_bias",
        name="router.gate",
    )  # fmt: skip
    mixer = grouped(config, norm=_normed_heads(config), gate=HeadGate("gate_proj"))
    feed = _with_shared(config, router, config.moe_intermediate_size * config.num_shared_experts)
    sparse = [number >= config.num_dense_layers for number in range(config.num_hidden_layers)]
    norms = ("input_layernorm", "post_attention_layernorm", "pre_mlp_layernorm", "post_mlp_layernorm")
    scale = config.hidden_size**0.5 if config.mup_enabled else None
    made = mixture(config, mixer, feed, sparse, {"norms": norms}, embedding_scale=scale)
    refuse(config.attention_bias, "attention_bias")  # the gates' product has none
    return rotary_in_windows(config, made)


def _aria(config: Any) -> Architecture:
    router, inner = Router(config.moe_num_experts, config.moe_topk, name="router"), config.intermediate_size
    shared = gated(config, inner=inner * config.moe_num_shared_experts)
    feed = experts(config, router, inner, gate=ExpertGate(), transposed=True, shared=shared)
    return mixture(config, grouped(config), feed, names=_ARIA)


def _cohere2_moe(config: Any) -> Architecture:
    """Cohere 2 with experts. Layers without a window have rotary positions where they are the first, dense ones."""
    scores, count, inner = config.expert_selection_fn, config.num_shared_experts, config.intermediate_size
    is_mean = count and config.shared_expert_combination_strategy == "average"
    share = 0.5 if is_mean else 1.0
    normalised = scores == "softmax" or bool(config.norm_topk_prob)
    router = Router(config.num_experts, config.num_experts_per_tok, scores, normalised=normalised, scale=share)
    shared = gated(config, bias=False, inner=inner * count, scales=(1.0, share)) if count else None
    sparse = after_dense(config)
    feed = experts(config, router, inner, shared=shared)
    made = with_windows(config, with_experts(cohere(config, config.prefix_dense_intermediate_size), feed, sparse))
    still, forced = RotaryTable.none(made.attention.head_dim), config.prefix_dense_sliding_window_pattern == 1
    each = zip(config.layer_types, sparse, strict=True)
    return with_attention(
        made, [{"rotary": still} if kind == FULL and (has or not forced) else {} for kind, has in each]
    )


def _dbrx(config: Any) -> Architecture:
    of_heads, of_experts = config.attn_config, config.ffn_config
    refuse(of_experts.moe_normalize_expert_weights not in (None, 1.0), "this moe_normalize_expert_weights")
    fields: dict[str, Any] = {"joined": True, "clip": of_heads.clip_qkv, "out_name": "out_proj"}
    mixer = grouped(config, bias=False, kv_heads=of_heads.kv_n_heads, **fields)
    normalised = of_experts.moe_normalize_expert_weights is not None
    router = Router(of_experts.moe_num_experts, of_experts.moe_top_k, normalised=normalised, name="router")
    feed = experts(config, router, of_experts.ffn_hidden_size, gate=GATES[of_experts.ffn_act_fn["name"]])
    return decoder(config, mixer, feed, norm=NormForm(1e-5, centred=True), names=_DBRX)


def _flint(config: Any) -> Architecture:
    mixer = grouped(config, norm=_normed_heads(config), has_sinks=True)
    router = replace(of_qwen(config), scores="sigmoid")
    feed = _with_shared(config, router, config.shared_expert_intermediate_size, shared_name="shared_expert")
    names = ((r"\.softmax_offset$", ".sinks"),)
    return rotary_in_windows(config, mixture(config, mixer, feed, sparse_steps(config), names=names))


def _granitemoe_swa(config: Any) -> Architecture:
    return with_bases(config, granitemoe(config))


def _hy_v3(config: Any) -> Architecture:
    router = Router(
        config.num_experts, config.num_experts_per_tok, "sigmoid", scale=config.router_scaling_factor,
        correction="e_score_correction_bias",
    )  # fmt: skip
    bias, inner = bool(config.mlp_bias), config.moe_intermediate_size * config.num_shared_experts
    feed = experts(config, router, shared=gated(config, inner=inner))
    mixer = grouped(config, norm=_normed_heads(config))
    return mixture(config, mixer, feed, after_dense(config), bias=bias, names=_HY)


def _kolibri1(config: Any) -> Architecture:
    """Experts are chosen by corrected logits."""
    router = replace(of_qwen(config), scores="sigmoid", correction=CORRECTION, corrects_logits=True)
    norms = ("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm")
    mixer = grouped(config, bias=False, norm=_normed_heads(config))
    feed = _with_shared(config, router, config.shared_expert_intermediate_size)
    made = mixture(config, mixer, feed, layer={"norms": norms}, names=_KOLIBRI)
    refuse(config.sliding_window is None, "a sliding_window of None")
    return rotary_in_windows(config, made)


def _laguna(config: Any) -> Architecture:
    """Layers differ in their heads, which have gates, and in their rotary positions."""
    router = Router(
        config.num_experts, config.num_experts_per_tok, "sigmoid", cap=config.moe_router_logit_softcapping or None,
        scale=config.moe_routed_scaling_factor, correction=CORRECTION,
    )  # fmt: skip
    gate = HeadGate("g_proj", "softplus", by_head=config.gating in (True, "per-head"))
    mixer, heads = grouped(config, norm=_normed_heads(config), gate=gate), config.num_attention_heads_per_layer
    refuse(config.attention_bias or any(count % config.num_key_value_heads for count in heads), f"{heads} heads")
    feed = _with_shared(config, router, config.shared_expert_intermediate_size)
    made = mixture(config, mixer, feed, after_dense(config), names=_LAGUNA)
    made = of_kinds(config, with_windows(config, made))
    return with_attention(made, [{"heads": count} for count in heads])


def _lara_mini(config: Any) -> Architecture:
    """Three kinds of layers; of those that attend, the ones without a window have no rotary positions."""
    norm, attention = NormForm(config.rms_norm_eps), grouped(config, norm=_normed_heads(config))
    feed = _with_shared(config, of_qwen(config), config.shared_expert_intermediate_size, shared_name="shared_expert")
    spec, still = replace(attention.spec, window=config.sliding_window), RotaryTable.none(attention.head_dim)
    made = {
        LINEAR: Layer(delta(config), feed, names=("linear_attn", "mlp")),
        SLIDING: Layer(replace(attention, spec=spec), feed),
        FULL: Layer(replace(attention, rotary=still), feed),
    }
    return mixed(config, config.layer_types, made, norm=norm, names=_LARA)


def _mellum(config: Any) -> Architecture:
    mixer, feed = grouped(config, norm=_normed_heads(config)), experts(config, of_qwen(config))
    return of_kinds(config, with_windows(config, mixture(config, mixer, feed, after_dense(config))))


def _phimoe(config: Any) -> Architecture:
    """Two experts, one after the other. The factor of cos and sin has names of its own, and is one for all lengths."""
    rope = {"max_position_embeddings": config.max_position_embeddings} | dict(config.rope_parameters)
    if rope["rope_type"] != "default":
        refuse(rope["short_mscale"] != rope["long_mscale"], "short_mscale beside another long_mscale")
        rope["attention_factor"] = rope["short_mscale"]
    mixer = grouped(config, rotary=RotaryTable.of(rope, config.hidden_size // config.num_attention_heads))
    router = Router(config.num_local_experts, 2, tolerance=2 * config.router_jitter_noise, name="router")
    norm = NormForm(config.rms_norm_eps, centred=True, has_bias=True)
    feed = experts(config, router, config.intermediate_size)
    made = mixture(config, mixer, feed, norm=norm, head_bias=bool(config.lm_head_bias), names=_PHI)
    return with_attention(made, [{"window": config.sliding_window} for _ in made.layers])


def _sarvam_moe(config: Any) -> Architecture:
    made = glm4_moe(config)
    return replace(made, names=_SARVAM)


def _solar_open(config: Any) -> Architecture:
    feed = of_deepseek(config, config.n_routed_experts, config.n_shared_experts)
    return mixture(config, grouped(config, out_bias=False), feed)


_ARIA = (
    (r"\.experts\.fc1\.weight$", ".experts.gate_up_proj"),
    (r"\.experts\.fc2\.weight$", ".experts.down_proj"),
)
_DBRX = (
    (r"^transformer\.wte\.", "model.embed_tokens."),
    (r"^transformer\.blocks\.", "model.layers."),
    (r"^transformer\.norm_f\.", "model.norm."),
    (r"\.norm_attn_norm\.norm_1\.", ".input_layernorm."),
    (r"\.norm_attn_norm\.norm_2\.", ".post_attention_layernorm."),
    (r"\.norm_attn_norm\.attn\.Wqkv\.", ".self_attn.qkv_proj."),
    (r"\.norm_attn_norm\.attn\.", ".self_attn."),
    (r"\.ffn\.router\.layer\.", ".mlp.router."),
    (r"\.ffn\.experts\.mlp\.w1$", ".mlp.experts.*.gate_proj"),
    (r"\.ffn\.experts\.mlp\.v1$", ".mlp.experts.*.up_proj"),
    (r"\.ffn\.experts\.mlp\.w2$", ".mlp.experts.*.down_proj.t"),
)
_HY = (
    (r"\.mlp\.router\.gate\.", ".mlp.gate."),
    (r"\.mlp\.expert_bias$", ".mlp.e_score_correction_bias"),
    (r"\.mlp\.shared_mlp\.", ".mlp.shared_experts."),
)
_KOLIBRI = (
    (r"\.moe\.router\.expert_bias$", f".mlp.{CORRECTION}"),
    (r"\.post_attn_norm\.", ".post_self_attn_layernorm."),
    (r"\.post_ffn_norm\.", ".post_mlp_layernorm."),
)
_LAGUNA = (
    (r"\.mlp\.experts\.e_score_correction_bias$", f".mlp.{CORRECTION}"),
    (r"\.mlp\.shared_expert\.", ".mlp.shared_experts."),
)
_LARA = (
    (r"\.linear_attn\.out_norm\.", ".linear_attn.norm."),
    (r"\.linear_attn\.in_proj\.", ".linear_attn.in_proj_qkv|in_proj_z|in_proj_b|in_proj_a."),
)
_PHI = (BLOCK, (r"\.mlp\.gate\.", ".mlp.router."), *W123)
_SARVAM = (
    (r"^model\.word_embeddings\.", "model.embed_tokens."),
    (r"\.attention\.query_key_value\.", ".self_attn.q_proj|k_proj|v_proj."),
    (r"\.attention\.dense\.", ".self_attn.o_proj."),
    (r"\.attention\.query_layernorm\.", ".self_attn.q_norm."),
    (r"\.attention\.key_layernorm\.", ".self_attn.k_norm."),
    (r"\.mlp\.gate\.expert_bias$", f".mlp.{CORRECTION}"),
)
# By model type.
SPARSE: dict[str, Callable[[Any], Architecture]] = {
    "afmoe": _afmoe,
    "aria_text": _aria,
    "cohere2_moe": _cohere2_moe,
    "dbrx": _dbrx,
    "flint": _flint,
    "granitemoe_swa": _granitemoe_swa,
    "hy_v3": _hy_v3,
    "kolibri1": _kolibri1,
    "laguna": _laguna,
    "lara_mini": _lara_mini,
    "mellum": _mellum,
    "phimoe": _phimoe,
    "sarvam_mla": deepseek_v3,
    "sarvam_moe": _sarvam_moe,
    "solar_open": _solar_open,
}
