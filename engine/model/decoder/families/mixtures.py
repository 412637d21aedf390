"""The families of the table with experts or latent attention (see `table.py`)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from pilotfish.engine.attention.reference import AttentionSpec
from pilotfish.engine.model.decoder.architecture import NORMS_AFTER, Architecture, HeadGate, HeadNorm, Mixer, NormForm
from pilotfish.engine.model.decoder.experts import Experts, Router
from pilotfish.engine.model.decoder.families.builders import (
    FULL,
    after_rotation,
    cohere,
    decoder,
    gated,
    granite_factors,
    grouped,
    normed_heads,
    of_kinds,
    refuse,
    rotary_in_windows,
    turning,
    with_attention,
    with_bases,
    with_windows,
)
from pilotfish.engine.model.decoder.latent import LatentLayer
from pilotfish.engine.model.decoder.rotary import QueryGrowth, RotaryTable
from pilotfish.engine.native.experts import ExpertGate
from pilotfish.engine.native.rows import GELU_TANH

_GELU = ExpertGate(GELU_TANH.linear, GELU_TANH.cubic)
GATES = {"silu": ExpertGate(), "swish": ExpertGate(), "gelu_pytorch_tanh": _GELU, "gelu_new": _GELU}
GATES |= {"relu2": ExpertGate(squared=True)}
CORRECTION = "gate.e_score_correction_bias"
W123 = (
    (r"\.experts\.(\d+)\.w1\.", r".experts.\1.gate_proj."),
    (r"\.experts\.(\d+)\.w2\.", r".experts.\1.down_proj."),
    (r"\.experts\.(\d+)\.w3\.", r".experts.\1.up_proj."),
)
BLOCK = (r"\.block_sparse_moe\.", ".mlp.")


def experts(config: Any, router: Router, inner: int | None = None, **more: Any) -> Experts:
    """The experts of most families."""
    gate = more.pop("gate", None) or GATES[config.hidden_act]
    inner = config.moe_intermediate_size if inner is None else inner
    fits = 0 < router.each <= router.experts
    if router.groups is not None:
        count, kept = router.groups
        size, rest = divmod(router.experts, count)
        fits = fits and not rest and size >= router.best and kept <= count and router.each <= kept * size
    refuse(not fits, f"{router.each} of {router.experts} experts in the groups {router.groups}")
    return Experts(inner, gate, router, **more)


def with_shared(config: Any, router: Router, inner: int, **more: Any) -> Experts:
    """Experts with a shared expert of this size."""
    return experts(config, router, shared=gated(config, bias=False, inner=inner), **more)


def mixture(
    config: Any,
    mixer: Mixer,
    feed: Experts,
    is_sparse: Iterable[bool] | None = None,
    layer: Any = None,
    **more: Any,
) -> Architecture:
    """A model with experts in the layers of `is_sparse`, default all; others have the usual feed-forward."""
    bias = more.pop("bias", False)
    if is_sparse is None:
        return decoder(config, mixer, feed, layer, **more)
    return with_experts(decoder(config, mixer, gated(config, bias=bias), layer, **more), feed, is_sparse)


def with_experts(made: Architecture, feed: Experts, is_sparse: Iterable[bool]) -> Architecture:
    """Set experts in the layers of `is_sparse`."""
    pairs = zip(made.layers, is_sparse, strict=True)
    return replace(made, layers=tuple(replace(each, feed=feed) if has else each for each, has in pairs))


def _mixtral(config: Any) -> Architecture:
    router = Router(config.num_local_experts, config.num_experts_per_tok)
    feed = experts(config, router, config.intermediate_size)
    made = mixture(config, grouped(config, bias=False), feed, names=(BLOCK, *W123))
    return with_attention(made, [{"window": config.sliding_window} for _ in made.layers])


def of_qwen(config: Any) -> Router:
    """The usual router."""
    normalised = bool(getattr(config, "norm_topk_prob", True))
    return Router(config.num_experts, config.num_experts_per_tok, normalised=normalised)


def qwen_experts(config: Any) -> Experts:
    """Experts with a gated shared expert."""
    fields = {"shared_name": "shared_expert", "shared_gate": "shared_expert_gate"}
    return with_shared(config, of_qwen(config), config.shared_expert_intermediate_size, **fields)


def sparse_steps(config: Any) -> list[bool]:
    """Which layers have experts."""
    step, dense = getattr(config, "decoder_sparse_step", 1), getattr(config, "mlp_only_layers", None) or ()
    return [i not in dense and not (i + 1) % step for i in range(config.num_hidden_layers)]


def _qwen2_moe(config: Any) -> Architecture:
    mixer = grouped(config, qkv_bias=bool(config.qkv_bias), out_bias=False)
    return with_windows(config, mixture(config, mixer, qwen_experts(config), sparse_steps(config)))


def _qwen3_moe(config: Any) -> Architecture:
    mixer = grouped(config, norm=normed_heads(config))
    made = mixture(config, mixer, experts(config, of_qwen(config)), sparse_steps(config))
    return with_attention(made, [{"window": config.sliding_window} for _ in made.layers])


def _olmoe(config: Any) -> Architecture:
    refuse(config.clip_qkv is not None, "clip_qkv")
    refuse(getattr(config, "sliding_window", None) is not None, "sliding_window")
    mixer = grouped(config, norm=HeadNorm(NormForm(config.rms_norm_eps), extent="all"))
    return mixture(config, mixer, experts(config, of_qwen(config), config.intermediate_size))


def _flex_olmo(config: Any) -> Architecture:
    mixer = grouped(config, norm=HeadNorm(NormForm(config.rms_norm_eps), extent="all"))
    feed = experts(config, of_qwen(config), config.intermediate_size)
    return mixture(config, mixer, feed, layer={"norms": NORMS_AFTER})


def _gpt_oss(config: Any) -> Architecture:
    gate = ExpertGate(
        getattr(config, "swiglu_alpha", 1.702), limit=getattr(config, "swiglu_limit", 7.0), plus=1.0, interleaved=True
    )
    router = Router(config.num_local_experts, config.num_experts_per_tok, bias=True, name="router")
    feed = experts(config, router, config.intermediate_size, gate=gate, bias=True, transposed=True)
    return with_windows(config, mixture(config, grouped(config, has_sinks=True), feed))


def granite_experts(config: Any) -> Experts:
    """Some families have a shared expert, which a checkpoint stores beside the experts."""
    router = Router(config.num_local_experts, config.num_experts_per_tok, name="router")
    inner = getattr(config, "shared_intermediate_size", 0)
    shared = gated(config, bias=False, joined=True, inner=inner) if inner else None
    return experts(config, router, config.intermediate_size, shared=shared, shared_name="shared_mlp")


def granitemoe(config: Any) -> Architecture:
    """Granite with experts."""
    layer, more = granite_factors(config)
    mixer = grouped(config, spec=AttentionSpec(config.attention_multiplier))
    return mixture(config, mixer, granite_experts(config), layer=layer, names=GRANITE_NAMES, **more)


def _ernie4_5_moe(config: Any) -> Architecture:
    bias, count = bool(config.use_bias), config.moe_num_shared_experts
    shared = gated(config, bias=bias, inner=config.moe_intermediate_size * count) if count else None
    correction = "gate.moe_statics.e_score_correction_bias"
    router = Router(config.moe_num_experts, config.moe_k, least=config.moe_norm_min, correction=correction, is_row=True)
    first, last, step = config.moe_layer_start_index, config.moe_layer_end_index, config.moe_layer_interval
    sparse = [first <= i <= last and not (i + 1) % step for i in range(config.num_hidden_layers)]
    mixer, feed = grouped(config, bias=bias, interleaved=True), experts(config, router, shared=shared)
    names = ((r"\.mlp\.moe_statics\.", ".mlp.gate.moe_statics."),)
    return mixture(config, mixer, feed, sparse, bias=bias, head_bias=bias, names=names)


def router_of_deepseek(config: Any, count: int, **more: Any) -> Router:
    """Element-wise scores, a correction, and groups."""
    groups = config.n_group or 1, config.topk_group or 1
    fields: dict[str, Any] = {
        "scores": "sigmoid",
        "normalised": bool(config.norm_topk_prob),
        "scale": float(config.routed_scaling_factor),
        "groups": None if groups[0] == groups[1] else groups,
        "correction": CORRECTION,
    }
    return Router(count, config.num_experts_per_tok, **fields | more)


def of_deepseek(config: Any, count: int, num_shared: int | None, **more: Any) -> Experts:
    """Experts with a shared expert of the size of several."""
    refuse(not num_shared, "a mixture without shared experts")
    router = router_of_deepseek(config, count, **more)
    return with_shared(config, router, config.moe_intermediate_size * (num_shared or 0))


def after_dense(config: Any) -> list[bool]:
    """Which layers have experts: all but some of the first."""
    kinds = getattr(config, "mlp_layer_types", None)
    if kinds is not None:
        return [kind == "sparse" for kind in kinds]
    return [i >= config.first_k_dense_replace for i in range(config.num_hidden_layers)]


def glm4_moe(config: Any) -> Architecture:
    """GLM 4.5."""
    norm = normed_heads(config) if config.use_qk_norm else None
    feed = of_deepseek(config, config.n_routed_experts, config.n_shared_experts)
    return mixture(config, grouped(config, out_bias=False, norm=norm), feed, after_dense(config))


def _dots1(config: Any) -> Architecture:
    mixer = grouped(config, norm=normed_heads(config))
    feed = of_deepseek(config, config.n_routed_experts, config.n_shared_experts)
    return with_windows(config, mixture(config, mixer, feed, after_dense(config)))


def _exaone_moe(config: Any) -> Architecture:
    """Layers without a window have no rotary positions, in models that have windows."""
    mixer = grouped(config, bias=False, norm=normed_heads(config))
    feed = of_deepseek(config, config.num_experts, config.num_shared_experts)
    names = ((r"\.mlp\.e_score_correction_bias", f".mlp.{CORRECTION}"),)
    made = mixture(config, mixer, feed, after_dense(config), names=names)
    return (with_windows if config.sliding_window is None else rotary_in_windows)(config, made)


def _minimax_m2(config: Any) -> Architecture:
    mixer = grouped(config, bias=False, norm=HeadNorm(NormForm(config.rms_norm_eps), extent="all"))
    router = Router(
        config.num_local_experts,
        config.num_experts_per_tok,
        scores="sigmoid",
        correction="e_score_correction_bias",
    )
    return mixture(config, mixer, experts(config, router, config.intermediate_size), names=(BLOCK, *W123))


def _hunyuan_v1_moe(config: Any) -> Architecture:
    count, each = config.num_experts, config.moe_topk
    refuse(not isinstance(count, int) or not isinstance(each, int), "a number of experts for each layer")
    feed = experts(
        config,
        Router(count, each, name="gate.wg"),
        config.intermediate_size,
        shared=gated(config, bias=False),
        shared_name="shared_mlp",
    )
    return mixture(config, after_rotation(config), feed)


def _llama4(config: Any) -> Architecture:
    """Layers without rotary positions have full attention and queries that grow with positions; others have chunks."""
    chunked, depth = "chunked_attention", config.num_hidden_layers
    form = NormForm(config.rms_norm_eps, has_weight=False)
    dense, shared = gated(config, bias=False), gated(config, bias=False)
    router = Router(
        config.num_local_experts, config.num_experts_per_tok, scores="sigmoid", normalised=False, name="router"
    )
    feed = experts(config, router, config.intermediate_size, transposed=True, on_inputs=True, shared=shared,
                   shared_name="shared_expert")  # fmt: skip
    mixer, kinds = grouped(config, interleaved=True), config.layer_types
    refuse(not set(kinds) <= {FULL, chunked}, f"layer_types {sorted(set(kinds))}")
    layer = {"names": ("self_attn", "feed_forward")}
    made = mixture(config, mixer, feed, [i in config.moe_layers for i in range(depth)], layer)
    wide = replace(dense, inner=config.intermediate_size_mlp)
    layers = tuple(layer if layer.feed is feed else replace(layer, feed=wide) for layer in made.layers)
    growth = QueryGrowth(config.attn_scale, config.floor_scale, 1) if config.attn_temperature_tuning else None
    norm = HeadNorm(form, turned=True) if config.use_qk_norm else None
    turning, still = {"norm": norm}, {"rotary": RotaryTable.none(mixer.head_dim), "growth": growth}
    chunks = [config.attention_chunk_size if kind == chunked else None for kind in kinds]
    fields = [
        (turning if turns else still) | {"spec": replace(mixer.spec, chunk=chunk)}
        for turns, chunk in zip(config.no_rope_layers, chunks, strict=True)
    ]
    return with_attention(replace(made, layers=layers), fields)


def latent(config: Any, *, interleaved: bool, turns: bool = True, **more: Any) -> LatentLayer:
    """Latent attention; `turns`: with rotary positions."""
    rope = dict(config.rope_parameters) if turns else {}
    size, bias = config.qk_rope_head_dim, bool(config.attention_bias)
    refuse(bias and config.q_lora_rank is None, "attention_bias without q_lora_rank")  # queries have no bias
    table = turning(config, rope, size) if turns else RotaryTable.none(size)
    scale, grown = (config.qk_nope_head_dim + size) ** -0.5, rope.get("mscale_all_dim")
    if rope.get("rope_type", "default") != "default" and grown and rope["factor"] > 1:
        scale *= (0.1 * grown * math.log(rope["factor"]) + 1.0) ** 2
    return LatentLayer(
        config.num_attention_heads,
        config.kv_lora_rank,
        config.qk_nope_head_dim,
        size,
        config.v_head_dim,
        AttentionSpec(scale),
        table,
        config.q_lora_rank,
        interleaved,
        bias,
        **more,
    )


def _deepseek_v2(config: Any) -> Architecture:
    kinds: dict[str, Any] = {"scores": "softmax", "correction": None, "normalised": False, "best": 1}
    refuse(config.topk_method not in ("greedy", "group_limited_greedy"), f"topk_method {config.topk_method}")
    feed = of_deepseek(config, config.n_routed_experts, config.n_shared_experts, **kinds)
    if config.topk_method == "greedy":
        feed = replace(feed, router=replace(feed.router, groups=None))
    return mixture(config, latent(config, interleaved=True), feed, after_dense(config), bias=bool(config.mlp_bias))


def deepseek_v3(config: Any) -> Architecture:
    """DeepSeek V3: experts and latents."""
    feed = of_deepseek(config, config.n_routed_experts, config.n_shared_experts)
    mixer = latent(config, interleaved=bool(config.rope_interleave))
    return mixture(config, mixer, feed, after_dense(config))


def _axk1(config: Any) -> Architecture:
    """The experts' output is normalised."""
    made = deepseek_v3(config)
    norms = ("input_layernorm", None, "post_attention_layernorm", "post_mlp_layernorm")
    layers = tuple(replace(x, norms=norms) if isinstance(x.feed, Experts) else x for x in made.layers)
    return replace(made, layers=layers, names=((r"\.mlp\.post_mlp_layernorm\.", ".post_mlp_layernorm."),))


