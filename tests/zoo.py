"""Small random-weight models of several families: real code paths, weights that nobody has to download."""

from __future__ import annotations

import copy
from functools import lru_cache
from typing import cast

import torch
from transformers import AutoConfig, AutoModelForCausalLM, FalconForCausalLM, PreTrainedConfig, PreTrainedModel

from pilotfish.engine.attention import choose
from pilotfish.engine.attention.registry import ATTENTION_NAME
from pilotfish.engine.choices import KVType, Rounded, Weights
from pilotfish.engine.kernels import reference as reference_ops
from pilotfish.engine.kv.arena import KVArena
from pilotfish.engine.kv.batch import Feed
from pilotfish.engine.model.decoder.decoder import DecoderModel
from pilotfish.engine.model.decoder.families.table import architecture_for
from pilotfish.engine.model.decoder.latent import expanded
from pilotfish.engine.model.decoder.load import prepared
from pilotfish.engine.model.decoder.ops import LayerOps
from pilotfish.engine.model.decoder.weights import WeightReader, converted_by
from pilotfish.engine.model.fallback import prepare
from pilotfish.engine.model.runner import ModelRunner, layout_of_model

VOCAB = 97
END = 2
_TOKENS = {"vocab_size": VOCAB, "bos_token_id": 1, "eos_token_id": END}
COMMON = _TOKENS | {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
_GPT2 = _TOKENS | {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}
_OPT = _TOKENS | {
    "hidden_size": 32,
    "ffn_dim": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "word_embed_proj_dim": 32,
}
_LLAMA_3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
_ALTERNATING = ["sliding_attention", "full_attention"]
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
LATENT = {
    "q_lora_rank": 12,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "num_key_value_heads": 4,
}
_FOUR = {"num_hidden_layers": 4}
_DELTA = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "head_dim": 16,
}
DEEPSEEK = LATENT | _EXPERTS | {"n_routed_experts": 4, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
_GEMMA_N = {
    "num_hidden_layers": 6,
    "head_dim": 8,
    "sliding_window": 9,
    "layer_types": _ALTERNATING * 3,
    "num_kv_shared_layers": 2,
    "vocab_size_per_layer_input": VOCAB,
    "hidden_size_per_layer_input": 8,
}
LLAMA_4 = {
    "num_hidden_layers": 4,
    "head_dim": 16,
    "attention_chunk_size": 9,
    "no_rope_layers": [1, 1, 1, 0],
    "attn_temperature_tuning": True,
    "floor_scale": 4,
    "num_local_experts": 4,
    "interleave_moe_layer_step": 2,
    "intermediate_size_mlp": 48,
}
# By name the model type, and what it has beside the common sizes.
_BY_KIND: dict[str, tuple[str, dict[str, object]]] = {
    "gpt-oss": (
        "gpt_oss",
        {"head_dim": 16, "sliding_window": 9, "layer_types": _ALTERNATING, "num_local_experts": 4,
         "num_experts_per_tok": 2},
    ),
    "deepseek-v2": ("deepseek_v2", DEEPSEEK | {"topk_method": "group_limited_greedy", "q_lora_rank": None}),
    "deepseek-v3": ("deepseek_v3", DEEPSEEK),
    "llama-4": ("llama4_text", LLAMA_4),
    "gemma-3n": (
        "gemma3n_text",
        _GEMMA_N | {"laurel_rank": 4, "altup_num_inputs": 2, "activation_sparsity_pattern": [0.5] + [0.0] * 5,
                    "intermediate_size": [48] * 6},
    ),
    "gemma-4": (
        "gemma4_text",
        _GEMMA_N | {"global_head_dim": 16, "num_global_key_value_heads": 1, "attention_k_eq_v": True},
    ),
    "glm-4-moe": (
        "glm4_moe", _EXPERTS | {"head_dim": 8, "n_routed_experts": 4, "first_k_dense_replace": 1, "use_qk_norm": True}
    ),
    "qwen3-moe": ("qwen3_moe", _EXPERTS | {"head_dim": 8, "num_experts": 4}),
    "stablelm": ("stablelm", {"qk_layernorm": True}),
    "qwen-3-next": (
        "qwen3_next",
        _FOUR | _DELTA | _EXPERTS | {"num_experts": 4, "shared_expert_intermediate_size": 16},
    ),
    "qwen-3.5": ("qwen3_5_text", _FOUR | _DELTA),
    "lfm-2": ("lfm2", _FOUR | {"full_attn_idxs": [1, 3], "block_ff_dim": 48, "block_multiple_of": 8}),
    "mamba": ("mamba", {"state_size": 8}),
    "mamba-2": ("mamba2", {"num_heads": 8, "head_dim": 8, "state_size": 16, "n_groups": 2, "expand": 2}),
    "jamba": (
        "jamba",
        _FOUR | {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1,
                 "num_experts": 4, "mamba_d_state": 8, "mamba_dt_rank": 4, "use_mamba_kernels": False},
    ),
    "granite-4": (
        "granitemoehybrid",
        _FOUR | {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 16, "mamba_n_groups": 1,
                 "layer_types": ["mamba", "attention"] * 2, "num_local_experts": 4, "num_experts_per_tok": 2,
                 "shared_intermediate_size": 32},
    ),
    "nemotron-h": (
        "nemotron_h",
        _FOUR | {"mamba_num_heads": 8, "mamba_head_dim": 8, "ssm_state_size": 16, "n_groups": 2, "head_dim": 8,
                 "hybrid_override_pattern": "M*M-"},
    ),
    "falcon-h1": (
        "falcon_h1",
        {"mamba_d_ssm": 64, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 16, "mamba_n_groups": 1,
         "head_dim": 8},
    ),
    "qwen-4-exp": (
        "qwen4_exp_text",
        _FOUR | _DELTA | _EXPERTS | {"num_experts": 4, "shared_expert_intermediate_size": 16, "indexer_n_heads": 2,
         "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 8, "indexer_compress_ratio": 2},
    ),
    "falcon": ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2, "alibi": True}),
    "gpt-j": ("gptj", {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128, "n_inner": 48, "rotary_dim": 4}),
}  # fmt: skip


