"""Families with recurrent layers: short convolutions, delta rules, Mamba, shared blocks (see `table.py`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any

from pilotfish.engine.attention.reference import AttentionSpec
from pilotfish.engine.model.decoder.architecture import (
    FOUR_NORMS,
    NORMS_AFTER,
    Architecture,
    FeedLayer,
    HeadGate,
    HeadNorm,
    Layer,
    Mixer,
    NormForm,
    Norms,
)
from pilotfish.engine.model.decoder.experts import Experts, Router
from pilotfish.engine.model.decoder.families.builders import (
    FULL,
    SLIDING,
    gated,
    granite_factors,
    grouped,
    normed_heads,
    plain,
    refuse,
    rotary_of,
    turning,
)
from pilotfish.engine.model.decoder.families.mixtures import (
    BLOCK,
    GATES,
    GRANITE_NAMES,
    W123,
    after_dense,
    experts,
    granite_experts,
    latent,
    of_deepseek,
    of_qwen,
    qwen_experts,
    router_of_deepseek,
    sparse_steps,
    with_experts,
    with_shared,
)
from pilotfish.engine.model.decoder.feed_forward import GatedFeed
from pilotfish.engine.model.decoder.latent import LatentLayer
from pilotfish.engine.model.decoder.recurrent import (
    BesideLayer,
    ConvLayer,
    Convolution,
    DeltaLayer,
    Mamba1Layer,
    Mamba2Layer,
    SharedBlock,
    SharedLayer,
)
from pilotfish.engine.model.decoder.rotary import RotaryTable
from pilotfish.engine.native.experts import ExpertGate

LINEAR = "linear_attention"  # names of recurrent layers in configs
_HYBRID = "hybrid"  # names of layers with a shared block in configs


def mixed(config: Any, kinds: Seq[str], layers: Mapping[str, Layer], **more: Any) -> Architecture:
    """A model with layers of these kinds."""
    made = tuple(layers[kind] for kind in kinds)
    return Architecture(made, config.vocab_size, config.hidden_size, is_tied=bool(config.tie_word_embeddings), **more)


def require_silu(activation: str) -> None:
    """Refuse any other activation (see `refuse`)."""
    refuse(activation not in ("silu", "swish"), f"the activation {activation}")


def _lfm2(config: Any) -> Architecture:
    inner = config.intermediate_size
    if getattr(config, "block_auto_adjust_ff_dim", False):
        inner = int(2 * inner / 3)
        if config.block_ffn_dim_multiplier is not None:
            whole = config.block_multiple_of
            inner = -(-int(config.block_ffn_dim_multiplier * inner) // whole) * whole
    norm, norms, mlp = NormForm(config.norm_eps), ("operator_norm", None, "ffn_norm", None), GatedFeed(inner, "silu")
    conv = Convolution(config.hidden_size, config.conv_L_cache, bool(config.conv_bias), "conv")
    of_heads = HeadNorm(norm, names=("q_layernorm", "k_layernorm"))
    attention = grouped(config, bias=False, norm=of_heads, out_name="out_proj")
    made = {
        "conv": Layer(ConvLayer(config.hidden_size, conv), mlp, norms, names=("conv", "feed_forward")),
        FULL: Layer(attention, mlp, norms, names=("self_attn", "feed_forward")),
    }
    return mixed(config, config.layer_types, made, norm=norm, names=LFM2_NAMES)


def _lfm2_moe(config: Any) -> Architecture:
    """A row's weights are divided by their sum plus 0.000001, as in transformers."""
    fields: dict[str, Any] = {"normalised": bool(config.norm_topk_prob), "scale": float(config.routed_scaling_factor)}
    correction = "expert_bias" if config.use_expert_bias else None
    router = Router(config.num_experts, config.num_experts_per_tok, "sigmoid", correction=correction, **fields)
    sparse = [number >= config.num_dense_layers for number in range(config.num_hidden_layers)]
    return with_experts(_lfm2(config), experts(config, router, gate=ExpertGate()), sparse)


