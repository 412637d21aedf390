"""The families of models that are read from GGUF files, by llama.cpp's names: what their metadata and tensors mean.

Layouts are those of llama.cpp's converter (github.com/ggml-org/llama.cpp, `convert_hf_to_gguf.py`), and numbers that
it does not write are those that its own graphs have.
"""

from __future__ import annotations

from typing import Any

from engine.errors import ModelError, shown
from engine.model.gguf.hybrids import HYBRIDS
from engine.model.gguf.keys import EPSILON, Keys
from engine.model.gguf.mixtures import MIXTURES
from engine.model.gguf.names import NORMS_OF_HEADS, GGUFFamily, scales_of
from engine.model.gguf.ropes import llama3, longrope, partly, rope_of

_GEMMA = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


def architecture_of(keys: Keys) -> GGUFFamily:
    """The family of a file.

    Raises:
        ModelError: it is none of ours.
    """
    container = keys.container
    name = container.need("general.architecture", str)
    if name == "mistral3" and keys.real(_GROWTH) is None:  # the text part of an older model that sees
        name = "llama"
    mixture = bool(keys.integer("expert_count", least=0))
    found = HYBRIDS.get(name) or (MIXTURES if mixture else ARCHITECTURES).get(name)
    if found is None:
        known, kind = ", ".join(sorted({*ARCHITECTURES, *HYBRIDS, *MIXTURES})), " with experts" if mixture else ""
        raise ModelError(f"{container.path} is a {shown(name)} model{kind}; GGUF files are read of {known}")
    return found


def _llama(keys: Keys) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "attention_bias": keys.has("blk.0.attn_q.bias"),
        "mlp_bias": keys.has("blk.0.ffn_up.bias"),
    }
    rope = llama3(keys)
    return fields if rope is None else fields | {"rope_parameters": rope}