BORDER = 32  # where the longrope config changes its table


def _long_rope(border: int) -> dict[str, object]:
    tables = {"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [2.0, 3.0, 4.0, 5.0]}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": border, **tables}
    return {"pad_token_id": 0, "original_max_position_embeddings": border, "rope_parameters": rope}


# As above. GPT-2 and OPT have names of their own for the common sizes.
_SIZES = {"gpt2": _GPT2, "opt": _OPT}
_FAMILIES: dict[str, tuple[str, dict[str, object]]] = {
    "llama": ("llama", {}),
    "gpt2": ("gpt2", {}),
    "opt": ("opt", {}),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "mistral": ("mistral", {"sliding_window": 9}),
    "gemma2": ("gemma2", {"head_dim": 16, "sliding_window": 9, "query_pre_attn_scalar": 7}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-3": ("llama", {"rope_parameters": _LLAMA_3_ROPE}),
    "tinyllama-1.1b": ("llama", {"hidden_size": 64, "num_attention_heads": 16}),
    "llama-160m": ("llama", {"hidden_size": 48, "num_attention_heads": 12, "num_key_value_heads": 12}),
    "distilgpt2": ("gpt2", {"n_layer": 1}),
    "opt-350m": ("opt", {"word_embed_proj_dim": 16, "do_layer_norm_before": False}),
    "opt-1.3b": ("opt", {"hidden_size": 64, "word_embed_proj_dim": 64, "num_attention_heads": 8}),
    "phi3": ("phi3", {"pad_token_id": 0, "original_max_position_embeddings": 128, "sliding_window": 20}),
    "phi3-longrope": ("phi3", _long_rope(BORDER)),
    "qwen2": ("qwen2", {}),
    "qwen2-window": ("qwen2", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}),
    "gemma": ("gemma", {"head_dim": 16}),
    "gemma3": (
        "gemma3_text",
        {"head_dim": 16, "sliding_window": 9, "query_pre_attn_scalar": 7, "layer_types": _ALTERNATING},
    ),
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
}


# Grouped heads, learned and rotary positions, norms on q and k, windows, softcaps; other shapes and switches of those.
FAMILIES = tuple(_FAMILIES)
# And sinks, chunks, latent K/V, heads that differ by layer, shared K/V; dropped keywords; recurrent layers.
EVERY_FAMILY = (*FAMILIES, *_BY_KIND)


def family_config(family: str) -> PreTrainedConfig:
    """The config of one of `EVERY_FAMILY`: to make those of all takes as long as many a test."""
    if family in _BY_KIND:
        kind, extra = _BY_KIND[family]
        return config_of(kind, **extra)
    kind, own = _FAMILIES[family]
    return AutoConfig.for_model(kind, **_SIZES.get(kind, COMMON) | own)


def config_of(kind: str, **extra: object) -> PreTrainedConfig:
    """A tiny config of any model type; windows and chunks in `extra` should be shorter than the prompts."""
    common = {} if "n_embd" in extra else COMMON  # such types have names of their own for the common sizes
    return AutoConfig.for_model(kind, **common | _TOKENS | {"pad_token_id": 0} | extra)


def longrope(border: int = BORDER) -> PreTrainedConfig:
    """Phi-3 with two rotary tables, the second for sequences longer than `border`."""
    return AutoConfig.for_model("phi3", **COMMON | _long_rope(border))