def delta(config: Any, **more: Any) -> DeltaLayer:
    """The delta rule, with Qwen's config names."""
    heads, key_heads = config.linear_num_value_heads, config.linear_num_key_heads
    require_silu(config.hidden_act)
    refuse(heads % key_heads, f"a delta rule of {heads} and {key_heads} heads")
    sizes = heads, key_heads, config.linear_key_head_dim, config.linear_value_head_dim, config.linear_conv_kernel_dim
    return DeltaLayer(*sizes, **{"eps": config.rms_norm_eps} | more)


def _qwen3_5(config: Any, feed: Experts | None = None, **more: Any) -> Architecture:
    norm, inner = NormForm(config.rms_norm_eps, plus_one=True), feed or gated(config, bias=False)
    attention = grouped(config, norm=HeadNorm(norm), gate=HeadGate())
    made = {
        LINEAR: Layer(delta(config, **more), inner, names=("linear_attn", "mlp")),
        FULL: Layer(attention, inner),
    }
    return mixed(config, config.layer_types, made, norm=norm)


def _qwen3_5_moe(config: Any) -> Architecture:
    return _qwen3_5(config, qwen_experts(config))


def _qwen3_next(config: Any) -> Architecture:
    return with_experts(_qwen3_5(config, kind="by_key_head"), qwen_experts(config), sparse_steps(config))


def _mamba2(config: Any) -> Architecture:
    require_silu(config.hidden_act)
    inner = config.num_heads * config.head_dim
    refuse(inner != int(config.expand * config.hidden_size), f"{config.num_heads} heads of {config.head_dim}")
    return _mixers_only(config, _mamba2_of_old(config, (config.num_heads, config.head_dim, config.state_size)))


def _mamba2_of_old(config: Any, sizes: tuple[int, int, int], **more: Any) -> Mamba2Layer:
    """With Mamba's config names."""
    low, high = config.time_step_limit
    bias = bool(config.use_bias)
    fields: dict[str, Any] = {"limits": (low, high), "bias": bias, "out_bias": bias}
    return Mamba2Layer(
        *sizes, config.n_groups, config.conv_kernel, bool(config.use_conv_bias), config.layer_norm_epsilon,
        config.n_groups, **fields | more,
    )  # fmt: skip


def _mamba2_of(config: Any, **more: Any) -> Mamba2Layer:
    """With the config names of hybrids with Mamba 2."""
    require_silu(config.hidden_act)
    low, high = config.time_step_limit
    sizes = config.mamba_n_heads, config.mamba_d_head, config.mamba_d_state, config.mamba_n_groups, config.mamba_d_conv
    bias = bool(config.mamba_proj_bias)
    fields: dict[str, Any] = {"eps": config.rms_norm_eps, "limits": (low, high), "bias": bias, "out_bias": bias}
    fields |= {"norm_groups": config.mamba_n_groups, "conv_bias": bool(config.mamba_conv_bias)}
    return Mamba2Layer(*sizes, **fields | more)


def _mamba(config: Any, norm: NormForm | None = None) -> Architecture:
    require_silu(config.hidden_act)
    mixer = Mamba1Layer(
        config.intermediate_size, config.state_size, config.time_step_rank, config.conv_kernel,
        bool(config.use_conv_bias), bool(config.use_bias), norm,
    )  # fmt: skip
    return _mixers_only(config, mixer)


def _falcon_mamba(config: Any) -> Architecture:
    """The inputs of step sizes, keys and queries are normalised."""
    return _mamba(config, NormForm(config.mixer_rms_eps, has_weight=False))


def _mixers_only(config: Any, *mixers: Mixer, wide: bool | None = None) -> Architecture:
    """A model of layers with only a mixer: these, or the given one in all."""
    each = mixers if len(mixers) > 1 else mixers * config.num_hidden_layers
    return Architecture(
        tuple(Layer(mixer, None, ("norm", None, None, None), names=("block", "")) for mixer in each),
        config.vocab_size, config.hidden_size, NormForm(config.layer_norm_epsilon),
        is_tied=bool(config.tie_word_embeddings), names=_MAMBA,
        wide=bool(config.residual_in_fp32) if wide is None else wide,
    )  # fmt: skip


