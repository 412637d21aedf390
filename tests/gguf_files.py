"""GGUF files for tests, written by llama.cpp's own package, and the float models that its dequantisation gives."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Type
from transformers import AutoConfig, LlamaConfig, PreTrainedConfig, PreTrainedModel, Qwen3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from tests import zoo

Change = Callable[[torch.Tensor], torch.Tensor]

ARCHITECTURES = {  # llama.cpp's names, where they are not transformers'
    "gemma3_text": "gemma3",
    "glm4_moe": "glm4moe",
    "gpt_oss": "gpt-oss",
    "hunyuan_v1_dense": "hunyuan-dense",
    "mixtral": "llama",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
    "qwen3_next": "qwen3next",
    "ministral3": "mistral3",
}
PERMUTED = (
    "granite",
    "granitemoe",
    "llama",
    "ministral3",
    "mixtral",
    "smollm3",
)  # of whose queries and keys the rows are reordered
_STEPS = {  # of random blocks of types that the package does not write: where their float16 are, and how large
    Type.Q4_K: {0: 0.002, 2: 0.015},
    Type.Q5_K: {0: 0.001, 2: 0.015},
    Type.Q6_K: {208: 0.0002},
    Type.Q2_K: {80: 0.02, 82: 0.03},
    Type.Q3_K: {108: 0.003},
    Type.IQ4_NL: {0: 0.003},
    Type.IQ4_XS: {0: 0.0002},
    Type.IQ3_S: {0: 0.001},
}
WIDE = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "vocab_size": zoo.VOCAB, "max_position_embeddings": 128, "bos_token_id": 1,
         "eos_token_id": zoo.END}  # fmt: skip

SMALL = WIDE | {"hidden_size": 64, "intermediate_size": 96}
_YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}


def llama(**changes: object) -> LlamaConfig:
    """A Llama whose rows are whole blocks of every type."""
    return LlamaConfig(**WIDE | changes)


def qwen3(**changes: object) -> Qwen3Config:
    """A Qwen3 whose rows are whole blocks of every type; its head tied."""
    return Qwen3Config(**WIDE | {"head_dim": 64, "tie_word_embeddings": True} | changes)


def mixed(name: str) -> Type:
    """The type of a matrix in a mixture as most published files have it: the head and some others finer."""
    finer = {"output": Type.Q6_K, "attn_v": Type.Q6_K, "ffn_down": Type.Q5_K, "attn_q": Type.Q8_0}
    return finer.get(name.split(".")[-2], Type.Q4_K)


def config_of(family: str, sizes: dict[str, Any] = SMALL) -> PreTrainedConfig:
    """A config of one of the `families`, in other sizes."""
    if family == "phi3-longrope":
        return zoo.longrope()
    kind, own = (_families() | _mixtures(sizes))[family]
    return AutoConfig.for_model(kind, **sizes | {"pad_token_id": 0} | own)


def families() -> dict[str, PreTrainedConfig]:
    """A config of every family, and of every kind of rotary embedding, that is read."""
    return {name: config_of(name) for name in (*_families(), "phi3-longrope", *_mixtures(SMALL))}


def _families() -> dict[str, tuple[str, dict[str, Any]]]:
    """Of those without experts the model type, and what it has beside the sizes."""
    rope = {"rope_theta": 1e4}
    llama3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
              "original_max_position_embeddings": 8192}  # fmt: skip
    linear = rope | {"rope_type": "linear", "factor": 4.0}
    half = {"rope_parameters": rope | {"rope_type": "default", "partial_rotary_factor": 0.5}}
    scaled = rope | {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8, "beta_fast": 32.0,
                     "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1}  # fmt: skip
    window = {"head_dim": 32, "sliding_window": 9, "query_pre_attn_scalar": 32}
    four = {"num_hidden_layers": 4}  # in which one has no window, or no rotary embedding
    renamed = {
        "llama": ("llama", {"attention_bias": True}),
        "llama-3": ("llama", {"max_position_embeddings": 16384, "rope_parameters": llama3}),
        "llama-linear": ("llama", {"rope_parameters": linear}),
        "qwen2-yarn": ("qwen2", {"rope_parameters": _YARN}),
        "gemma3": ("gemma3_text", window | {"num_hidden_layers": 7}),
    }
    own = {
        "qwen2": {},
        "qwen3": {"head_dim": 32, "tie_word_embeddings": True},
        "gemma2": window,
        "phi3": {"sliding_window": 20},
        "cohere2": four | {"head_dim": 16, "sliding_window": 9, "logit_scale": 0.5},
        "ernie4_5": {"head_dim": 32},
        "exaone4": four | {"head_dim": 16, "sliding_window": 9},
        "gemma": {"head_dim": 32},
        "glm4": half | {"head_dim": 16},
        "granite": {"attention_multiplier": 0.2, "embedding_multiplier": 3.0, "logits_scaling": 2.0,
                    "residual_multiplier": 0.5},
        "hunyuan_v1_dense": {"head_dim": 32},
        "lfm2": four | {"layer_types": ["conv", "full_attention"] * 2, "block_auto_adjust_ff_dim": False},
        "ministral3": {"rope_parameters": scaled},
        "olmo2": {},
        "seed_oss": {"head_dim": 32},
        "smollm3": four,
        "stablelm": half | {"use_qkv_bias": True},
        "starcoder2": {"norm_epsilon": 1e-6, "sliding_window": 4096},
    }  # fmt: skip
    return renamed | {name: (name, more) for name, more in own.items()}


def _mixtures(sizes: dict[str, Any]) -> dict[str, tuple[str, dict[str, Any]]]:
    """The same of those with experts."""
    chosen = {"num_experts_per_tok": 2}
    experts = chosen | {"num_experts": 4, "moe_intermediate_size": sizes["hidden_size"]}
    half = {"head_dim": 16, "rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}
    exact = {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}  # as all published gpt-oss have it
    delta = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8,
             "linear_value_head_dim": 8}  # fmt: skip
    return {
        "mixtral": ("mixtral", chosen | {"num_local_experts": 4}),
        "qwen2moe": ("qwen2_moe", experts | {"shared_expert_intermediate_size": sizes["intermediate_size"],
                                             "norm_topk_prob": False}),
        "qwen3moe": ("qwen3_moe", experts | {"head_dim": 64, "norm_topk_prob": True}),
        "glm4moe": ("glm4_moe", experts | half | {"n_routed_experts": 4, "use_qk_norm": True, "attention_bias": True,
                                                  "routed_scaling_factor": 1.5}),
        "qwen3next": ("qwen3_next", experts | half | delta | {"num_hidden_layers": 4, "norm_topk_prob": True,
                                                              "shared_expert_intermediate_size": 96}),
        "granitemoe": ("granitemoe", chosen | {"num_local_experts": 4, "embedding_multiplier": 3.0}),
        "olmoe": ("olmoe", chosen | {"num_experts": 4}),
        "gpt-oss": ("gpt_oss", chosen | {"num_local_experts": 4, "head_dim": 32, "sliding_window": 9,
                                         "rope_parameters": _YARN | exact}),
    }  # fmt: skip


@dataclass(frozen=True)
class Written:
    """A file, the types of its tensors by their names in it, and the float32 model that it stands for."""

    path: Path
    model: PreTrainedModel
    types: dict[str, Type] = field(default_factory=dict)


def write(
    path: Path,
    config: PreTrainedConfig,
    kind: Type | Callable[[str], Type],
    describe: Callable[[gguf.GGUFWriter], None] = lambda _: None,
    seed: int = 0,
    tensors_of_a_part: int = 0,
) -> Written:
    """Write a model of random weights; `kind` is the type of its matrices, or chooses it by the name in the file.

    `describe` adds to the metadata, for example a tokenizer. With `tensors_of_a_part` the model is cut into several
    files, and `path` is the stem of their names; that of the result is the first file.
    """
    name = _name(config)
    writer = gguf.GGUFWriter(path, name, split_max_tensors=tensors_of_a_part)
    _describe(writer, config)
    describe(writer)
    model, types = zoo.with_large_weights(config, seed).float(), dict[str, Type]()
    weights = model.state_dict()
    if config.tie_word_embeddings:
        del weights["lm_head.weight"]
    chance = torch.Generator().manual_seed(seed)
    for hf_name, whole in weights.items():
        if whole.ndim == 1:  # that no norm is like another, and no bias 0
            whole.add_(torch.randn(whole.shape, generator=chance) * 0.2)
        for stored, part in _parts(config, hf_name, whole):
            chosen = kind(stored) if callable(kind) else kind
            types[stored] = Type.F32 if _stays_float(stored, part) else chosen
            change, back = _changes(name, stored)
            changed = change(part)
            order = _order(config, stored, len(changed))
            data = _blocks(changed[order].numpy(), types[stored], seed)
            writer.add_tensor(stored, data, raw_dtype=types[stored])
            floats = torch.from_numpy(_floats(data, types[stored])[np.argsort(order)])
            part.copy_(back(floats).view(part.shape))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return Written(min(path.parent.glob(f"{path.stem}*")) if tensors_of_a_part else path, model, types)


def _name(config: PreTrainedConfig) -> str:
    return ARCHITECTURES.get(config.model_type, config.model_type)


def _arch(name: str) -> gguf.MODEL_ARCH:
    return next(arch for arch, known in gguf.MODEL_ARCH_NAMES.items() if known == name)


def _parts(config: PreTrainedConfig, hf_name: str, weight: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of the file that hold a weight, by their names in it: views of the weight."""
    names = gguf.get_tensor_name_map(_arch(_name(config)), config.num_hidden_layers)
    stem, _, kind = _published(hf_name).rpartition(".")
    if kind == "A_log":
        yield f"{names.get_name(f'{stem}.{kind}')}", weight
        return
    if stem.endswith("in_proj_qkvz"):
        yield from _by_kind(config, stem.split(".")[2], weight)
        return
    if not stem.endswith("experts"):
        has_kind = kind in ("weight", "bias")
        yield f"{names.get_name(stem if has_kind else f'{stem}.{kind}')}.{kind if has_kind else 'weight'}", weight
        return
    suffix, stack = "bias" if kind.endswith("bias") else "weight", kind.removesuffix("_bias")
    paired = config.model_type == "gpt_oss"
    matrices = (
        weight.transpose(1, 2) if paired and suffix == "weight" else weight
    )  # [experts, out, in], or [experts, out]
    if stack == "down_proj":
        yield f"{names.get_name(f'{stem}.{stack}')}.{suffix}", matrices
        return
    halves = (matrices[:, ::2], matrices[:, 1::2]) if paired else matrices.chunk(2, 1)
    for half, part in zip(("gate_proj", "up_proj"), halves, strict=True):
        yield f"{names.get_name(f'{stem}.{half}')}.{suffix}", part


