"""Further families with layers that keep a state: Kimi Delta Attention, OLMo hybrid, LFM 3, Zamba (see `table.py`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from engine.attention.spec import AttentionSpec
from engine.model.decoder.architecture import (
    FOUR_NORMS,
    NORMS_AFTER,
    Architecture,
    HeadGate,
    HeadNorm,
    Layer,
    NormForm,
)
from engine.model.decoder.families.builders import FULL, SLIDING, gated, grouped, refuse, rotary_of
from engine.model.decoder.families.hybrid import FINAL, LFM2_NAMES, LINEAR, delta, mixed, require_silu
from engine.model.decoder.families.mixtures import BLOCK, W123, after_dense, latent, of_deepseek, with_experts
from engine.model.decoder.feed_forward import GatedFeed
from engine.model.decoder.latent import LatentLayer
from engine.model.decoder.rotary import RotaryTable
from engine.model.decoder.states.layers import ConvLayer, Convolution, DeltaLayer, Mamba1Layer, Mamba2Layer
from engine.model.decoder.states.shared import SharedBlock, SharedLayer

_HYBRID = "hybrid"  # as configs call layers with a shared block


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
    """Nothing turns."""
    attention = latent(config, interleaved=False, turns=False)
    return _of_kimi(config, attention, (BLOCK, *W123, _FORGETS), rank=config.linear_head_dim)


def _bailing_hybrid(config: Any) -> Architecture:
    """What heads of attention give is gated."""
    refuse(config.attention_bias, "attention_bias")  # the gates' product has none
    attention = latent(config, interleaved=True, gated=True)
    return _of_kimi(config, attention, _BAILING, least=config.kda_lower_bound if config.kda_safe_gate else None)


def _olmo_hybrid(config: Any) -> Architecture:
    """Norms of layers with a state are before them, and those of attention's after it."""
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
    """LFM 2 with windows, gates of heads, and norms of results."""
    norm, feed, names = NormForm(config.norm_eps), GatedFeed(config.intermediate_size, "silu"), ("conv", "feed_forward")
    norms = FOUR_NORMS if config.use_sandwich_norm else (FOUR_NORMS[0], None, FOUR_NORMS[2], None)
    conv = Convolution(config.hidden_size, config.conv_L_cache, bool(config.conv_bias), "conv")
    made = {"conv": Layer(ConvLayer(config.hidden_size, conv), feed, norms, names=names)}
    gate = HeadGate("g_proj", by_head=True) if config.use_attention_gate else None
    refuse(gate is not None and config.attention_bias, "attention_bias with gates")  # the gates' product has none
    for kind, window in ((FULL, None), (SLIDING, config.sliding_window)):
        if kind in config.layer_types:
            rope = {"max_position_embeddings": config.max_position_embeddings} | config.rope_parameters[kind]
            spec, rotary = AttentionSpec(config.head_dim**-0.5, window), RotaryTable.of(rope, config.head_dim)
            attention = grouped(config, norm=HeadNorm(norm), spec=spec, rotary=rotary, gate=gate)
            made[kind] = Layer(attention, feed, norms, names=("self_attn", "feed_forward"))
    return mixed(config, config.layer_types, made, norm=norm, names=_LFM3)


def _zamba_of(
    config: Any, mamba: Mamba1Layer | Mamba2Layer, blocks: int, ranks: tuple[int, int], *, turning: bool, **more: Any
) -> Architecture:
    """Layers of Mamba, before some of which one of the blocks runs, each in its turn."""
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
    # The first layer that has a block has its weights.
    names = [
        (rf"^model\.layers\.{number}\.shared_transf(?:ormer)?\.", f"model.shared.{block}.")
        for block, number in enumerate(numbers[:blocks])
    ]
    names += [(r"\.layers\.(\d+)\.(linear|mamba_decoder)\.", rf".layers.\1.{_HYBRID}.\2."), *FINAL]
    is_tied, names = bool(config.tie_word_embeddings), [*names, (r"\.dt_proj_bias$", ".dt_proj_weight_bias")]
    return Architecture(tuple(layers), config.vocab_size, width, norm, is_tied=is_tied, names=tuple(names))


def _zamba(config: Any) -> Architecture:
    require_silu(config.hidden_mamba_act)
    mamba = Mamba1Layer(
        config.mamba_expand * config.hidden_size, config.mamba_d_state, config.mamba_dt_rank, config.mamba_d_conv,
        bool(config.mamba_conv_bias), bool(config.mamba_proj_bias), heads=config.n_mamba_heads,
    )  # fmt: skip
    return _zamba_of(config, mamba, 1, (0, 0), turning=False, bias=False)


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
_LFM3 = (
    *LFM2_NAMES,
    (r"\.self_attn\.gate_proj\.", ".self_attn.g_proj."),
    (r"\.operator_norm\.", f".{FOUR_NORMS[0]}."),
    (r"\.post_operator_norm\.", f".{FOUR_NORMS[1]}."),
    (r"\.ffn_norm\.", f".{FOUR_NORMS[2]}."),
    (r"\.post_ffn_norm\.", f".{FOUR_NORMS[3]}."),
)
# By model type.
STATES: dict[str, Callable[[Any], Architecture]] = {
    "bailing_hybrid": _bailing_hybrid,
    "kimi_linear": _kimi_linear,
    "lfm3": _lfm3,
    "olmo_hybrid": _olmo_hybrid,
    "zamba": _zamba,
    "zamba2": _zamba2,
}