def _nemotron_h(config: Any) -> Architecture:
    """Layers are a mixer or a feed-forward. `residual_in_fp32` has no effect."""
    require_silu(config.mamba_hidden_act)
    attention = grouped(config, bias=False, rotary=RotaryTable.none(config.head_dim))
    feed = plain(config.intermediate_size, config.mlp_hidden_act, bias=bool(config.mlp_bias))
    sizes = config.mamba_num_heads, config.mamba_head_dim, config.ssm_state_size
    mamba = _mamba2_of_old(config, sizes, limits=(config.time_step_min, float("inf")))
    of: dict[str, Mixer] = {FULL: attention, LINEAR: mamba, "mlp": FeedLayer(feed)}
    if "moe" in config.layers_block_type:
        of["moe"] = _nemotron_experts(config)
    return _mixers_only(config, *(of[kind] for kind in config.layers_block_type), wide=False)


def _nemotron_experts(config: Any) -> FeedLayer:
    """Experts without a gate and a shared expert; experts may have a smaller width than rows."""
    bias, inner = bool(config.mlp_bias), config.moe_shared_expert_intermediate_size
    gate, shared = GATES[config.mlp_hidden_act], plain(inner, config.mlp_hidden_act, bias=bias)
    refuse(bias and config.moe_latent_size is not None, "mlp_bias with moe_latent_size")
    router = router_of_deepseek(config, config.n_routed_experts)
    feed = experts(config, router, gate=replace(gate, ungated=True), shared=shared, latent=config.moe_latent_size)
    return FeedLayer(feed)


def _falcon_h1(config: Any) -> Architecture:
    """Factors of keys and of attention's input are applied as factors of scores and results."""
    reads, has_norm = config.attention_in_multiplier, bool(config.mamba_rms_norm)
    is_added = (config.attention_bias and reads != 1) or (config.mamba_proj_bias and config.ssm_in_multiplier != 1)
    refuse(is_added, "a bias beside a multiplier")
    attention, norm = grouped(config), NormForm(config.rms_norm_eps)
    mamba = _mamba2_of(
        config, eps=config.rms_norm_eps if has_norm else None, norm_first=bool(config.mamba_norm_before_gate),
        out_bias=bool(config.projectors_bias),
        factors=tuple(factor * config.ssm_in_multiplier for factor in config.ssm_multipliers),
    )  # fmt: skip
    feed = gated(config, scales=tuple(config.mlp_multipliers))
    refuse(mamba.inner != (config.mamba_d_ssm or config.mamba_expand * config.hidden_size), "this mamba_d_ssm")
    spec = replace(attention.spec, scale=attention.spec.scale * config.key_multiplier * reads**2)
    scales = config.ssm_out_multiplier, config.attention_out_multiplier * reads
    mixer = BesideLayer(mamba, replace(attention, spec=spec), scales)
    made = {"hybrid": Layer(mixer, feed, PRE_FF, names=("beside", "feed_forward"))}
    factors = {"embedding_scale": config.embedding_multiplier, "logit_scale": config.lm_head_multiplier}
    return mixed(config, ["hybrid"] * config.num_hidden_layers, made, norm=norm, names=_FALCON_H1, **factors)


def _bamba(config: Any) -> Architecture:
    feed, norm = gated(config), NormForm(config.rms_norm_eps)
    made = {
        LINEAR: Layer(_mamba2_of(config), feed, PRE_FF, names=("mamba", "feed_forward")),
        FULL: Layer(grouped(config), feed, PRE_FF, names=("self_attn", "feed_forward")),
    }
    return mixed(config, config.layers_block_type, made, norm=norm, names=FINAL)


def _mamba1_of(config: Any, **more: Any) -> Mamba1Layer:
    """With the config names of hybrids with Mamba 1."""
    inner, conv_bias, bias = config.mamba_expand * config.hidden_size, config.mamba_conv_bias, config.mamba_proj_bias
    sizes = inner, config.mamba_d_state, config.mamba_dt_rank, config.mamba_d_conv
    return Mamba1Layer(*sizes, bool(conv_bias), bool(bias), **more)


