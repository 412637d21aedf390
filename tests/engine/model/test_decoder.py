"""Every family of the table computes what transformers' own module does, in ragged passes and in parts."""

from __future__ import annotations

import copy
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from pilotfish.engine.attention import choose
from pilotfish.engine.kernels import faults, reference
from pilotfish.engine.kv.arena import KVArena
from pilotfish.engine.kv.batch import Feed
from pilotfish.engine.model.adapters.store import find_place
from pilotfish.engine.model.decoder.decoder import DecoderModel
from pilotfish.engine.model.decoder.experts import MixtureMLP
from pilotfish.engine.model.decoder.families.table import FAMILIES, architecture_for
from pilotfish.engine.model.decoder.load import load_decoder
from pilotfish.engine.model.decoder.ops import LayerOps
from pilotfish.engine.model.decoder.stack import FINAL, Tap
from pilotfish.engine.model.linear.rounding import round_weight
from pilotfish.engine.model.runner import ModelRunner, layout_of_model
from pilotfish.engine.model.unbatched import plain_logits
from pilotfish.engine.proposers.model import first_layers
from pilotfish.engine.recurrent.arena import StateArena
from pilotfish.engine.types import EMPTY_STATE, StateSpan
from tests import zoo
from tests.classes import tiny

CPU = torch.device("cpu")
_FIRST, _SECOND = [(7 * i + 3) % zoo.VOCAB for i in range(30)], [(5 * i + 11) % zoo.VOCAB for i in range(17)]
_WINDOWS = {"sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"]}
_PARTLY = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}}
_GROWING = {
    "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16,
    "llama_4_scaling_beta": 0.3,
}  # fmt: skip
_FACTORS = {
    "embedding_multiplier": 3.0, "logits_scaling": 2.0, "residual_multiplier": 0.4, "attention_multiplier": 0.2,
}  # fmt: skip
_SIX = {"num_experts_per_tok": 2, "moe_intermediate_size": 48}  # of six experts, which no vector is as long as
_GROUPS = _SIX | {
    "n_routed_experts": 6, "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 3, "topk_group": 2,
}  # fmt: skip
_LATENTS = {
    "q_lora_rank": 24, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12,
    "num_key_value_heads": 4,
}  # fmt: skip
_YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
_YARN_OF_LATENTS = {"rope_parameters": _YARN | {"mscale": 0.8, "mscale_all_dim": 0.6}}
_DIRECT = {"q_lora_rank": None, "norm_topk_prob": False, "rope_interleave": False}
_MAMBA_2 = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 2, "mamba_d_ssm": 128}
_MIXED = {"layer_types": ["linear_attention", "full_attention"]}
_FALCON = {
    "mlp_multipliers": [0.7, 1.3], "ssm_multipliers": [0.6, 0.8, 1.2, 1.4, 0.9], "ssm_in_multiplier": 0.8,
    "ssm_out_multiplier": 0.9, "attention_in_multiplier": 0.7, "attention_out_multiplier": 1.2, "key_multiplier": 0.6,
    "embedding_multiplier": 1.5, "lm_head_multiplier": 0.5,
}  # fmt: skip
_DELTA = _MIXED | {
    "head_dim": 16, "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
}  # fmt: skip
_NEMOTRON = {
    "mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 16, "n_groups": 2, "head_dim": 16,
    "hybrid_override_pattern": "ME*E", "n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 48,
    "moe_shared_expert_intermediate_size": 80,
}  # fmt: skip
_AFMOE = _SIX | _WINDOWS | {"num_experts": 6, "num_dense_layers": 1, "num_shared_experts": 2, "head_dim": 16}
_SHARED = _SIX | {"num_experts": 6, "shared_expert_intermediate_size": 32, "head_dim": 16}
_LONG = {
    "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0 + i / 8 for i in range(8)],
    "long_factor": [2.0] * 8, "short_mscale": 1.1, "long_mscale": 1.1, "original_max_position_embeddings": 64,
}  # fmt: skip
_IMAGES = zoo.COMMON | {"hidden_size": 64, "num_hidden_layers": 4, "cross_attention_layers": [1, 3], "pad_token_id": 0}
_XGLM = {"d_model": 64, "num_layers": 2, "attention_heads": 4, "ffn_dim": 80}
_DBRX = {
    "d_model": 64, "n_heads": 4, "n_layers": 2, "max_seq_len": 128,
    "attn_config": {"kv_n_heads": 2, "clip_qkv": 0.7, "rope_theta": 1e4},
    "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 6, "moe_top_k": 2},
}  # fmt: skip
_KIMI = {"num_hidden_layers": 2, "num_local_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 48} | _MIXED
_OLMO = _MIXED | {"linear_key_head_dim": 16, "linear_value_head_dim": 32}
_LFM3 = {"head_dim": 16, "num_hidden_layers": 3, "sliding_window": 9, "layer_types": ["conv", "full_attention"]}
_LFM3 |= {"layer_types": ["conv", "full_attention", "sliding_attention"], "conv_L_cache": 4}
_ZAMBA = {"num_hidden_layers": 3, "layers_block_type": ["linear_attention", "hybrid", "hybrid"]}
_ZAMBA |= {"hidden_size": 32, "mamba_d_state": 16, "num_key_value_heads": 4}
_GEMMA = _WINDOWS | {
    "num_hidden_layers": 4, "layer_types": _WINDOWS["layer_types"] * 2, "num_kv_shared_layers": 2, "head_dim": 16,
    "global_head_dim": 32, "hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": zoo.VOCAB,
}  # fmt: skip
_BESIDE = _SIX | _WINDOWS | {
    "head_dim": 16, "global_head_dim": 32, "num_experts": 6, "top_k_experts": 2, "enable_moe_block": True,
}  # fmt: skip
_GPT = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128, "n_inner": 80}
_BIASES = {"attention_bias": True, "mlp_bias": True}
_ROPE = {"rope_type": "default", "rope_theta": 1e4}
# By model type: what a config has beside the common sizes, for each of several models.
CASES: dict[str, list[dict[str, Any]]] = {
    "afmoe": [_AFMOE, _AFMOE | {"mup_enabled": True, "head_dim": 8, "num_dense_layers": 0}],
    "apertus": [{}, {"attention_bias": True}],
    "apertus1p5_text": [{}],
    "arcee": [{}, _BIASES],
    "aria_text": [{"moe_num_experts": 6, "mlp_bias": True}],
    "axk1": [_GROUPS | _LATENTS],
    "bailing_hybrid": [
        _KIMI | _LATENTS | {"q_lora_rank": None, "head_dim": 16, "n_group": 3, "topk_group": 2},
        _KIMI | _LATENTS | {"head_dim": 16, "n_group": 1, "topk_group": 1, "kda_safe_gate": False},
    ],
    "bamba": [_MAMBA_2 | {"attn_layer_indices": [1]}],
    "biogpt": [{}, {"scale_embedding": False}],
    "bitnet": [{}],
    "codegen": [_GPT | {"rotary_dim": 8}],
    "cohere": [{}, {"use_qk_norm": True}],
    "cohere2": [_WINDOWS],
    "cohere2_moe": [
        _WINDOWS | {"head_dim": 16, "num_experts": 6, "num_shared_experts": 2, "intermediate_size": 48},
        _WINDOWS
        | {
            "head_dim": 16,
            "num_experts": 6,
            "expert_selection_fn": "sigmoid",
            "mlp_layer_types": ["sparse", "dense"],
            "prefix_dense_intermediate_size": 80,
            "rms_norm_eps": 1e-5,
            "norm_topk_prob": False,
        },
    ],
    "cohere_compass_text": [_WINDOWS | {"rope_parameters": {"sliding_attention": _ROPE, "full_attention": None}}],
    "ctrl": [_GPT | {"dff": 80}],
    "cwm": [_WINDOWS],
    "dbrx": [_DBRX],
    "deepseek_v2": [
        _GROUPS | _LATENTS | {"topk_method": "group_limited_greedy", "q_lora_rank": None, "n_shared_experts": 2},
        _GROUPS | _LATENTS | {"topk_method": "greedy", "routed_scaling_factor": 2.0} | _YARN_OF_LATENTS,
    ],
    "deepseek_v3": [
        _GROUPS | _LATENTS | {"attention_bias": True},
        _GROUPS | _LATENTS | _DIRECT | _YARN_OF_LATENTS,
    ],
    "dots1": [_GROUPS | {"head_dim": 16, "n_group": 1, "topk_group": 1, "norm_topk_prob": True}],
    "ernie4_5": [{"head_dim": 16}, {"use_bias": True}],
    "ernie4_5_moe": [
        {"moe_num_experts": 6, "moe_k": 2, "moe_intermediate_size": 48, "moe_num_shared_experts": 2},
        {"moe_num_experts": 6, "moe_k": 3, "moe_intermediate_size": 48, "moe_num_shared_experts": 0, "use_bias": True},
    ],
    "exaone": [{}],
    "exaone4": [_WINDOWS, {"sliding_window": None, "layer_types": ["full_attention"] * 2}],
    "exaone_moe": [
        _SIX | _WINDOWS | {"head_dim": 16, "num_experts": 6, "mlp_layer_types": ["sparse", "dense"], "n_group": 2},
    ],
    "falcon": [
        {"new_decoder_architecture": True, "num_kv_heads": 2},
        {"new_decoder_architecture": True, "num_kv_heads": 4, "num_ln_in_parallel_attn": 1, "bias": True},
        {"multi_query": True},
        {"multi_query": False, "parallel_attn": False},
    ],
    "falcon_h1": [
        _MAMBA_2 | _FALCON | {"head_dim": 8},
        _MAMBA_2
        | {"mamba_rms_norm": True, "mamba_norm_before_gate": True, "projectors_bias": True, "mamba_proj_bias": True},
        _MAMBA_2 | {"mamba_rms_norm": True, "mamba_norm_before_gate": False},
    ],
    "falcon_mamba": [{"state_size": 16, "time_step_rank": 16}],
    "flex_olmo": [{"num_experts": 6, "num_experts_per_tok": 2}],
    "flint": [_SHARED | _WINDOWS | {"mlp_only_layers": [0]}, _SHARED | _WINDOWS | {"mlp_only_layers": []}],
    "gemma": [{"head_dim": 16}],
    "gemma2": [{"head_dim": 16, "query_pre_attn_scalar": 7} | _WINDOWS],
    "gemma3_text": [{"head_dim": 16, "query_pre_attn_scalar": 7} | _WINDOWS],
    "gemma3n_text": [
        _GEMMA
        | {"laurel_rank": 16, "altup_num_inputs": 3, "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.3]}
        | {"intermediate_size": [80, 64, 80, 48]},
    ],
    "gemma4_text": [
        _BESIDE | {"hidden_size_per_layer_input": 0, "attention_bias": True, "final_logit_softcapping": 5.0},
        _GEMMA | {"attention_k_eq_v": True, "num_global_key_value_heads": 1, "use_double_wide_mlp": True},
        _BESIDE | {"hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": zoo.VOCAB, "top_k_experts": 3},
    ],
    "gemma4_unified_text": [_GEMMA | {"attention_k_eq_v": True, "num_global_key_value_heads": 1}],
    "glm": [{"head_dim": 16}, {"head_dim": 8, "attention_bias": False} | _PARTLY],
    "glm4": [{"head_dim": 16} | _PARTLY],
    "glm4_moe": [_GROUPS | {"head_dim": 16, "use_qk_norm": True}, _GROUPS | {"head_dim": 16, "attention_bias": True}],
    "glm4_moe_lite": [_GROUPS | _LATENTS],
    "gpt2": [_GPT, _GPT | {"scale_attn_by_inverse_layer_idx": True}],
    "gpt_bigcode": [_GPT, _GPT | {"multi_query": False}],
    "gpt_neo": [{"attention_types": [[["global", "local"], 1]], "num_layers": 2, "num_heads": 4, "window_size": 9}],
    "gpt_neox": [{}, {"use_parallel_residual": False, "attention_bias": False} | _PARTLY],
    "gpt_oss": [_WINDOWS | {"head_dim": 16, "num_local_experts": 6, "num_experts_per_tok": 2, "swiglu_limit": 0.5}],
    "gptj": [_GPT | {"rotary_dim": 8}],
    "granite": [_FACTORS, {"attention_bias": True, "mlp_bias": True}],
    "granite_swa": [_FACTORS | _WINDOWS | {"layer_rope_theta": [0, 500.0]}],
    "granitemoe": [_FACTORS | {"num_local_experts": 6, "num_experts_per_tok": 2}],
    "granitemoe_swa": [
        _FACTORS | _WINDOWS | {"num_local_experts": 6, "shared_intermediate_size": 32, "layer_rope_theta": [0, 500.0]},
    ],
    "granitemoehybrid": [
        _MAMBA_2
        | _FACTORS
        | _MIXED
        | {"num_local_experts": 6, "num_experts_per_tok": 2, "shared_intermediate_size": 96},
        _MAMBA_2 | _FACTORS | _MIXED | {"num_local_experts": 0, "shared_intermediate_size": 96},
        _MAMBA_2 | _MIXED | {"num_local_experts": 0, "position_embedding_type": "rope", "attention_bias": True},
    ],
    "granitemoeshared": [
        {"num_local_experts": 6, "num_experts_per_tok": 2, "shared_intermediate_size": 32},
        {"num_local_experts": 6, "num_experts_per_tok": 2, "shared_intermediate_size": 0},
    ],
    "helium": [{"head_dim": 16}],
    "hunyuan_v1_dense": [
        {"head_dim": 16},
        {"head_dim": 8, "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "alpha": 100.0, "factor": 1.0}},
    ],
    "hunyuan_v1_moe": [{"head_dim": 16, "num_experts": 6, "moe_topk": 2}],
    "hy_v3": [_SIX | {"num_experts": 6, "head_dim": 16, "mlp_bias": True}],
    "hyperclovax": [_FACTORS, {"use_post_norm": False}],
    "internlm3": [{}],
    "iquestcoder": [{}],
    "jais2": [{}],
    "jamba": [
        {
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "num_experts": 6,
            "mamba_d_state": 16,
            "mamba_dt_rank": 16,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
        },
        {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 1, "mamba_d_state": 16, "mamba_dt_rank": 16},
    ],
    "kolibri1": [_SHARED | _WINDOWS],
    "laguna": [
        _SHARED | _WINDOWS | {"num_attention_heads_per_layer": [4, 8], "moe_router_logit_softcapping": 0.7},
        _SHARED
        | _WINDOWS
        | {"gating": "per-element", "moe_routed_scaling_factor": 2.0, "mlp_layer_types": ["sparse"] * 2},
    ],
    "lara_mini": [
        _DELTA | _SHARED | {"layer_types": ["linear_attention", "sliding_attention"], "sliding_window": 9},
        _DELTA | _SHARED | _MIXED | {"norm_topk_prob": False},
    ],
    "lfm2": [
        {"full_attn_idxs": [1], "block_ff_dim": 120, "block_multiple_of": 16},
        {"layer_types": ["full_attention", "conv"], "block_auto_adjust_ff_dim": False, "conv_bias": True},
    ],
    "lfm2_moe": [
        _SIX | {"num_experts": 6, "num_dense_layers": 1, "layer_types": ["full_attention", "conv"]},
        _SIX
        | {
            "num_experts": 6,
            "num_dense_layers": 0,
            "layer_types": ["conv", "full_attention"],
            "use_expert_bias": False,
            "norm_topk_prob": False,
            "routed_scaling_factor": 2.0,
        },
    ],
    "kimi_linear": [
        _KIMI | _LATENTS | {"q_lora_rank": None, "linear_head_dim": 16, "linear_num_heads": 4},
        _KIMI | _LATENTS | {"linear_head_dim": 16, "linear_num_heads": 2, "mlp_layer_types": ["sparse", "dense"]},
    ],
    "lfm3": [_LFM3, _LFM3 | {"use_sandwich_norm": False, "use_attention_gate": False, "attention_bias": True}],
    "llama": [{}, {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}],
    "llama4_text": [
        zoo.LLAMA_4,
        zoo.LLAMA_4 | {"use_qk_norm": False, "num_experts_per_tok": 2, "attention_bias": True},
    ],
    "mamba": [{"state_size": 16, "use_bias": True}],
    "mamba2": [{"num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 2, "time_step_limit": [0.5, 1.0]}],
    "mellum": [_SIX | _WINDOWS | {"num_experts": 6, "head_dim": 16, "mlp_layer_types": ["sparse", "dense"]}],
    "minicpm3": [_LATENTS | {"scale_emb": 3, "scale_depth": 1.4, "dim_model_base": 16}],
    "minimax_m2": [_PARTLY | {"head_dim": 8, "num_local_experts": 6, "num_experts_per_tok": 2}],
    "ministral": [{"head_dim": 8} | _WINDOWS | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}],
    "ministral3": [{"head_dim": 8, "rope_parameters": _GROWING}],
    "mistral": [{"sliding_window": 9}],
    "mixtral": [{"num_local_experts": 6, "num_experts_per_tok": 2, "sliding_window": 9}],
    "mllama": [{"text_config": _IMAGES}],
    "nanochat": [{}],
    "nemotron": [{}, _BIASES | _PARTLY],
    "nemotron_h": [
        {
            "mamba_num_heads": 8,
            "mamba_head_dim": 16,
            "ssm_state_size": 16,
            "n_groups": 2,
            "head_dim": 16,
            "hybrid_override_pattern": "M*-M",
            "time_step_min": 0.3,
            "mlp_bias": True,
            "use_bias": True,
        },
        _NEMOTRON | {"mlp_bias": True},
        _NEMOTRON | {"moe_latent_size": 32, "n_group": 3, "topk_group": 2, "routed_scaling_factor": 2.0},
    ],
    "olmo": [{}, {"clip_qkv": 0.5}],
    "olmo2": [{}],
    "olmo3": [_WINDOWS],
    "olmo_hybrid": [_OLMO, _OLMO | {"linear_allow_neg_eigval": False, "rope_parameters": None, "attention_bias": True}],
    "olmoe": [
        {"num_experts": 6, "num_experts_per_tok": 2},
        {"num_experts": 6, "num_experts_per_tok": 3, "norm_topk_prob": True},
    ],
    "openai-gpt": [_GPT | {"n_inner": 256}],
    "opt": [
        {"ffn_dim": 80, "word_embed_proj_dim": 64},
        {"ffn_dim": 80, "word_embed_proj_dim": 32, "do_layer_norm_before": False, "enable_bias": False},
        {"ffn_dim": 80, "word_embed_proj_dim": 64, "layer_norm_elementwise_affine": False},
    ],
    "persimmon": [{}, {"qk_layernorm": False}],
    "phi": [_PARTLY, _PARTLY | {"qk_layernorm": True, "num_key_value_heads": 4}],
    "phi3": [{"sliding_window": 20}, _PARTLY],
    "phi4_multimodal": [dict(vars(tiny("phi4_multimodal"))) | {"pad_token_id": 0}],
    "phimoe": [
        {"num_local_experts": 6, "router_jitter_noise": 0.05},
        {"num_local_experts": 6, "attention_bias": True, "lm_head_bias": True, "sliding_window": 9},
        {"num_local_experts": 6, "rope_parameters": _LONG},
    ],
    "qwen2": [{}],
    "qwen2_moe": [_SIX | {"num_experts": 6, "shared_expert_intermediate_size": 32}],
    "qwen3_5_moe_text": [_DELTA | _SIX | {"num_experts": 6, "shared_expert_intermediate_size": 32}],
    "qwen3_5_text": [_DELTA],
    "qwen3": [{"head_dim": 16}],
    "qwen3_moe": [
        _SIX | {"num_experts": 6, "head_dim": 16, "norm_topk_prob": True},
        _SIX | {"num_experts": 6, "head_dim": 16, "mlp_only_layers": [0]},
    ],
    "qwen3_next": [
        _DELTA | _SIX | {"num_experts": 6, "shared_expert_intermediate_size": 32, "mlp_only_layers": [1]},
        _DELTA | _SIX | {"num_experts": 6, "shared_expert_intermediate_size": 32, "norm_topk_prob": False},
    ],
    "sarvam_mla": [_GROUPS | _LATENTS | {"q_lora_rank": None}],
    "sarvam_moe": [
        _GROUPS | {"head_dim": 16},
        _GROUPS | {"head_dim": 16, "use_qk_norm": False, "attention_bias": True},
    ],
    "seed_oss": [{"head_dim": 8}],
    "smollm3": [{"no_rope_layers": [1, 0]}],
    "solar_open": [_GROUPS | {"head_dim": 16}],
    "stablelm": [{"qk_layernorm": True}, {"use_qkv_bias": True, "use_parallel_residual": True}],
    "starcoder2": [{"sliding_window": 9}],
    "vaultgemma": [{"head_dim": 16, "query_pre_attn_scalar": 7} | _WINDOWS],
    "xglm": [_XGLM, _XGLM | {"scale_embedding": False}],
    "youtu": [_LATENTS],
    "zamba": [_ZAMBA | {"mamba_dt_rank": 16}],
    "zamba2": [
        _ZAMBA
        | {"n_mamba_heads": 4, "mamba_ngroups": 2, "num_mem_blocks": 2, "adapter_rank": 16}
        | {"use_shared_attention_adapter": True, "use_mem_rope": True, "time_step_min": 0.3},
        _ZAMBA | {"n_mamba_heads": 4, "num_mem_blocks": 1, "adapter_rank": 16, "add_bias_linear": True},
    ],
}


def feed(text: list[int], part: range, page: int, num_logits: int) -> Feed:
    """A part of a text, which has a page and a slot of states of its own."""
    span = StateSpan(page + 1 if part.start else EMPTY_STATE, part.start, page + 1, part.stop)
    return Feed(text[part.start : part.stop], part.start, [page], num_logits, state=span)


def test_every_family_has_a_case() -> None:
    assert CASES.keys() == FAMILIES.keys() - {"mllama_text_model"}, "which is the model of `mllama`"


def test_a_token_beyond_the_table_of_vectors_has_its_first_row() -> None:
    """Releases of transformers before 5.24 raise an error there."""
    model = _model("gemma3n_text", CASES["gemma3n_text"][0])
    table = model.get_decoder().embed_tokens_per_layer
    with torch.no_grad():
        table.weight[90:] = table.weight[0]
    want = _runner(zoo.as_served(model)).forward([feed(_FIRST, range(30), 0, 30)])
    table.weight, model.config.vocab_size_per_layer_input = nn.Parameter(table.weight[:90]), 90
    assert max(_FIRST) >= 90
    assert torch.equal(_runner(zoo.as_served(model)).forward([feed(_FIRST, range(30), 0, 30)]), want)


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("gemma3n_text", {"altup_active_idx": 1}),
        ("gemma3n_text", {"altup_correct_scale": False}),
        ("gemma4_text", {"use_bidirectional_attention": "all"}),
        ("gemma4_unified_text", {"hidden_activation": "sigmoid"}),
    ],
)
def test_what_the_table_lacks_is_left_to_transformers(kind: str, more: dict[str, Any]) -> None:
    known = CASES[kind][0]
    assert architecture_for(zoo.config_of(kind, **known)) is not None
    assert architecture_for(zoo.config_of(kind, **known | more)) is None


_EACH = pytest.mark.parametrize(("kind", "more"), [(kind, more) for kind, several in CASES.items() for more in several])


def _model(kind: str, more: dict[str, Any], *, is_soft: bool = False) -> PreTrainedModel:
    """Norms of ones and biases of zeros would hide their places; where attention is sharp, rounding makes a step."""
    model = zoo.with_large_weights(zoo.config_of(kind, **{"hidden_size": 64, "intermediate_size": 80} | more))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * (0.1 if name.endswith("bias") else 0.3))
            # The scores of these two have no scale.
            is_sharp = kind.startswith(("gemma3n", "gemma4")) and name.endswith("q_norm.weight")
            if is_soft and (parameter.ndim > 1 or is_sharp):
                parameter.mul_(0.3)
        for name, buffer in model.named_buffers():
            if name.endswith(("e_score_correction_bias", "layer_scalar")):
                buffer.add_(torch.randn_like(buffer) * 0.3)
    return model