def _youtu(config: Any) -> Architecture:
    return decoder(config, latent(config, interleaved=bool(config.rope_interleave)), gated(config))


def _minicpm3(config: Any) -> Architecture:
    layer = {"scale": config.scale_depth / math.sqrt(config.num_hidden_layers)}
    factors = {"embedding_scale": float(config.scale_emb), "logit_scale": 1 / config.logits_scaling}
    return decoder(config, latent(config, interleaved=False), gated(config, bias=False), layer, **factors)


def _afmoe(config: Any) -> Architecture:
    """Arcee's Trinity: attention heads have output gates."""
    router = Router(
        config.num_experts, config.num_experts_per_tok, "sigmoid", scale=config.route_scale, correction="expert_bias",
        name="router.gate",
    )  # fmt: skip
    mixer = grouped(config, norm=normed_heads(config), gate=HeadGate("gate_proj"))
    feed = with_shared(config, router, config.moe_intermediate_size * config.num_shared_experts)
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
    """Cohere 2 with experts. Of layers without a window only the first, dense ones have rotary positions."""
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
    mixer = grouped(config, norm=normed_heads(config), has_sinks=True)
    router = replace(of_qwen(config), scores="sigmoid")
    feed = with_shared(config, router, config.shared_expert_intermediate_size, shared_name="shared_expert")
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
    mixer = grouped(config, norm=normed_heads(config))
    return mixture(config, mixer, feed, after_dense(config), bias=bias, names=_HY)