def _jamba(config: Any) -> Architecture:
    """Attention has no rotary positions."""
    require_silu(config.hidden_act)
    norm, feed = NormForm(config.rms_norm_eps), gated(config)
    mamba = _mamba1_of(config, norm=norm)
    head_dim = config.hidden_size // config.num_attention_heads
    attention = grouped(config, bias=False, rotary=RotaryTable.none(head_dim))
    made = {
        LINEAR: Layer(mamba, feed, PRE_FF, names=("mamba", "feed_forward")),
        FULL: Layer(attention, feed, PRE_FF, names=("self_attn", "feed_forward")),
    }
    model = mixed(config, config.layer_types, made, norm=norm, names=FINAL)
    sparse = [count > 1 for count in config.layers_num_experts]
    if not any(sparse):
        return model
    router = Router(config.num_experts, config.num_experts_per_tok, normalised=False, name="router")
    return with_experts(model, experts(config, router, config.intermediate_size), sparse)


def _granite_hybrid(config: Any) -> Architecture:
    norm, head_dim = NormForm(config.rms_norm_eps), config.hidden_size // config.num_attention_heads
    rotary = None if config.position_embedding_type == "rope" else RotaryTable.none(head_dim)
    attention = grouped(config, rotary=rotary, spec=AttentionSpec(config.attention_multiplier))
    shared = gated(config, bias=False, joined=True, inner=config.shared_intermediate_size)
    feed, name = (granite_experts(config), "mlp") if config.num_local_experts else (shared, "shared_mlp")
    of_layer, factors = granite_factors(config)
    found = {
        LINEAR: Layer(_mamba2_of(config), feed, names=("mamba", name)),
        FULL: Layer(attention, feed, names=("self_attn", name)),
    }
    made = {kind: replace(each, **of_layer) for kind, each in found.items()}
    names = GRANITE_NAMES if config.num_local_experts else _GRANITE
    return mixed(config, config.layers_block_type, made, norm=norm, names=names, **factors)


def _of_kimi(config: Any, attention: LatentLayer, names: Any, **more: Any) -> Architecture:
    """Kimi Delta Attention, latents, and DeepSeek's experts."""
    require_silu(config.hidden_act)
    heads, size = config.linear_num_heads, config.linear_head_dim
    fields: dict[str, Any] = {"kind": "apart", "by_channel": True, "by_sigmoid": True}
    mixer = DeltaLayer(heads, heads, size, size, config.linear_conv_kernel_dim, config.rms_norm_eps, **fields | more)
    feed = gated(config, bias=False)
    made = {
        LINEAR: Layer(mixer, feed),
        FULL: Layer(attention, feed),
    }
    model = mixed(config, config.layer_types, made, norm=NormForm(config.rms_norm_eps), names=names)
    sparse = of_deepseek(config, config.num_local_experts, config.n_shared_experts)
    return with_experts(model, sparse, after_dense(config))


def _kimi_linear(config: Any) -> Architecture:
    """No rotary positions."""
    attention = latent(config, interleaved=False, turns=False)
    return _of_kimi(config, attention, (BLOCK, *W123, _FORGETS), rank=config.linear_head_dim)


def _bailing_hybrid(config: Any) -> Architecture:
    """Attention heads have output gates."""
    refuse(config.attention_bias, "attention_bias")  # the gates' product has none
    attention = latent(config, interleaved=True, gated=True)
    return _of_kimi(config, attention, _BAILING, least=config.kda_lower_bound if config.kda_safe_gate else None)


def _olmo_hybrid(config: Any) -> Architecture:
    """Recurrent layers have input norms, attention layers output norms."""
    norm, feed, turns = NormForm(config.rms_norm_eps), gated(config, bias=False), config.rope_parameters
    head_dim = config.hidden_size // config.num_attention_heads
    rotary = None if turns and turns.get("rope_theta") is not None else RotaryTable.none(head_dim)
    attention = grouped(config, norm=HeadNorm(norm, extent="all"), rotary=rotary)
    mixer = delta(config, kind="apart", eps=1e-5, step=2.0 if config.linear_allow_neg_eigval else 1.0)
    made = {
        LINEAR: Layer(mixer, feed, names=("linear_attn", "mlp")),
        FULL: Layer(attention, feed, NORMS_AFTER, names=("self_attn", "mlp")),
    }
    return mixed(config, config.layer_types, made, norm=norm, names=_OLMO)