def _runner(made: PreTrainedModel | DecoderModel) -> ModelRunner:
    arena, states = KVArena(layout_of_model(made), 8, 32, CPU), StateArena.of(made, 4, 1, CPU)
    attend = choose("auto", CPU, row_wise=True)  # as for a model whose matrices our C multiplies
    return ModelRunner(made, arena, attend, states=states)


def _off(got: torch.Tensor, want: torch.Tensor, share: float = 1.0) -> float:
    """The largest error of this share of the rows, in parts of the spread of logits."""
    return float((got - want).square().mean(-1).sqrt().quantile(share) / want.std())


@_EACH
@pytest.mark.parametrize("rounded", [None, "int8"])
def test_logits_are_those_of_transformers(kind: str, more: dict[str, Any], rounded: Any) -> None:
    model = _model(kind, more, is_soft=rounded is not None)
    made = zoo.as_served(copy.deepcopy(model), rounded)
    assert isinstance(made, DecoderModel)
    for matrix in model.modules() if rounded else ():
        if isinstance(matrix, nn.Linear | Conv1D) or matrix is model.get_input_embeddings():
            weight = matrix.weight.t() if isinstance(matrix, Conv1D) else matrix.weight
            weight.data.copy_(round_weight(weight, 8).dequantised())
    runner = _runner(made)
    alone = runner.forward([feed(_FIRST, range(30), 0, 30)])
    # Where two experts are nearly as good, rounding lets some rows have the other one.
    is_chosen = rounded and any(isinstance(module, MixtureMLP) for module in made.modules())
    assert _off(alone, plain_logits(model, _FIRST), 0.8 if is_chosen else 1.0) < (0.06 if rounded else 1e-4)
    runner.forward([feed(_FIRST, range(13), 1, 1), feed(_SECOND, range(9), 0, 1)])
    parts = runner.forward([feed(_SECOND, range(9, 17), 0, 2), feed(_FIRST, range(13, 30), 1, 17)])
    assert torch.equal(parts[2:], alone[13:]), "a row's bits depend on its batch"


