"""Tiny configs of families whose layers keep a state: every kind of recurrence, alone and beside attention."""

from __future__ import annotations

from functools import partial
from typing import Any

import transformers
from transformers import PreTrainedConfig

from tests.zoo import END, VOCAB

_SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": END,
    "pad_token_id": None,
}
_LINEAR_FIRST = {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}
_DELTA = _LINEAR_FIRST | {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
}
_EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
_CONVOLUTIONS = {"layer_types": ["conv", "full_attention", "conv"]}
_MAMBA_2 = {
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_d_state": 8,
    "mamba_expand": 2,
    "mamba_n_groups": 2,
    "mamba_d_conv": 4,
    "mamba_chunk_size": 8,
}
_KIMI = _LINEAR_FIRST | {
    "num_key_value_heads": 4,
    "linear_num_heads": 2,
    "linear_head_dim": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_group": 1,
    "topk_group": 1,
}


def _named(name: str, **fields: Any) -> PreTrainedConfig:
    config: PreTrainedConfig = getattr(transformers, f"{name}Config")(**_SIZES | fields)
    return config


# Classes by name: older versions of transformers have not all of them.
_FAMILIES: dict[str, partial[PreTrainedConfig]] = {
    "qwen3-next": partial(_named, "Qwen3Next", **_DELTA, **_EXPERTS, head_dim=8),
    "qwen3.5": partial(_named, "Qwen3_5Text", **_DELTA, head_dim=8),
    "qwen3.5-moe": partial(_named, "Qwen3_5MoeText", **_DELTA, **_EXPERTS, head_dim=8),
    "olmo-hybrid": partial(_named, "OlmoHybrid", **_DELTA),
    "lfm2": partial(_named, "Lfm2", **_CONVOLUTIONS),
    "lfm2-moe": partial(_named, "Lfm2Moe", **_CONVOLUTIONS, **_EXPERTS, num_dense_layers=1),
    "lfm3": partial(_named, "Lfm3", **_CONVOLUTIONS, head_dim=8),
    "mamba": partial(_named, "Mamba", state_size=8, time_step_rank=16),
    "falcon-mamba": partial(_named, "FalconMamba", state_size=8, time_step_rank=16),
    "mamba-2": partial(
        _named, "Mamba2", num_heads=8, head_dim=8, state_size=8, n_groups=2, chunk_size=8, expand=2, conv_kernel=4
    ),
    "jamba": partial(
        _named,
        "Jamba",
        attn_layer_period=3,
        attn_layer_offset=1,
        expert_layer_period=2,
        expert_layer_offset=1,
        num_experts=4,
        num_experts_per_tok=2,
        mamba_d_state=8,
        mamba_dt_rank=16,
    ),
    "bamba": partial(_named, "Bamba", attn_layer_indices=[1], **_MAMBA_2),
    "granite-4": partial(
        _named,
        "GraniteMoeHybrid",
        layer_types=["mamba", "attention", "mamba"],
        num_local_experts=4,
        num_experts_per_tok=2,
        shared_intermediate_size=16,
        **_MAMBA_2,
    ),
    "nemotron-h": partial(
        _named,
        "NemotronH",
        layers_block_type=["mamba", "moe", "attention", "mamba"],
        num_hidden_layers=4,
        head_dim=8,
        mamba_num_heads=8,
        mamba_head_dim=8,
        ssm_state_size=8,
        n_groups=2,
        chunk_size=8,
        conv_kernel=4,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        moe_shared_expert_intermediate_size=16,
        n_group=1,
        topk_group=1,
    ),
    "falcon-h1": partial(_named, "FalconH1", head_dim=8, mamba_d_ssm=64, mamba_rms_norm=True, **_MAMBA_2),
    "falcon-h1-gated": partial(_named, "FalconH1", head_dim=8, mamba_d_ssm=64, mamba_rms_norm=False, **_MAMBA_2),
    "zamba": partial(
        _named,
        "Zamba",
        num_hidden_layers=5,
        attn_layer_period=2,
        attn_layer_offset=1,
        num_key_value_heads=4,
        mamba_d_state=8,
        mamba_dt_rank=4,
        n_mamba_heads=2,
        attention_hidden_size=64,
        attention_head_dim=16,
    ),
    "zamba-2": partial(
        _named,
        "Zamba2",
        num_hidden_layers=5,
        layers_block_type=["mamba", "hybrid", "mamba", "hybrid", "mamba"],
        hybrid_layer_ids=[1, 3],
        num_key_value_heads=4,
        mamba_d_state=8,
        n_mamba_heads=8,
        mamba_headdim=8,
        mamba_ngroups=2,
        chunk_size=8,
        num_mem_blocks=1,
        use_mem_rope=True,
        adapter_rank=4,
    ),
    "kimi-linear": partial(_named, "KimiLinear", **_KIMI),
    "bailing-hybrid": partial(_named, "BailingHybrid", **_KIMI),
}
NAMES = tuple(name for name, make in _FAMILIES.items() if hasattr(transformers, f"{make.args[0]}Config"))


def hybrid(name: str) -> PreTrainedConfig:
    """The config of a family."""
    return _FAMILIES[name]()