def _lfm3(config: Any) -> Architecture:
    """LFM 2 with windows, gates of heads, and output norms."""
    norm, feed, names = NormForm(config.norm_eps), GatedFeed(config.intermediate_size, "silu"), ("conv", "feed_forward")
    norms = FOUR_NORMS if config.use_sandwich_norm else (FOUR_NORMS[0], None, FOUR_NORMS[2], None)
    conv = Convolution(config.hidden_size, config.conv_L_cache, bool(config.conv_bias), "conv")
    made = {"conv": Layer(ConvLayer(config.hidden_size, conv), feed, norms, names=names)}
    gate = HeadGate("g_proj", by_head=True) if config.use_attention_gate else None
    refuse(gate is not None and config.attention_bias, "attention_bias with gates")  # the gates' product has none
    for kind, window in ((FULL, None), (SLIDING, config.sliding_window)):
        if kind in config.layer_types:
            rotary = turning(config, config.rope_parameters[kind], config.head_dim)
            spec = AttentionSpec(config.head_dim**-0.5, window)
            attention = grouped(config, norm=HeadNorm(norm), spec=spec, rotary=rotary, gate=gate)
            made[kind] = Layer(attention, feed, norms, names=("self_attn", "feed_forward"))
    return mixed(config, config.layer_types, made, norm=norm, names=_LFM3)


def _lara_mini(config: Any) -> Architecture:
    """Three kinds of layers; attention layers without a window have no rotary positions."""
    norm, attention = NormForm(config.rms_norm_eps), grouped(config, norm=normed_heads(config))
    feed = with_shared(config, of_qwen(config), config.shared_expert_intermediate_size, shared_name="shared_expert")
    spec, still = replace(attention.spec, window=config.sliding_window), RotaryTable.none(attention.head_dim)
    made = {
        LINEAR: Layer(delta(config), feed, names=("linear_attn", "mlp")),
        SLIDING: Layer(replace(attention, spec=spec), feed),
        FULL: Layer(replace(attention, rotary=still), feed),
    }
    return mixed(config, config.layer_types, made, norm=norm, names=_LARA)


def _zamba_of(
    config: Any, mamba: Mamba1Layer | Mamba2Layer, blocks: int, ranks: tuple[int, int], *, turning: bool, **more: Any
) -> Architecture:
    """Mamba layers; before some of them one of the shared blocks runs, cyclically."""
    norm, width = NormForm(config.rms_norm_eps), config.hidden_size
    rotary = rotary_of(config, config.head_dim) if turning else RotaryTable.none(config.head_dim)
    spec = AttentionSpec((config.head_dim / 2) ** -0.5)
    attention, feed = grouped(config, bias=False, spec=spec, rotary=rotary, reads=2 * width), gated(config, **more)
    refuse(attention.order() is not None or config.attention_hidden_size != 2 * width, "this rotary or attention size")
    numbers = [number for number, kind in enumerate(config.layers_block_type) if kind == _HYBRID]
    plain = Layer(mamba, None, ("input_layernorm", None, None, None), names=("mamba", ""))
    layers = [plain] * config.num_hidden_layers
    for which, number in enumerate(numbers):
        block = SharedBlock(which % blocks, attention, feed, norm, ranks)
        layers[number] = Layer(SharedLayer(block, mamba, which), None, (None,) * 4, names=(_HYBRID, ""))
    # The first layer with a block has its weights.
    names = [
        (rf"^model\.layers\.{number}\.shared_transf(?:ormer)?\.", f"model.shared.{block}.")
        for block, number in enumerate(numbers[:blocks])
    ]
    names += [(r"\.layers\.(\d+)\.(linear|mamba_decoder)\.", rf".layers.\1.{_HYBRID}.\2."), *FINAL]
    is_tied, names = bool(config.tie_word_embeddings), [*names, (r"\.dt_proj_bias$", ".dt_proj_weight_bias")]
    return Architecture(tuple(layers), config.vocab_size, width, norm, is_tied=is_tied, names=tuple(names))


def _zamba(config: Any) -> Architecture:
    require_silu(config.hidden_mamba_act)
    return _zamba_of(config, _mamba1_of(config, heads=config.n_mamba_heads), 1, (0, 0), turning=False, bias=False)