@_EACH
def test_kernels_give_the_same(kind: str, more: dict[str, Any]) -> None:
    """With plain torch in their place: what they are handed, and what is done with what they give."""
    model = _model(kind, more)
    made = zoo.on_kernels(model)
    runner = _runner(made)
    runner.forward([feed(_FIRST, range(13), 1, 1), feed(_SECOND, range(9), 0, 1)])
    got = runner.forward([feed(_SECOND, range(9, 17), 0, 2), feed(_FIRST, range(13, 30), 1, 17)])
    assert _off(got[2:], plain_logits(model, _FIRST)[13:]) < 1e-4


@pytest.mark.parametrize("kind", ["llama", "gemma2", "olmo2"])
def test_who_reads_hidden_states_gets_the_same_on_kernels(kind: str) -> None:
    model = _model(kind, CASES[kind][0])
    made = zoo.as_served(copy.deepcopy(model)), zoo.on_kernels(model)
    taps = [Tap(each, (0, 1, 2, FINAL)) for each in made]
    for each in made:
        _runner(each).forward([Feed(_FIRST, 0, [0], 1)])
    for place in (0, 1, 2, FINAL):
        got, want = (tap.read((place,)) for tap in reversed(taps))
        assert got is not None
        assert want is not None
        assert _off(got, want) < 1e-4