@lru_cache
def reference(family: str, seed: int = 0) -> PreTrainedModel:
    """The plain transformers model, with weights large enough for attention to matter."""
    return with_large_weights(family_config(family), seed)


def with_large_weights(config: PreTrainedConfig, seed: int = 0) -> PreTrainedModel:
    """The plain transformers model of a config."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.copy_(torch.randn_like(parameter) * 0.25)
            elif name.endswith("sinks"):
                parameter.copy_(torch.randn_like(parameter))
    return model


def ours(model: PreTrainedModel, dtype: torch.dtype = torch.float32) -> DecoderModel | PreTrainedModel:
    """The same weights as a server runs them, by torch's matmuls; outside of the table with our attention alone."""
    given = copy.deepcopy(model).to(dtype)  # type: ignore[arg-type]  # transformers hides torch's own signature
    if architecture_for(model.config) is not None:
        return decoder(given, packs=False)
    # Falcon's class has attention of its own, and refuses any other.
    return given if isinstance(model, FalconForCausalLM) else in_transformers(given)


def in_transformers(model: PreTrainedModel) -> PreTrainedModel:
    """The same weights in transformers' module with our attention, as `fallback.load_model` would load them."""
    config = copy.deepcopy(model.config)
    prepare(config)
    twin = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION_NAME).eval()
    twin.load_state_dict(model.state_dict())
    return twin.to(model.dtype)


def decoder(
    model: PreTrainedModel, weights: Weights = "native", *, packs: bool = True, expands: bool = False
) -> DecoderModel:
    """The same weights in our decoder, floats in our C where that multiplies here and `packs`.

    `model`: transformers' module, or a decoder that this function has made of one. `expands`: its latents.
    """
    model, architecture = getattr(model, "plain", model), architecture_for(model.config)
    assert architecture is not None, "it is in the table"
    architecture = expanded(architecture) if expands else architecture
    converted = None if packs else converted_by(weights, on_cuda=True)
    rounded = cast("Rounded", weights) if weights != "native" and converted is None else None
    found = prepared({key: tensor.clone() for key, tensor in model.state_dict().items()}, architecture)
    read = WeightReader(found, model.dtype, rounded, device=model.device, packs=packs, converted=converted)
    made = DecoderModel(architecture, copy.deepcopy(model.config), read).eval()
    made.__dict__["plain"] = model  # as an attribute it would be one of its modules
    return made


def as_served(model: PreTrainedModel, weights: Weights = "native") -> DecoderModel | PreTrainedModel:
    """The same model as a server on a CPU runs it: in our C, where that multiplies here."""
    return model if architecture_for(model.config) is None else decoder(model, weights)


def on_kernels(
    model: PreTrainedModel, ops: LayerOps | None = None, weights: Weights = "native"
) -> DecoderModel | PreTrainedModel:
    """A copy as a server on a GPU runs it; `ops`: what stands for our kernels, default plain torch."""
    if architecture_for(model.config) is None:
        return copy.deepcopy(model)
    made = decoder(model, weights, packs=False)
    made.use(ops or LayerOps.of(reference_ops))
    return made


def logits(model: PreTrainedModel, kind: KVType = "auto") -> torch.Tensor:
    """Of a ragged batch: a chunk, a prompt, then one token each."""
    arena = KVArena(layout_of_model(model).stored_as(kind), 3, 64, torch.device("cpu"))
    runner = ModelRunner(model, arena, choose("auto", model.device))
    first = runner.forward([Feed(range(5, 25), 0, [1], 20), Feed([3, 4, 5], 0, [2], 0)])
    return torch.cat([first, runner.forward([Feed([9], 20, [1]), Feed([3, 4], 3, [2], 2)])])


def disturbed(model: PreTrainedModel, amount: float = 0.02) -> PreTrainedModel:
    """The plain model with other weights, a little."""
    twin, generator = copy.deepcopy(model), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * amount)
    return twin


def near(
    model: PreTrainedModel, amount: float = 0.02, dtype: torch.dtype = torch.float32
) -> DecoderModel | PreTrainedModel:
    """A draft that is often right: the same weights, a little disturbed, as `ours`."""
    return ours(disturbed(model, amount), dtype)


def prompts(count: int = 4, seed: int = 1) -> list[list[int]]:
    """Prompts of unequal lengths, some with repetitions that an n-gram proposer can use."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 40, (count,), generator=generator).tolist()
    drawn = [torch.randint(3, VOCAB, (n,), generator=generator).tolist() for n in lengths]
    return [tokens + tokens[: len(tokens) // 2] if i % 2 else tokens for i, tokens in enumerate(drawn)]