def _by_kind(config: PreTrainedConfig, layer: str, weight: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Queries, keys and values of all heads, and the gates, of a matrix that has them by key heads."""
    weight.copy_(weight.half())  # the parts are copies: what is written must be the weight without a rounding
    heads, wide = config.linear_num_key_heads, config.linear_num_value_heads * config.linear_value_head_dim
    sizes = [config.linear_key_head_dim] * 2 + [wide // heads] * 2
    *qkv, gate = (part.flatten(0, 1) for part in weight.unflatten(0, (heads, -1)).split(sizes, 1))
    yield f"blk.{layer}.attn_qkv.weight", torch.cat(qkv)
    yield f"blk.{layer}.attn_gate.weight", gate.clone()


def _published(hf_name: str) -> str:
    """The name by which the converter knows a weight, where transformers now has another."""
    for ours, theirs in _RENAMED.items():
        hf_name = hf_name.replace(ours, theirs)
    return hf_name


_RENAMED = {
    "block_sparse_moe.experts": "mlp.experts",
    "block_sparse_moe.router.": "block_sparse_moe.router.layer.",
    "e_score_correction_bias": "e_score_correction.bias",
    "linear_attn.dt_bias": "linear_attn.dt_proj.bias",
}


def _stays_float(stored: str, weight: torch.Tensor) -> bool:
    """Whether llama.cpp never quantises a tensor: vectors, routers, convolutions."""
    return weight.ndim == 1 or stored.endswith(".bias") or "ffn_gate_inp" in stored or "conv" in stored


def _changes(name: str, stored: str) -> tuple[Change, Change]:
    """What the converter does to numbers, and its inverse."""
    if stored.endswith("ssm_a"):
        return (lambda weight: -weight.exp()), (lambda weight: (-weight).log())
    if name.startswith(("gemma", "qwen3next")) and "norm" in stored and "ssm_norm" not in stored:
        return (lambda weight: weight + 1), (lambda weight: weight - 1)
    if "conv.weight" in stored or "conv1d" in stored:
        return (lambda weight: weight.squeeze(1)), (lambda weight: weight)
    if "ffn_gate_inp_shexp" in stored:
        return (lambda weight: weight[0]), (lambda weight: weight)
    return (lambda weight: weight), (lambda weight: weight)


def _order(config: PreTrainedConfig, name: str, rows: int) -> np.ndarray:
    """The rows of a weight in the order of the file: of a Llama's queries and keys, halves of heads in pairs."""
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}.get(name.split(".")[-2])
    plain = np.arange(rows)
    if config.model_type not in PERMUTED or heads is None:
        return plain
    return plain.reshape(heads, 2, -1).swapaxes(1, 2).reshape(-1)


