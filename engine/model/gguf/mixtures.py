"""The families of mixtures of experts that are read from GGUF files, by llama.cpp's names."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from engine.model.gguf.keys import Keys
from engine.model.gguf.names import NORMS_OF_HEADS, GGUFFamily, scales_of
from engine.model.gguf.ropes import partly, rope_of

EXPERTS = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps.weight": "mlp.experts.gate_up_proj",
    "ffn_up_exps.weight": "mlp.experts.gate_up_proj",
    "ffn_down_exps.weight": "mlp.experts.down_proj",
}
SHARED_EXPERT = {
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
_GPT_OSS = {
    "post_attention_norm": "post_attention_layernorm",
    "attn_sinks.weight": "self_attn.sinks",
    "ffn_gate_inp": "mlp.router",
    "ffn_gate_exps.bias": "mlp.experts.gate_up_proj_bias",
    "ffn_up_exps.bias": "mlp.experts.gate_up_proj_bias",
    "ffn_down_exps.bias": "mlp.experts.down_proj_bias",
}
_GLM4 = {
    "post_attention_norm": "post_attention_layernorm",
    "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
}
_GRANITE = {name: place.replace("mlp.", "block_sparse_moe.") for name, place in EXPERTS.items()} | {
    "ffn_gate_inp": "block_sparse_moe.router"
}


def _mixture(keys: Keys) -> dict[str, Any]:
    """Numbers of experts; Mixtral and gpt-oss call them `num_local_experts`."""
    count = keys.size("expert_count")
    used = keys.need("expert_used_count", most=count)
    return {"num_experts": count, "num_local_experts": count, "num_experts_per_tok": used}


def qwen2_moe(keys: Keys) -> dict[str, Any]:
    """Experts, one of which all tokens share."""
    width, shared = keys.size("expert_feed_forward_length"), keys.integer("expert_shared_feed_forward_length")
    sizes = {"moe_intermediate_size": width, "shared_expert_intermediate_size": shared}
    return _mixture(keys) | sizes | {"norm_topk_prob": False}


def _qwen3_moe(keys: Keys) -> dict[str, Any]:
    return _mixture(keys) | {"moe_intermediate_size": keys.size("expert_feed_forward_length"), "norm_topk_prob": True}


def _gpt_oss(keys: Keys) -> dict[str, Any]:
    rope = rope_of(keys)
    exact = {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": False} if rope["rope_type"] == "yarn" else {}
    width, window = keys.size("expert_feed_forward_length"), keys.need("attention.sliding_window")
    fields = {"intermediate_size": width, "sliding_window": window, "rope_parameters": rope | exact}
    return _mixture(keys) | fields


def _glm4_moe(keys: Keys) -> dict[str, Any]:
    return {
        "n_routed_experts": keys.size("expert_count"),
        "num_experts_per_tok": keys.need("expert_used_count", most=keys.size("expert_count")),
        "n_shared_experts": keys.size("expert_shared_count"),
        "moe_intermediate_size": keys.size("expert_feed_forward_length"),
        "first_k_dense_replace": keys.need("leading_dense_block_count", least=0, most=keys.layers),
        "routed_scaling_factor": keys.real("expert_weights_scale", 1.0),
        "norm_topk_prob": keys.flag("expert_weights_norm", default=True),
        "attention_bias": keys.has("blk.0.attn_q.bias"),
        "use_qk_norm": keys.has("blk.0.attn_q_norm.weight"),
        "rope_parameters": partly(keys, rope_of(keys)),
    }


def _granite_moe(keys: Keys) -> dict[str, Any]:
    return _mixture(keys) | scales_of(keys)


def _olmoe(keys: Keys) -> dict[str, Any]:
    keys.refuse("attention.clamp_kqv", "clipped queries, keys and values are not read")
    return _mixture(keys) | {"norm_topk_prob": False}


def _row(stored: Tensor) -> Tensor:
    """A matrix of one row, which a file holds as a vector."""
    return stored.reshape(1, -1)


OF_SHARED_GATE = {"ffn_gate_inp_shexp": _row}
# With the metadata `expert_count`; llama is Mixtral.
MIXTURES = {
    "glm4moe": GGUFFamily("glm4_moe", _glm4_moe, names=EXPERTS | NORMS_OF_HEADS | _GLM4),
    "gpt-oss": GGUFFamily("gpt_oss", _gpt_oss, names=EXPERTS | _GPT_OSS, pairs_experts=True),
    "granitemoe": GGUFFamily("granitemoe", _granite_moe, names=_GRANITE, permuted=True),
    "llama": GGUFFamily("mixtral", _mixture, names=EXPERTS, permuted=True),
    "olmoe": GGUFFamily("olmoe", _olmoe, names=EXPERTS | NORMS_OF_HEADS),
    "qwen2moe": GGUFFamily("qwen2_moe", qwen2_moe, names=EXPERTS | SHARED_EXPERT, undo=OF_SHARED_GATE),
    "qwen3moe": GGUFFamily("qwen3_moe", _qwen3_moe, names=EXPERTS | NORMS_OF_HEADS),
}
