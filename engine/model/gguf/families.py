"""The families of models in GGUF files, by llama.cpp's names: their configs and the names of their tensors.

Layouts are those of llama.cpp's converter (github.com/ggml-org/llama.cpp, `convert_hf_to_gguf.py`); values that it does
not write are those of llama.cpp's graphs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from pilotfish.engine.errors import ModelError, shown
from pilotfish.engine.model.decoder.families.described import described_by
from pilotfish.engine.model.gguf.blocks import float_type
from pilotfish.engine.model.gguf.container import Container
from pilotfish.engine.model.gguf.keys import EPSILON, Keys, llama3, longrope, partly, rope_of
from pilotfish.engine.model.gguf.tokenizer import check_tokens, end_tokens_in

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_RMS_EPSILON = "attention.layer_norm_rms_epsilon"
METHOD, HAS_CODES = "gguf", "has_codes"  # in `quantization_config`, which marks configs of GGUF files
_GROWTH = "attention.temperature_scale"  # growth of queries by position
GATE_UP = ("ffn_gate_exps", "ffn_up_exps")  # fused first matrices of a layer's experts
_OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_NORMS_OF_HEADS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_SCALES = {  # Granite's factors, and their keys
    "attention_multiplier": "attention.scale",
    "embedding_multiplier": "embedding_scale",
    "logits_scaling": "logit_scale",
    "residual_multiplier": "residual_scale",
}
_GEMMA = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_AFTER = {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
_HUNYUAN = {"attn_q_norm": "self_attn.query_layernorm", "attn_k_norm": "self_attn.key_layernorm"}
_GLM4 = {
    "post_attention_norm": "post_self_attn_layernorm",
    "post_ffw_norm": "post_mlp_layernorm",
    "ffn_up": "mlp.gate_up_proj",
}
_EXPERTS = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps.weight": "mlp.experts.gate_up_proj",
    "ffn_up_exps.weight": "mlp.experts.gate_up_proj",
    "ffn_down_exps.weight": "mlp.experts.down_proj",
}
_SHARED_EXPERT = {
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
_GLM4_MOE = {
    "post_attention_norm": "post_attention_layernorm",
    "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
}
_GRANITE_MOE = {name: place.replace("mlp.", "block_sparse_moe.") for name, place in _EXPERTS.items()} | {
    "ffn_gate_inp": "block_sparse_moe.router"
}
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


@dataclass(frozen=True, slots=True)
class GGUFFamily:
    """One family.

    Attributes:
        model_type: in transformers.
        describe: returns the config fields besides those of all families.
        names: of parts of a block, besides `_BLOCK`; with `.weight` or `.bias` where the model has neither.
        outer: of parts outside of blocks, besides `_OUTER`.
        undo: functions that undo the converter's changes of floats, by parts of a block.
        order: by parts of a block: function from a number of rows to the index in the file of each row of the weight.
        permuted: whether rows of queries and keys are reordered.
        norms_plus_one: whether norms are stored plus 1.
        pairs_experts: whether the model has matrices of experts as `[in, out]`, with gate and up interleaved.
    """

    model_type: str
    describe: Callable[[Keys], dict[str, Any]] = lambda _keys: {}
    names: Mapping[str, str] = field(default_factory=dict)
    outer: Mapping[str, str] = field(default_factory=dict)
    undo: Mapping[str, Callable[[Tensor], Tensor]] = field(default_factory=dict)
    order: Mapping[str, Callable[[Keys, int], Tensor]] = field(default_factory=dict)
    permuted: bool = False
    norms_plus_one: bool = False
    pairs_experts: bool = False

    def renamed(self, name: str, layers: Collection[str]) -> str | None:
        """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`; None if the model has no such part."""
        stem, _, kind = name.rpartition(".")
        outer_names = {**_OUTER, **self.outer}
        if stem in outer_names:
            return f"{outer_names[stem]}.{kind}"
        first, _, rest = name.partition(".")
        layer, _, part = rest.partition(".")
        names = {**_BLOCK, **self.names}
        found = names.get(part) or (f"{names[outer]}.{kind}" if (outer := part.rpartition(".")[0]) in names else None)
        return f"model.layers.{layer}.{found}" if first == "blk" and layer in layers and found else None

    def undone(self, part: str) -> Callable[[Tensor], Tensor] | None:
        """The function that undoes the converter's change of a float part; None if there is no change."""
        if part in self.undo or not (self.norms_plus_one and part.endswith("norm")):
            return self.undo.get(part)
        return lambda stored: stored.float() - 1


def part_of(name: str) -> str:
    """`blk.3.attn_q.weight` -> `attn_q`; `blk.3.ssm_a` -> `ssm_a`; `output_norm.weight` -> `output_norm`."""
    inner = name.split(".", 2)[-1] if name.startswith("blk.") else name
    return inner.removesuffix(".weight").removesuffix(".bias")


def _scales_of(keys: Keys) -> dict[str, Any]:
    """Granite's factors; those equal to 1 are missing in files."""
    return {field: keys.real(key, 1.0) for field, key in _SCALES.items()}


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
    """The number whose square root divides Gemma's attention scores; that of the largest model differs."""
    return keys.size("embedding_length") // keys.heads if keys.blocks == largest else keys.head_dim


def _phi3(keys: Keys) -> dict[str, Any]:
    rope = longrope(keys)
    fields: dict[str, Any] = {"sliding_window": keys.integer("attention.sliding_window", least=0) or None}
    if rope is not None:
        fields["original_max_position_embeddings"] = rope["original_max_position_embeddings"]
    return fields | {"rope_parameters": partly(keys, rope or rope_of(keys))}


def _glm4(keys: Keys) -> dict[str, Any]:
    keys.refuse("rope.dimension_sections", "rotary embeddings in sections are not supported")
    return {"attention_bias": keys.has("blk.0.attn_q.bias"), "rope_parameters": partly(keys, rope_of(keys))}


def _mistral3(keys: Keys) -> dict[str, Any]:
    """Ministral 3, whose queries grow with positions."""
    betas = {"beta_fast": keys.real("rope.scaling.yarn_beta_fast", 32.0)}
    betas["beta_slow"] = keys.real("rope.scaling.yarn_beta_slow", 1.0)
    scale = keys.needs_real("rope.scaling.yarn_log_multiplier")
    grown = {"mscale": scale, "mscale_all_dim": scale, "llama_4_scaling_beta": keys.needs_real(_GROWTH)}
    return {"rope_parameters": rope_of(keys) | betas | grown}


def _olmo2(keys: Keys) -> dict[str, Any]:
    keys.refuse("attention.sliding_window", "Olmo 3 is not supported")
    return {}


def _starcoder2(keys: Keys) -> dict[str, Any]:
    """The window is not in the file; it is equal in all published models."""
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


def _mixture(keys: Keys) -> dict[str, Any]:
    """Numbers of experts; Mixtral and gpt-oss call them `num_local_experts`."""
    count = keys.size("expert_count")
    used = keys.need("expert_used_count", most=count)
    return {"num_experts": count, "num_local_experts": count, "num_experts_per_tok": used}


def _qwen2_moe(keys: Keys) -> dict[str, Any]:
    """Experts with a shared expert."""
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


def _olmoe(keys: Keys) -> dict[str, Any]:
    keys.refuse("attention.clamp_kqv", "clipped queries, keys and values are not supported")
    return _mixture(keys) | {"norm_topk_prob": False}


def _lfm2(keys: Keys) -> dict[str, Any]:
    kinds = ["full_attention" if heads else "conv" for heads in keys.of_layers("attention.head_count_kv")]
    eps, width = keys.epsilon("attention.layer_norm_rms_epsilon"), keys.size("shortconv.l_cache")
    return {"layer_types": kinds, "norm_eps": eps, "conv_L_cache": width, "block_auto_adjust_ff_dim": False}


def _channels(stored: Tensor) -> Tensor:
    """A depthwise convolution, stored as a matrix."""
    return stored.unsqueeze(1)


def _qwen3_next(keys: Keys) -> dict[str, Any]:
    values, key_heads, inner = (keys.size(f"ssm.{key}") for key in ("time_step_rank", "group_count", "inner_size"))
    if values % key_heads or inner % values:
        raise keys.fault("ssm.time_step_rank", values, f"a multiple of {key_heads} groups that divides {inner}")
    keys.check_width("ssm.group_count", key_heads * keys.size("ssm.state_size"))
    return _qwen2_moe(keys) | {
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
    """The logarithm of a decay, stored as the negative decay."""
    return stored.float().neg().log()


# A matrix of one row, stored as a vector.
_OF_SHARED_GATE: dict[str, Callable[[Tensor], Tensor]] = {"ffn_gate_inp_shexp": lambda stored: stored.reshape(1, -1)}
# By llama.cpp's names; Mistral and Mixtral are llama there.
FAMILIES = {
    "cohere2": GGUFFamily("cohere2", _cohere2),
    "ernie4_5": GGUFFamily("ernie4_5"),
    "exaone4": GGUFFamily("exaone4", _exaone4, names=_AFTER | _NORMS_OF_HEADS),
    "gemma": GGUFFamily("gemma", norms_plus_one=True),
    "gemma2": GGUFFamily("gemma2", _gemma2, names=_GEMMA, norms_plus_one=True),
    "gemma3": GGUFFamily("gemma3_text", _gemma3, names=_GEMMA | _NORMS_OF_HEADS, norms_plus_one=True),
    "glm4": GGUFFamily("glm4", _glm4, names=_GLM4),
    "granite": GGUFFamily("granite", lambda keys: _llama(keys) | _scales_of(keys), permuted=True),
    "hunyuan-dense": GGUFFamily("hunyuan_v1_dense", names=_HUNYUAN),
    "llama": GGUFFamily("llama", _llama, permuted=True),
    "mistral3": GGUFFamily("ministral3", _mistral3, permuted=True),
    "olmo2": GGUFFamily("olmo2", _olmo2, names=_AFTER | _NORMS_OF_HEADS),
    "phi3": GGUFFamily("phi3", _phi3, names={"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}),
    "qwen2": GGUFFamily("qwen2"),
    "qwen3": GGUFFamily("qwen3", names=_NORMS_OF_HEADS),
    "seed_oss": GGUFFamily("seed_oss", _seed_oss, names={"post_attention_norm": "post_attention_layernorm"}),
    "smollm3": GGUFFamily("smollm3", _llama, permuted=True),
    "stablelm": GGUFFamily("stablelm", _stablelm),
    "starcoder2": GGUFFamily("starcoder2", _starcoder2, names={"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"}),
    "glm4moe": GGUFFamily("glm4_moe", _glm4_moe, names=_EXPERTS | _NORMS_OF_HEADS | _GLM4_MOE),
    "gpt-oss": GGUFFamily("gpt_oss", _gpt_oss, names=_EXPERTS | _GPT_OSS, pairs_experts=True),
    "granitemoe": GGUFFamily(
        "granitemoe", lambda keys: _mixture(keys) | _scales_of(keys), names=_GRANITE_MOE, permuted=True
    ),
    "mixtral": GGUFFamily("mixtral", _mixture, names=_EXPERTS, permuted=True),
    "olmoe": GGUFFamily("olmoe", _olmoe, names=_EXPERTS | _NORMS_OF_HEADS),
    "qwen2moe": GGUFFamily("qwen2_moe", _qwen2_moe, names=_EXPERTS | _SHARED_EXPERT, undo=_OF_SHARED_GATE),
    "qwen3moe": GGUFFamily("qwen3_moe", _qwen3_moe, names=_EXPERTS | _NORMS_OF_HEADS),
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
        names=_EXPERTS | _SHARED_EXPERT | _NORMS_OF_HEADS | _QWEN3_NEXT,
        undo=_OF_SHARED_GATE | {"ssm_conv1d": _channels, "ssm_a": _decay, "ssm_norm": lambda stored: stored},
        order={"attn_gate": _by_key_heads},
        norms_plus_one=True,
    ),
}


def family_of(keys: Keys) -> GGUFFamily:
    """The family of a file. Raises ModelError if it is not supported."""
    name = keys.architecture
    if name == "mistral3" and keys.real(_GROWTH) is None:  # the text part of an older vision-language model
        name = "llama"
    if name == "llama" and keys.integer("expert_count", least=0):
        name = "mixtral"
    if name not in FAMILIES:
        known = ", ".join(sorted(FAMILIES))
        raise ModelError(f"{keys.container.path}: general.architecture is {shown(name)}; supported: {known}")
    return FAMILIES[name]


def config_of(container: Container, *, of_transformers: bool = False) -> PreTrainedConfig:
    """The config of the model in a file; with `of_transformers` always one of transformers' classes.

    Raises:
        ModelError: the model is not supported, or its config is incomplete.
    """
    keys = Keys(container)
    family = family_of(keys)
    has_codes = any(not tensor.kind.is_float for tensor in container.tensors.values())
    fields = _common(keys) | family.describe(keys)
    _check_heads(keys, fields["rope_parameters"])
    fields["quantization_config"] = {"quant_method": METHOD, HAS_CODES: has_codes}
    own: Any = None if of_transformers else described_by(fields, family.model_type)
    if own is not None:
        return cast("PreTrainedConfig", own)
    from transformers import AutoConfig

    config: PreTrainedConfig = AutoConfig.for_model(family.model_type, **fields)
    return config


def _common(keys: Keys) -> dict[str, Any]:
    container = keys.container
    embedding = container.tensors.get("token_embd.weight")
    if embedding is None:
        raise ModelError(f"{container.path} has no tensor token_embd.weight")
    check_tokens(container)
    ends = end_tokens_in(container)
    return {
        "vocab_size": embedding.shape[0],
        "hidden_size": keys.size("embedding_length"),
        "intermediate_size": keys.need("feed_forward_length"),  # no such tensor if all layers have experts
        "num_hidden_layers": keys.layers,
        "num_attention_heads": keys.heads,
        "num_key_value_heads": keys.kv_heads,
        "head_dim": keys.head_dim,
        "rms_norm_eps": keys.epsilon(EPSILON if keys.full(EPSILON) in container.metadata else _RMS_EPSILON),
        "max_position_embeddings": keys.need("context_length", least=2),
        "tie_word_embeddings": "output.weight" not in container.tensors,
        "bos_token_id": container.get("tokenizer.ggml.bos_token_id", int),
        "eos_token_id": ends[0] if len(ends) == 1 else ends or None,
        "pad_token_id": None,
        "rope_parameters": rope_of(keys),
        "dtype": _float_type(container),
    }


def _check_heads(keys: Keys, rope: dict[str, Any]) -> None:
    """Refuse too many heads, values of another size, and partial rotation that the family does not have."""
    keys.check_width("attention.head_count", keys.heads * keys.head_dim)
    if keys.integer("attention.value_length", keys.head_dim) != keys.head_dim:
        raise keys.fault("attention.value_length", keys.need("attention.value_length"), f"{keys.head_dim}, as for keys")
    if "partial_rotary_factor" not in rope and keys.rotated != keys.head_dim:
        raise keys.fault("rope.dimension_count", keys.rotated, f"the size of a head, {keys.head_dim}")


def _float_type(container: Container) -> torch.dtype:
    """The type of the majority of float data; bfloat16 if most weights are codes."""
    counts = Counter[torch.dtype | None]()
    for tensor in container.tensors.values():
        counts[float_type(tensor.kind)] += tensor.num_weights
    return counts.most_common(1)[0][0] or torch.bfloat16