def _kolibri1(config: Any) -> Architecture:
    """Experts are selected by corrected logits."""
    router = replace(of_qwen(config), scores="sigmoid", correction=CORRECTION, corrects_logits=True)
    norms = ("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm")
    mixer = grouped(config, bias=False, norm=normed_heads(config))
    feed = with_shared(config, router, config.shared_expert_intermediate_size)
    made = mixture(config, mixer, feed, layer={"norms": norms}, names=_KOLIBRI)
    refuse(config.sliding_window is None, "a sliding_window of None")
    return rotary_in_windows(config, made)


def _laguna(config: Any) -> Architecture:
    """Layers differ in number of heads, which have gates, and in rotary positions."""
    router = Router(
        config.num_experts, config.num_experts_per_tok, "sigmoid", cap=config.moe_router_logit_softcapping or None,
        scale=config.moe_routed_scaling_factor, correction=CORRECTION,
    )  # fmt: skip
    gate = HeadGate("g_proj", "softplus", by_head=config.gating in (True, "per-head"))
    mixer, heads = grouped(config, norm=normed_heads(config), gate=gate), config.num_attention_heads_per_layer
    refuse(config.attention_bias or any(count % config.num_key_value_heads for count in heads), f"{heads} heads")
    feed = with_shared(config, router, config.shared_expert_intermediate_size)
    made = mixture(config, mixer, feed, after_dense(config), names=_LAGUNA)
    made = of_kinds(config, with_windows(config, made))
    return with_attention(made, [{"heads": count} for count in heads])