def _zamba2(config: Any) -> Architecture:
    bias, rank = bool(config.add_bias_linear), config.adapter_rank
    mamba = Mamba2Layer(
        config.n_mamba_heads, config.mamba_headdim, config.mamba_d_state, config.mamba_ngroups, config.mamba_d_conv,
        conv_bias=True, eps=1e-5, norm_groups=config.mamba_ngroups, limits=(config.time_step_min, float("inf")),
        bias=bias, out_bias=bias,
    )  # fmt: skip
    refuse(mamba.inner != int(config.mamba_expand * config.hidden_size), f"mamba_expand {config.mamba_expand}")
    ranks = (rank if config.use_shared_attention_adapter else 0, rank)
    turning = bool(config.use_mem_rope)
    return _zamba_of(config, mamba, config.num_mem_blocks, ranks, turning=turning, bias=bias, joined=True)


_FEED = (
    (r"\.feed_forward\.w1\.", ".feed_forward.gate_proj."),
    (r"\.feed_forward\.w3\.", ".feed_forward.up_proj."),
    (r"\.feed_forward\.w2\.", ".feed_forward.down_proj."),
)
LFM2_NAMES = ((r"(^|\.)embedding_norm\.", r"\1norm."), *_FEED, *W123)
_MAMBA = (
    (r"^(?:backbone|model)\.embeddings?\.", "model.embed_tokens."),
    (r"^backbone\.", "model."),
    (r"^model\.norm_f\.", "model.norm."),
    (r"\.mixer\.", ".block."),
    (r"\.experts\.up_proj$", ".experts.gate_up_proj"),
)
PRE_FF: Norms = ("input_layernorm", None, "pre_ff_layernorm", None)
FINAL = ((r"(^|\.)final_layernorm\.", r"\1norm."),)
_FALCON_H1 = ((r"\.(\d+)\.(mamba|self_attn)\.", r".\1.beside.\2."), *FINAL)
_GRANITE = (
    (r"\.shared_mlp\.input_linear\.", ".shared_mlp.gate_up_proj."),
    (r"\.shared_mlp\.output_linear\.", ".shared_mlp.down_proj."),
)
_FORGETS = (r"\.forget_gate\.", ".")
_BAILING = (
    (r"^model\.word_embeddings\.", "model.embed_tokens."),
    (r"\.attention\.", ".self_attn."),
    (r"\.self_attn\.dense\.", ".self_attn.o_proj."),
    (r"\.gate\.expert_bias$", ".gate.e_score_correction_bias"),
    _FORGETS,
)
_OLMO = (
    (r"\.linear_attn\.a_proj\.", ".linear_attn.f_proj."),
    (r"\.attention_layer_norm\.", ".input_layernorm."),
    (r"\.feedforward_layer_norm\.", ".post_attention_layernorm."),
)
_LARA = (
    (r"\.linear_attn\.out_norm\.", ".linear_attn.norm."),
    (r"\.linear_attn\.in_proj\.", ".linear_attn.in_proj_qkv|in_proj_z|in_proj_b|in_proj_a."),
)
_LFM3 = (
    *LFM2_NAMES,
    (r"\.self_attn\.gate_proj\.", ".self_attn.g_proj."),
    (r"\.operator_norm\.", f".{FOUR_NORMS[0]}."),
    (r"\.post_operator_norm\.", f".{FOUR_NORMS[1]}."),
    (r"\.ffn_norm\.", f".{FOUR_NORMS[2]}."),
    (r"\.post_ffn_norm\.", f".{FOUR_NORMS[3]}."),
)
# By model type.
HYBRIDS: dict[str, Callable[[Any], Architecture]] = {
    "bailing_hybrid": _bailing_hybrid,
    "bamba": _bamba,
    "falcon_h1": _falcon_h1,
    "falcon_mamba": _falcon_mamba,
    "granitemoehybrid": _granite_hybrid,
    "jamba": _jamba,
    "kimi_linear": _kimi_linear,
    "lara_mini": _lara_mini,
    "lfm2": _lfm2,
    "lfm2_moe": _lfm2_moe,
    "lfm3": _lfm3,
    "mamba": _mamba,
    "mamba2": _mamba2,
    "nemotron_h": _nemotron_h,
    "olmo_hybrid": _olmo_hybrid,
    "qwen3_5_moe_text": _qwen3_5_moe,
    "qwen3_5_text": _qwen3_5,
    "qwen3_next": _qwen3_next,
    "zamba": _zamba,
    "zamba2": _zamba2,
}