def test_the_first_layers_of_a_model_on_kernels() -> None:
    model = _model("llama", {"num_hidden_layers": 3})
    mine, theirs = (_runner(first_layers(each, 2)) for each in (zoo.on_kernels(model), zoo.as_served(model)))
    whole = [feed(_FIRST, range(30), 0, 30)]
    assert _off(mine.forward(whole), theirs.forward(whole)) < 1e-4


def test_a_kernel_that_does_not_compile_is_replaced_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    """Triton's own error is no RuntimeError. It used to end the load."""

    def fails(*_: object) -> None:
        raise faults()[0]("out of resource: shared memory")

    model = _model("llama", {})
    with caplog.at_level(logging.WARNING):
        made = zoo.on_kernels(model, replace(LayerOps.of(reference), gate=fails))
    assert caplog.text.count("gate: falling back to torch, the kernel failed") == 1
    assert _off(_runner(made).forward([Feed(_FIRST, 0, [0], 1)]), plain_logits(model, _FIRST)[-1:]) < 1e-4


_IN_FOLDERS = """
aria_text bailing_hybrid dbrx deepseek_v3 ernie4_5_moe gemma4_text gpt_oss granitemoeshared hy_v3 kimi_linear kolibri1
laguna lara_mini lfm3 llama4_text minimax_m2 mixtral mllama nemotron_h olmo_hybrid phimoe sarvam_moe zamba zamba2
"""