def _mellum(config: Any) -> Architecture:
    mixer, feed = grouped(config, norm=normed_heads(config)), experts(config, of_qwen(config))
    return of_kinds(config, with_windows(config, mixture(config, mixer, feed, after_dense(config))))


def _phimoe(config: Any) -> Architecture:
    """Two experts, selected sequentially. The factor of cos and sin has separate names, and is constant."""
    rope = dict(config.rope_parameters)
    if rope["rope_type"] != "default":
        refuse(rope["short_mscale"] != rope["long_mscale"], "short_mscale beside another long_mscale")
        rope["attention_factor"] = rope["short_mscale"]
    mixer = grouped(config, rotary=turning(config, rope, config.hidden_size // config.num_attention_heads))
    router = Router(config.num_local_experts, 2, tolerance=2 * config.router_jitter_noise, name="router")
    norm = NormForm(config.rms_norm_eps, centred=True, has_bias=True)
    feed = experts(config, router, config.intermediate_size)
    made = mixture(config, mixer, feed, norm=norm, head_bias=bool(config.lm_head_bias), names=_PHI)
    return with_attention(made, [{"window": config.sliding_window} for _ in made.layers])


def _sarvam_moe(config: Any) -> Architecture:
    return replace(glm4_moe(config), names=_SARVAM)


def _solar_open(config: Any) -> Architecture:
    feed = of_deepseek(config, config.n_routed_experts, config.n_shared_experts)
    return mixture(config, grouped(config, out_bias=False), feed)


GRANITE_NAMES = (
    BLOCK,
    (r"\.mlp\.input_linear\.weight", ".mlp.experts.gate_up_proj"),
    (r"\.mlp\.output_linear\.weight", ".mlp.experts.down_proj"),
    (r"\.mlp\.router\.layer\.", ".mlp.router."),
    (r"(?<!\.mlp)\.shared_mlp\.input_linear\.", ".mlp.shared_mlp.gate_up_proj."),
    (r"(?<!\.mlp)\.shared_mlp\.output_linear\.", ".mlp.shared_mlp.down_proj."),
)
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
MIXTURES: dict[str, Callable[[Any], Architecture]] = {
    "afmoe": _afmoe,
    "aria_text": _aria,
    "axk1": _axk1,
    "cohere2_moe": _cohere2_moe,
    "dbrx": _dbrx,
    "deepseek_v2": _deepseek_v2,
    "deepseek_v3": deepseek_v3,
    "dots1": _dots1,
    "ernie4_5_moe": _ernie4_5_moe,
    "exaone_moe": _exaone_moe,
    "flex_olmo": _flex_olmo,
    "flint": _flint,
    "glm4_moe": glm4_moe,
    "glm4_moe_lite": deepseek_v3,
    "gpt_oss": _gpt_oss,
    "granitemoe": granitemoe,
    "granitemoe_swa": _granitemoe_swa,
    "granitemoeshared": granitemoe,
    "hunyuan_v1_moe": _hunyuan_v1_moe,
    "hy_v3": _hy_v3,
    "kolibri1": _kolibri1,
    "laguna": _laguna,
    "llama4_text": _llama4,
    "mellum": _mellum,
    "minicpm3": _minicpm3,
    "minimax_m2": _minimax_m2,
    "mixtral": _mixtral,
    "olmoe": _olmoe,
    "phimoe": _phimoe,
    "qwen2_moe": _qwen2_moe,
    "qwen3_moe": _qwen3_moe,
    "sarvam_mla": deepseek_v3,
    "sarvam_moe": _sarvam_moe,
    "solar_open": _solar_open,
    "youtu": _youtu,
}
