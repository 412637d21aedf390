"""GGUF files for tests, written by llama.cpp's own package, and the float models that its dequantisation gives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Type
from transformers import (
    Gemma2Config,
    Gemma3TextConfig,
    LlamaConfig,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from tests import zoo

ARCHITECTURES = {"gemma3_text": "gemma3"}  # llama.cpp's names, where they are not transformers'
_STEPS = {  # of random blocks of the K types, which the package does not write: where their float16 are, and how large
    Type.Q4_K: {0: 0.002, 2: 0.015},
    Type.Q5_K: {0: 0.001, 2: 0.015},
    Type.Q6_K: {208: 0.0002},
}
_WIDE = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "vocab_size": zoo.VOCAB, "max_position_embeddings": 128, "bos_token_id": 1,
         "eos_token_id": zoo.END}  # fmt: skip


def llama(**changes: object) -> LlamaConfig:
    """A Llama whose rows are whole blocks of every type."""
    return LlamaConfig(**_WIDE | changes)


def qwen3(**changes: object) -> Qwen3Config:
    """A Qwen3 whose rows are whole blocks of every type; its head tied."""
    return Qwen3Config(**_WIDE | {"head_dim": 64, "tie_word_embeddings": True} | changes)


def families() -> dict[str, PreTrainedConfig]:
    """A config of every family, and of every kind of rotary embedding, that is read."""
    llama3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaled = {"rope_theta": 1e4, "factor": 4.0}
    small = _WIDE | {"hidden_size": 64, "intermediate_size": 96}
    return {
        "llama": LlamaConfig(**small, attention_bias=True),
        "llama-3": LlamaConfig(
            **small | {"max_position_embeddings": 16384},
            rope_parameters=llama3 | {"original_max_position_embeddings": 8192},
        ),
        "llama-linear": LlamaConfig(**small, rope_parameters=scaled | {"rope_type": "linear"}),
        "qwen2": Qwen2Config(**small),
        "qwen2-yarn": Qwen2Config(
            **small, rope_parameters=scaled | {"rope_type": "yarn", "original_max_position_embeddings": 32}
        ),
        "qwen3": Qwen3Config(**small, head_dim=32, tie_word_embeddings=True),
        "gemma2": Gemma2Config(**small, head_dim=32, sliding_window=9, query_pre_attn_scalar=32),
        "gemma3": Gemma3TextConfig(
            **small | {"num_hidden_layers": 7}, head_dim=32, sliding_window=9, query_pre_attn_scalar=32
        ),
        "phi3": Phi3Config(**small, pad_token_id=0, sliding_window=20),
        "phi3-longrope": zoo.longrope(),
    }


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
) -> Written:
    """Write a model of random weights; `kind` is the type of its matrices, or chooses it by the name in the file.

    `describe` adds to the metadata, for example a tokenizer.
    """
    name = ARCHITECTURES.get(config.model_type, config.model_type)
    writer = gguf.GGUFWriter(path, name)
    _describe(writer, config)
    describe(writer)
    model, types = zoo.with_large_weights(config, seed).float(), dict[str, Type]()
    names = gguf.get_tensor_name_map(_arch(name), config.num_hidden_layers)
    weights = model.state_dict()
    if config.tie_word_embeddings:
        del weights["lm_head.weight"]
    for hf_name, weight in weights.items():
        stem, _, suffix = hf_name.rpartition(".")
        stored = f"{names.get_name(stem)}.{suffix}"
        chosen = kind(stored) if callable(kind) else kind
        types[stored] = Type.F32 if weight.ndim == 1 else chosen
        plus = 1.0 if name.startswith("gemma") and "norm" in stored else 0.0
        data = _blocks((weight + plus).numpy()[_order(config, stored, len(weight))], types[stored], seed)
        writer.add_tensor(stored, data, raw_dtype=types[stored])
        back = np.argsort(_order(config, stored, len(weight)))
        weight.copy_(torch.from_numpy(_floats(data, types[stored]))[back] - plus)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return Written(path, model, types)


def _arch(name: str) -> gguf.MODEL_ARCH:
    return next(arch for arch, known in gguf.MODEL_ARCH_NAMES.items() if known == name)


def _order(config: PreTrainedConfig, name: str, rows: int) -> np.ndarray:
    """The rows of a weight in the order of the file: of a Llama's queries and keys, halves of heads in pairs."""
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}.get(name.split(".")[-2])
    plain = np.arange(rows)
    if config.model_type != "llama" or heads is None:
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


def _describe(writer: gguf.GGUFWriter, config: PreTrainedConfig) -> None:
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_bos_token_id(config.bos_token_id)
    writer.add_eos_token_id(config.eos_token_id)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    _describe_rope(writer, config)
    if getattr(config, "sliding_window", None):
        writer.add_sliding_window(config.sliding_window)
    if getattr(config, "attn_logit_softcapping", None):
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
    if getattr(config, "final_logit_softcapping", None):
        writer.add_final_logit_softcapping(config.final_logit_softcapping)


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
        writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
        writer.add_rope_scaling_factor(rope["factor"])
        if original is not None:
            writer.add_rope_scaling_orig_ctx_len(original)