@pytest.mark.parametrize("kind", _IN_FOLDERS.split())
def test_a_folder_has_weights_by_their_names_on_the_hub(kind: str, tmp_path: Path) -> None:
    """Experts singly in most families, and in stacks in others; convolutions apart; shared blocks once."""
    model = _model(kind, CASES[kind][0])
    model.save_pretrained(tmp_path)
    architecture = architecture_for(model.config)
    assert architecture is not None
    made = load_decoder(str(tmp_path), None, copy.deepcopy(model.config), architecture, torch.float32)
    got = _runner(made).forward([feed(_FIRST, range(30), 0, 30)])
    assert _off(got, plain_logits(model, _FIRST)) < 1e-4


@pytest.mark.parametrize(
    ("kind", "path"),
    [
        ("codegen", "transformer.h.0.attn.qkv_proj"),
        ("falcon", "transformer.h.0.self_attention.query_key_value"),
        ("gpt2", "transformer.h.0.attn.c_attn"),
        ("gpt_neox", "gpt_neox.layers.0.attention.query_key_value"),
        ("opt", "model.decoder.layers.0.fc1"),
    ],
)
def test_an_adapter_finds_a_matrix_by_its_name_and_its_outputs_by_their_order(kind: str, path: str) -> None:
    model = zoo.with_large_weights(zoo.config_of(kind, **{"hidden_size": 64, "intermediate_size": 80} | CASES[kind][0]))
    matmul, place = model.get_submodule(path), find_place(zoo.as_served(model), path)
    rows = torch.randn(3, 64)
    assert (place.inputs, place.outputs) == (64, matmul(rows).shape[1])
    want = matmul(rows) if place.order is None else matmul(rows)[:, place.order]
    assert torch.allclose(place.matmul(rows), want, atol=1e-4)