def _blocks(weight: np.ndarray, kind: Type, seed: int) -> np.ndarray:
    if kind not in _STEPS:
        return gguf.quants.quantize(weight, kind)
    weights, size = gguf.GGML_QUANT_SIZES[kind]
    drawn = np.random.default_rng(seed).integers(
        0, 256, (*weight.shape[:-1], weight.shape[-1] // weights, size), np.uint8
    )
    for at, step in _STEPS[kind].items():
        drawn[..., at : at + 2] = np.array([step], np.float16).view(np.uint8)
    return drawn.reshape(*weight.shape[:-1], -1)


def _floats(data: np.ndarray, kind: Type) -> np.ndarray:
    return gguf.quants.dequantize(data, kind)


# Writers of further numbers, by the fields of configs.
_NUMBERS: dict[str, Callable[[gguf.GGUFWriter, Any], None]] = {
    "attention_multiplier": gguf.GGUFWriter.add_attention_scale,
    "conv_L_cache": gguf.GGUFWriter.add_shortconv_l_cache,
    "attn_logit_softcapping": gguf.GGUFWriter.add_attn_logit_softcapping,
    "embedding_multiplier": gguf.GGUFWriter.add_embedding_scale,
    "final_logit_softcapping": gguf.GGUFWriter.add_final_logit_softcapping,
    "first_k_dense_replace": gguf.GGUFWriter.add_leading_dense_block_count,
    "layer_norm_eps": gguf.GGUFWriter.add_layer_norm_eps,
    "logit_scale": gguf.GGUFWriter.add_logit_scale,
    "logits_scaling": gguf.GGUFWriter.add_logit_scale,
    "n_shared_experts": gguf.GGUFWriter.add_expert_shared_count,
    "norm_eps": gguf.GGUFWriter.add_layer_norm_rms_eps,
    "norm_epsilon": gguf.GGUFWriter.add_layer_norm_eps,
    "residual_multiplier": gguf.GGUFWriter.add_residual_scale,
    "routed_scaling_factor": gguf.GGUFWriter.add_expert_weights_scale,
    "sliding_window": gguf.GGUFWriter.add_sliding_window,
    "use_parallel_residual": gguf.GGUFWriter.add_parallel_residual,
}
_UNWRITTEN = {("starcoder2", "sliding_window")}


def _describe(writer: gguf.GGUFWriter, config: PreTrainedConfig) -> None:
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    drafting = 1 if config.model_type == "glm4_moe" else 0  # layers of published files that transformers leaves out
    writer.add_block_count(config.num_hidden_layers + drafting)
    if drafting:
        writer.add_nextn_predict_layers(drafting)
        writer.add_tensor(f"blk.{config.num_hidden_layers}.nextn.eh_proj.weight", np.zeros((2, 2), np.float32))
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    kinds = config.layer_types if config.model_type == "lfm2" else ()
    heads = [config.num_key_value_heads if kind == "full_attention" else 0 for kind in kinds]
    writer.add_head_count_kv(heads or config.num_key_value_heads)
    if hasattr(config, "rms_norm_eps"):
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_bos_token_id(config.bos_token_id)
    writer.add_eos_token_id(config.eos_token_id)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1.0)))
    _describe_rope(writer, config)
    for number, add in _NUMBERS.items():
        if getattr(config, number, None) and (config.model_type, number) not in _UNWRITTEN:
            add(writer, getattr(config, number))
    if hasattr(config, "linear_num_key_heads"):
        writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
        writer.add_ssm_state_size(config.linear_key_head_dim)
        writer.add_ssm_group_count(config.linear_num_key_heads)
        writer.add_ssm_time_step_rank(config.linear_num_value_heads)
        writer.add_ssm_inner_size(config.linear_value_head_dim * config.linear_num_value_heads)
    if hasattr(config, "num_experts_per_tok"):
        _describe_experts(writer, config)