def _gemma2(keys: Keys) -> dict[str, Any]:
    return {
        "sliding_window": keys.need("attention.sliding_window"),
        "attn_logit_softcapping": keys.real("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": keys.real("final_logit_softcapping", 30.0),
        "query_pre_attn_scalar": _scaled_by(keys, largest=46),
    }


def _gemma3(keys: Keys) -> dict[str, Any]:
    local = {"rope_type": "default", "rope_theta": 10_000.0}  # of the layers with a window, in all published models
    return {
        "sliding_window": keys.need("attention.sliding_window"),
        "query_pre_attn_scalar": _scaled_by(keys, largest=62),
        "final_logit_softcapping": keys.real("final_logit_softcapping"),
        "rope_parameters": {"full_attention": rope_of(keys), "sliding_attention": local},
    }


def _scaled_by(keys: Keys, largest: int) -> int:
    """The number whose root divides Gemma's attention: the largest model, known by its layers, has one of its own."""
    return keys.size("embedding_length") // keys.heads if keys.blocks == largest else keys.head_dim


def _phi3(keys: Keys) -> dict[str, Any]:
    rope = longrope(keys)
    fields: dict[str, Any] = {"sliding_window": keys.integer("attention.sliding_window", least=0) or None}
    if rope is not None:
        fields["original_max_position_embeddings"] = rope["original_max_position_embeddings"]
    return fields | {"rope_parameters": partly(keys, rope or rope_of(keys))}


def _granite(keys: Keys) -> dict[str, Any]:
    return _llama(keys) | scales_of(keys)


def _glm4(keys: Keys) -> dict[str, Any]:
    keys.refuse("rope.dimension_sections", "rotary embeddings in sections are not read")
    return {"attention_bias": keys.has("blk.0.attn_q.bias"), "rope_parameters": partly(keys, rope_of(keys))}


def _mistral3(keys: Keys) -> dict[str, Any]:
    """Ministral 3, whose queries grow with their positions."""
    betas = {"beta_fast": keys.real("rope.scaling.yarn_beta_fast", 32.0)}
    betas["beta_slow"] = keys.real("rope.scaling.yarn_beta_slow", 1.0)
    scale = keys.needs_real("rope.scaling.yarn_log_multiplier")
    grown = {"mscale": scale, "mscale_all_dim": scale, "llama_4_scaling_beta": keys.needs_real(_GROWTH)}
    return {"rope_parameters": rope_of(keys) | betas | grown}


def _olmo2(keys: Keys) -> dict[str, Any]:
    keys.refuse("attention.sliding_window", "Olmo 3 is not read")
    return {}


def _starcoder2(keys: Keys) -> dict[str, Any]:
    """The window is not in the file, and the same in all published models."""
    return {"norm_epsilon": keys.epsilon(EPSILON), "use_bias": True, "sliding_window": 4096}


def _stablelm(keys: Keys) -> dict[str, Any]:
    return {
        "layer_norm_eps": keys.epsilon(EPSILON),
        "use_qkv_bias": keys.has("blk.0.attn_q.bias"),
        "use_parallel_residual": keys.flag("use_parallel_residual", default=False),
        "rope_parameters": partly(keys, rope_of(keys)),
    }


def _cohere2(keys: Keys) -> dict[str, Any]:
    return {
        "layer_norm_eps": keys.epsilon(EPSILON),
        "logit_scale": keys.needs_real("logit_scale"),
        "sliding_window": keys.need("attention.sliding_window"),
    }


def _exaone4(keys: Keys) -> dict[str, Any]:
    """Every fourth layer of a model with windows has none, and no rotary embedding."""
    window, rope = keys.integer("attention.sliding_window"), llama3(keys)
    fields: dict[str, Any] = {"sliding_window": window, "sliding_window_pattern": None if window is None else 4}
    return fields if rope is None else fields | {"rope_parameters": rope}


def _seed_oss(keys: Keys) -> dict[str, Any]:
    biases = {"attention_bias": "attn_q", "attention_out_bias": "attn_output", "mlp_bias": "ffn_up"}
    return {field: keys.has(f"blk.0.{part}.bias") for field, part in biases.items()}


_GROWTH = "attention.temperature_scale"
_AFTER = {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
_HUNYUAN = {"attn_q_norm": "self_attn.query_layernorm", "attn_k_norm": "self_attn.key_layernorm"}
_GLM4 = {
    "post_attention_norm": "post_self_attn_layernorm",
    "post_ffw_norm": "post_mlp_layernorm",
    "ffn_up": "mlp.gate_up_proj",
}
# By llama.cpp's names; Mistral's models are llama. `MIXTURES` has those with experts.
ARCHITECTURES = {
    "cohere2": GGUFFamily("cohere2", _cohere2),
    "ernie4_5": GGUFFamily("ernie4_5"),
    "exaone4": GGUFFamily("exaone4", _exaone4, names=_AFTER | NORMS_OF_HEADS),
    "gemma": GGUFFamily("gemma", norms_plus_one=True),
    "gemma2": GGUFFamily("gemma2", _gemma2, names=_GEMMA, norms_plus_one=True),
    "gemma3": GGUFFamily("gemma3_text", _gemma3, names=_GEMMA | NORMS_OF_HEADS, norms_plus_one=True),
    "glm4": GGUFFamily("glm4", _glm4, names=_GLM4),
    "granite": GGUFFamily("granite", _granite, permuted=True),
    "hunyuan-dense": GGUFFamily("hunyuan_v1_dense", names=_HUNYUAN),
    "llama": GGUFFamily("llama", _llama, permuted=True),
    "mistral3": GGUFFamily("ministral3", _mistral3, permuted=True),
    "olmo2": GGUFFamily("olmo2", _olmo2, names=_AFTER | NORMS_OF_HEADS),
    "phi3": GGUFFamily("phi3", _phi3, names={"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}),
    "qwen2": GGUFFamily("qwen2"),
    "qwen3": GGUFFamily("qwen3", names=NORMS_OF_HEADS),
    "seed_oss": GGUFFamily("seed_oss", _seed_oss, names={"post_attention_norm": "post_attention_layernorm"}),
    "smollm3": GGUFFamily("smollm3", _llama, permuted=True),
    "stablelm": GGUFFamily("stablelm", _stablelm),
    "starcoder2": GGUFFamily("starcoder2", _starcoder2, names={"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"}),
}
