"""A tiny config of every causal language model class of transformers: fields of any family by name, few by family."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

from transformers import CONFIG_MAPPING, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.zoo import VOCAB

KINDS: dict[str, str] = dict(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)  # name of the class, by model type

_BY_VALUE: dict[int, str] = {
    VOCAB: "vocab_size vocab_size_per_layer_input unpadded_vocab_size",
    32: "hidden_size d_model n_embd emb_dim embedding_dim embedding_size input_embedding_size output_embedding_size "
    "word_embed_proj_dim lru_width attention_hidden_size prompt_mid_dim hc_lowrank text_hidden_size projection_dim",
    2: "num_hidden_layers n_layer n_layers num_layers decoder_layers encoder_layers num_decoder_layers "
    "num_encoder_layers num_blocks num_key_value_heads num_kv_heads swa_num_key_value_heads kv_n_heads "
    "num_experts_per_tok num_experts_per_token moe_topk moe_top_k moe_k zero_expert_num linear_num_key_heads "
    "o_groups n_langs hybrid_layer_ids depth",
    4: "num_attention_heads n_head n_heads num_heads attention_heads decoder_attention_heads encoder_attention_heads "
    "num_decoder_attention_heads num_encoder_attention_heads swa_num_attention_heads num_experts n_routed_experts "
    "num_local_experts moe_num_experts rotary_dim qk_rope_head_dim time_step_rank mamba_dt_rank mamba_n_heads "
    "mamba_num_heads linear_num_value_heads linear_num_heads num_query_groups block_size d_rel",
    8: "head_dim dim_head attention_head_size attention_head_dim swa_head_dim kv_channels d_head qk_nope_head_dim "
    "v_head_dim o_lora_rank index_head_dim mamba_d_state state_size ssm_state_size linear_key_head_dim "
    "linear_value_head_dim linear_head_dim mamba_chunk_size chunk_size hidden_size_per_layer_input laurel_rank "
    "adapter_rank gated_norm_rank loop_gate_rank rel_extent",
    16: "moe_intermediate_size shared_intermediate_size shared_expert_intermediate_size "
    "shared_experts_intermediate_size moe_shared_expert_intermediate_size expert_ffn_hidden_size router_hidden_size "
    "kv_lora_rank q_lora_rank mamba_d_head mamba_head_dim mamba_headdim pronunciation_embed_dim shape_embed_dim "
    "patch_size index_n_heads",
    48: "intermediate_size ffn_dim dff dim_ff decoder_ffn_dim encoder_ffn_dim d_inner feed_forward_size "
    "intermediate_size_mlp dense_intermediate_size ffn_hidden_size mlp_dim",
    1: "n_group topk_group num_expert_group n_groups mamba_ngroups mamba_n_groups bos_token_id "
    "decoder_start_token_id num_random_blocks",
    9: "sliding_window sliding_window_size attention_chunk_size attention_window_size window_size local_attention "
    "local_attention_window_len",  # less than the tests' texts
    128: "max_position_embeddings n_positions n_ctx max_seq_len model_max_length context_length max_target_positions "
    "pronunciation_vocab_size shape_vocab_size",
    32 * 2: "image_size mamba_d_ssm",
    6: "index_topk",
    12: "qk_head_dim",
}
_SIZES: dict[str, Any] = {name: value for value, names in _BY_VALUE.items() for name in names.split()}
_SIZES |= {"eos_token_id": 2, "pad_token_id": 0, "is_decoder": True}

_MOST_LAYERS = 4
_ROPE = {"rope_type": "default", "rope_theta": 1e4}
_SHARING = ["sliding_attention", "full_attention"] * 2
_SLIDING_HEADS = {"swa_num_attention_heads": 4, "swa_num_key_value_heads": 4, "swa_q_lora_rank": 16}
_SLIDING_HEADS |= {"swa_kv_lora_rank": 16, "swa_head_dim": 12, "swa_qk_nope_head_dim": 8, "swa_v_head_dim": 8}
_ASSISTANT = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
_ASSISTANT |= {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0, "head_dim": 8}
_INDEXER = {"head_dim": 8, "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 8}
# What sizes alone do not say: which layers there are, and numbers that depend on others.
_MORE: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1]},
    "blt": {"vocab_size": 260, "encoder_hash_byte_group_vocab": 64, "patch_size": 4},
    "blt_local_decoder": {"hidden_size_global": 32, "vocab_size": 260},
    "blt_local_encoder": {"hidden_size_global": 32, "vocab_size": 260},
    "blt_patcher": {"vocab_size": 260},
    "cohere_compass_text": {"rope_parameters": {"full_attention": _ROPE}},
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0}},
    "dory": {"num_hidden_layers": 3, "n_input_layers": 1, "n_recurrent_layers": 1, "n_output_layers": 1}
    | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    "dots1": {"n_shared_experts": 1, "n_routed_experts": 4, "num_experts_per_tok": 2, "num_hidden_layers": 2}
    | {"layer_types": ["full_attention", "sliding_attention"]},
    "dots3_note_audio_encoder": {"adapter_out_dim": 32, "adapter_input_size": 32, "hidden_size": 32}
    | {"num_attention_heads": 4},
    "dots3_note_text": _SLIDING_HEADS | {"hidden_size": 32},
    "dots3_note_vision_encoder": {"adapter_out_dim": 32, "adapter_in_dim": 32, "hidden_size": 32}
    | {"num_attention_heads": 4},
    "gemma4_assistant": {"text_config": _ASSISTANT},
    "gemma3n_text": {"num_hidden_layers": 4, "layer_types": _SHARING, "num_kv_shared_layers": 2}
    | {"activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0], "intermediate_size": 48},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "num_layers": 2},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"], "num_hidden_layers": 2},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2, "num_dense_layers": 1},
    "longcat_flash": {"head_dim": 4},
    "mamba2": {"hidden_size": 32, "expand": 2, "num_heads": 4, "head_dim": 16},
    "moshi": {"sliding_window": 128},  # its mask has no window: `generate` alone would keep to one
    "qwen4_exp_text": _INDEXER | {"indexer_compress_ratio": 2},
    "recurrent_gemma": {"num_hidden_layers": 3},
    "reformer": {"axial_pos_embds": False, "is_decoder": True, "num_buckets": 4, "hash_seed": 0},
    "xlstm": {"hidden_size": 128, "embedding_dim": 128, "chunk_size": 64},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"layers_block_type": ["linear_attention", "hybrid"] * 2, "num_hidden_layers": 4}
    | {"attention_hidden_size": 64, "attention_head_dim": 16},
    "zaya": {"num_experts_per_tok": 1},
}


def tiny(kind: str) -> PreTrainedConfig:
    """The config of a model of a few layers, of width 32, with every kind of layer that its family has."""
    return _tiny(CONFIG_MAPPING[kind])


def _tiny(cls: type[PreTrainedConfig]) -> PreTrainedConfig:
    own = _MORE.get(cls.model_type, {})
    # Some cannot be made without numbers that fit together.
    default = cls(**own)
    names = _names(cls)
    values = {name: value for name, value in _SIZES.items() if name in names}
    if "kv_lora_rank" in names:  # latent K/V are for all heads
        values["num_key_value_heads"] = values["num_attention_heads"]
    parts = {name: vars(default).get(name) for name in cls.sub_configs if name not in own}
    values |= {name: _tiny(type(part)) for name, part in parts.items() if isinstance(part, PreTrainedConfig)}
    return cls(**values | _layers(default, names) | own)


def _names(cls: type[PreTrainedConfig]) -> set[str]:
    return {field.name for field in dataclasses.fields(cls)} | set(inspect.signature(cls.__init__).parameters)


def _layers(default: PreTrainedConfig, names: set[str]) -> dict[str, Any]:
    """Of all lists with an entry per layer those of a few layers, one of each kind."""
    depth = getattr(default, "num_hidden_layers", None)
    found = {name: vars(default).get(name) for name in names}
    lists = {name: value for name, value in found.items() if isinstance(value, list) and len(value) == depth}
    if not lists:
        return {}
    kinds = [repr(kind) for kind in zip(*lists.values(), strict=True)]
    first = [kinds.index(kind) for kind in dict.fromkeys(kinds)][:_MOST_LAYERS]
    first = first if len(first) > 1 else [0, 1]
    return {name: [value[i] for i in first] for name, value in lists.items()} | {"num_hidden_layers": len(first)}