def _describe_experts(writer: gguf.GGUFWriter, config: PreTrainedConfig) -> None:
    names = ("num_local_experts", "num_experts", "n_routed_experts")
    writer.add_expert_count(next(getattr(config, name) for name in names if hasattr(config, name)))
    writer.add_expert_used_count(config.num_experts_per_tok)
    if config.model_type != "mixtral":
        writer.add_expert_feed_forward_length(getattr(config, "moe_intermediate_size", config.intermediate_size))
    if hasattr(config, "shared_expert_intermediate_size"):
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)


def _describe_rope(writer: gguf.GGUFWriter, config: PreTrainedConfig) -> None:
    """Write the rotary embedding as llama.cpp's converter does: some kinds as divisors of the frequencies."""
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    kind, original = rope["rope_type"], rope.get("original_max_position_embeddings")
    writer.add_rope_freq_base(rope["rope_theta"])
    if kind == "llama3":
        scaled, _ = ROPE_INIT_FUNCTIONS[kind](config, "cpu")
        plain = rope["rope_theta"] ** -(torch.arange(len(scaled), dtype=torch.float64) / len(scaled))
        writer.add_tensor("rope_freqs.weight", (plain / scaled).float().numpy())
    elif kind == "longrope":
        writer.add_rope_scaling_orig_ctx_len(original)
        for name in ("long", "short"):
            writer.add_tensor(f"rope_factors_{name}.weight", np.array(rope[f"{name}_factor"], np.float32))
    elif kind in ("linear", "yarn"):
        if "llama_4_scaling_beta" in rope:
            writer.add_rope_scaling_yarn_log_mul(rope["mscale_all_dim"])
            writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])
        writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
        writer.add_rope_scaling_factor(rope["factor"])
        if original is not None:
            writer.add_rope_scaling_orig_ctx_len(original)
