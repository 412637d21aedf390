"""The families of GGUF files whose layers are not all attention, by llama.cpp's names."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from engine.model.gguf.keys import Keys
from engine.model.gguf.mixtures import EXPERTS, OF_SHARED_GATE, SHARED_EXPERT, qwen2_moe
from engine.model.gguf.names import NORMS_OF_HEADS, GGUFFamily
from engine.model.gguf.ropes import partly, rope_of

_LFM2 = {
    "attn_norm": "operator_norm",
    "attn_output": "self_attn.out_proj",
    "attn_q_norm": "self_attn.q_layernorm",
    "attn_k_norm": "self_attn.k_layernorm",
    "ffn_norm": "ffn_norm",
    "ffn_gate": "feed_forward.w1",
    "ffn_up": "feed_forward.w3",
    "ffn_down": "feed_forward.w2",
    "shortconv.conv": "conv.conv",
    "shortconv.in_proj": "conv.in_proj",
    "shortconv.out_proj": "conv.out_proj",
}
_QWEN3_NEXT = {
    "post_attention_norm": "post_attention_layernorm",
    "attn_qkv": "linear_attn.in_proj_qkvz",
    "attn_gate": "linear_attn.in_proj_qkvz",
    "ssm_in": "linear_attn.in_proj_qkvz",  # of older files, in the model's order
    "ssm_ba": "linear_attn.in_proj_ba",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_dt.bias": "linear_attn.dt_bias",
    "ssm_a": "linear_attn.A_log",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}


def _lfm2(keys: Keys) -> dict[str, Any]:
    kinds = ["full_attention" if heads else "conv" for heads in keys.of_layers("attention.head_count_kv")]
    eps, width = keys.epsilon("attention.layer_norm_rms_epsilon"), keys.size("shortconv.l_cache")
    return {"layer_types": kinds, "norm_eps": eps, "conv_L_cache": width, "block_auto_adjust_ff_dim": False}


def _channels(stored: Tensor) -> Tensor:
    """A convolution of single channels, which a file holds as a matrix."""
    return stored.unsqueeze(1)


def _qwen3_next(keys: Keys) -> dict[str, Any]:
    values, key_heads, inner = (keys.size(f"ssm.{key}") for key in ("time_step_rank", "group_count", "inner_size"))
    if values % key_heads or inner % values:
        raise keys.fault("ssm.time_step_rank", values, f"a multiple of {key_heads} groups that divides {inner}")
    return qwen2_moe(keys) | {
        "norm_topk_prob": True,
        "linear_conv_kernel_dim": keys.size("ssm.conv_kernel"),
        "linear_key_head_dim": keys.size("ssm.state_size"),
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": values,
        "linear_value_head_dim": inner // values,
        "full_attention_interval": keys.integer("full_attention_interval", 4),
        "rope_parameters": partly(keys, rope_of(keys)),
    }


def _by_key_heads(keys: Keys, count: int) -> Tensor:
    """Rows of a file, all gates, then all queries, keys and values -> for each key head, query, key, values, gates."""
    heads, keys_size = keys.need("ssm.group_count"), keys.need("ssm.group_count") * keys.need("ssm.state_size")
    sizes = [keys.need("ssm.inner_size"), keys_size, keys_size, keys.need("ssm.inner_size")]
    gate, *others = torch.arange(count).split(sizes)
    return torch.cat([part.view(heads, -1) for part in (*others, gate)], 1).reshape(-1)


def _decay(stored: Tensor) -> Tensor:
    """The logarithm of a decay, which a file holds as the decay, less than 0."""
    return stored.float().neg().log()


def _as_it_is(stored: Tensor) -> Tensor:
    return stored


HYBRIDS = {
    "lfm2": GGUFFamily(
        "lfm2",
        _lfm2,
        names=_LFM2,
        outer=dict.fromkeys(("token_embd_norm", "output_norm"), "model.embedding_norm"),
        undo={"shortconv.conv": _channels},
    ),
    "qwen3next": GGUFFamily(
        "qwen3_next",
        _qwen3_next,
        names=EXPERTS | SHARED_EXPERT | NORMS_OF_HEADS | _QWEN3_NEXT,
        undo=OF_SHARED_GATE | {"ssm_conv1d": _channels, "ssm_a": _decay, "ssm_norm": _as_it_is},
        order={"attn_gate": _by_key_heads},
        norms_plus_one=True,
    ),
}
