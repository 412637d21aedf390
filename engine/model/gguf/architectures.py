"""The families of models that are read from GGUF files: their configs, and the names and forms of their weights.

llama.cpp's converter renames weights and changes a few: it reorders the rows of a Llama's queries and keys for a
rotation of neighbouring pairs, and adds 1 to a Gemma's norms. Both are undone here, on codes without any rounding.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, PreTrainedConfig

from engine.errors import ModelError
from engine.model.gguf.blocks import dequantised, float_type, raw_of
from engine.model.gguf.container import Container, meant
from engine.model.gguf.tokenizer import end_tokens_in

METHOD, HAS_CODES = "gguf", "has_codes"  # in `quantization_config`, with which configs of GGUF files are marked
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
_GEMMA = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_LONG, _SHORT, _FREQUENCIES = "rope_factors_long.weight", "rope_factors_short.weight", "rope_freqs.weight"
_NO_WEIGHTS = (_LONG, _SHORT, _FREQUENCIES)  # tables that the config describes
_TIED = 1e-5  # relative error of float32 tables that were computed in two ways


@dataclass(frozen=True, slots=True)
class Architecture:
    """One family: what llama.cpp calls it is the key of `ARCHITECTURES`."""

    model_type: str  # of transformers
    describe: Callable[[_Keys], dict[str, Any]] = lambda _keys: {}  # fields of the config besides `_common`
    names: Mapping[str, str] = field(default_factory=dict)  # of parts of a block, besides `_BLOCK`
    permuted: bool = False  # whether rows of queries and keys are reordered
    norms_plus_one: bool = False

    def renamed(self, name: str) -> str | None:
        """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`; None where the family has no such part."""
        stem, _, kind = name.rpartition(".")
        if stem in _OUTER:
            return f"{_OUTER[stem]}.{kind}"
        first, _, rest = stem.partition(".")
        layer, _, part = rest.partition(".")
        found = {**_BLOCK, **self.names}.get(part)
        return f"model.layers.{layer}.{found}.{kind}" if first == "blk" and found else None


class _Keys:
    """The metadata of a file whose keys begin with its architecture."""

    def __init__(self, container: Container, prefix: str) -> None:
        self.container, self._prefix = container, prefix

    def need(self, key: str) -> int:
        """A number that the family always has."""
        return self.container.need(f"{self._prefix}.{key}", int)

    def real(self, key: str, default: float | None = None) -> float | None:
        return default if (found := self.container.get(f"{self._prefix}.{key}", float)) is None else found

    def integer(self, key: str, default: int | None = None) -> int | None:
        return default if (found := self.container.get(f"{self._prefix}.{key}", int)) is None else found

    def text(self, key: str) -> str | None:
        return self.container.get(f"{self._prefix}.{key}", str)

    def refuse(self, key: str, why: str) -> None:
        """Raise ModelError where a number of the metadata is there and not 0."""
        if self.container.metadata.get(f"{self._prefix}.{key}"):
            raise ModelError(f"{self.container.path}: {self._prefix}.{key} is set: {why}")

    @property
    def heads(self) -> int:
        return self.need("attention.head_count")

    @property
    def head_dim(self) -> int:
        return self.integer("attention.key_length") or self.need("embedding_length") // self.heads

    def table(self, name: str) -> Tensor | None:
        """A small table of floats; None where the file has none."""
        tensor = self.container.tensors.get(name)
        return None if tensor is None else dequantised(tensor.kind, raw_of(self.container, tensor)).float()


def architecture_of(container: Container) -> Architecture:
    """The family of a file. Raises ModelError, which names it, where it is none of ours."""
    name = container.need("general.architecture", str)
    found = ARCHITECTURES.get(name)
    if found is None:
        known = ", ".join(ARCHITECTURES)
        raise ModelError(f"{container.path} is a {name} model; GGUF files are read of {known}")
    return found


def config_of(container: Container) -> PreTrainedConfig:
    """The config of the model in a file.

    Raises:
        ModelError: the file holds a model that is not read, or lacks a number of its config.
    """
    family = architecture_of(container)
    keys = _Keys(container, container.need("general.architecture", str))
    has_codes = any(not tensor.kind.is_float for tensor in container.tensors.values())
    fields = _common(keys) | family.describe(keys)
    fields["quantization_config"] = {"quant_method": METHOD, HAS_CODES: has_codes}
    config: PreTrainedConfig = AutoConfig.for_model(family.model_type, **fields)
    return config


def _common(keys: _Keys) -> dict[str, Any]:
    keys.refuse("expert_count", "mixtures of experts are not read from GGUF files")
    container = keys.container
    embedding = container.tensors.get("token_embd.weight")
    if embedding is None:
        raise ModelError(f"{container.path} has no tensor token_embd.weight")
    ends = end_tokens_in(container)
    return {
        "vocab_size": embedding.shape[0],
        "hidden_size": keys.need("embedding_length"),
        "intermediate_size": keys.need("feed_forward_length"),
        "num_hidden_layers": keys.need("block_count"),
        "num_attention_heads": keys.heads,
        "num_key_value_heads": keys.integer("attention.head_count_kv", keys.heads),
        "head_dim": keys.head_dim,
        "rms_norm_eps": keys.real("attention.layer_norm_rms_epsilon", 1e-5),
        "max_position_embeddings": keys.need("context_length"),
        "tie_word_embeddings": "output.weight" not in container.tensors,
        "bos_token_id": container.get("tokenizer.ggml.bos_token_id", int),
        "eos_token_id": ends[0] if len(ends) == 1 else ends or None,
        "pad_token_id": None,
        "rope_parameters": _rope(keys),
        "dtype": _float_type(container),
    }


def _float_type(container: Container) -> torch.dtype:
    """The type of most numbers that are stored as floats; bfloat16 where most are codes, which lose least in it."""
    counts: dict[torch.dtype | None, int] = {}
    for tensor in container.tensors.values():
        kind = float_type(tensor.kind)
        counts[kind] = counts.get(kind, 0) + tensor.num_weights
    most = max(counts, key=lambda kind: counts[kind])
    return torch.bfloat16 if most is None else most


def _rope(keys: _Keys) -> dict[str, Any]:
    """The rotary embedding, with the scaling that the metadata names."""
    plain = {"rope_type": "default", "rope_theta": keys.real("rope.freq_base", 10_000.0)}
    kind, factor = keys.text("rope.scaling.type"), keys.real("rope.scaling.factor") or keys.real("rope.scale_linear")
    if kind in (None, "none") and factor in (None, 0.0, 1.0):
        return plain
    if kind in (None, "linear"):
        return plain | {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        original = keys.need("rope.scaling.original_context_length")
        return plain | {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    if kind in ("longrope", "su"):  # its tables are tensors: `_phi3`
        return plain
    raise ModelError(f"{keys.container.path}: rope.scaling.type is {kind!r}; expected none, linear, yarn or longrope")


def _llama(keys: _Keys) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "attention_bias": "blk.0.attn_q.bias" in keys.container.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in keys.container.tensors,
    }
    factors = keys.table(_FREQUENCIES)
    return fields if factors is None else fields | {"rope_parameters": _llama3(keys, factors)}


def _llama3(keys: _Keys, factors: Tensor) -> dict[str, Any]:
    """The parameters of Llama 3's rotary embedding, from the divisors of its frequencies that the file has instead.

    All published Llamas share the bounds 1 and 4 and a first training at 8,192 tokens; others may have another power of
    two, of which any that gives the same table is as good.
    """
    theta, half = keys.real("rope.freq_base", 10_000.0), torch.arange(len(factors), dtype=torch.float64) / len(factors)
    assert theta is not None
    waves = 2 * math.pi * theta**half
    factor = float(factors.max())
    found = {"rope_type": "llama3", "rope_theta": theta, "factor": factor}
    low, high = 1.0, 4.0
    for original in (2**bits for bits in (13, 11, 12, 14, 15, 16, 17)):
        smooth = (original / waves - low) / (high - low)
        between = 1 / ((1 - smooth) / factor + smooth)
        wanted = torch.where(waves < original / high, 1.0, torch.where(waves > original / low, factors.max(), between))
        if torch.allclose(wanted.float(), factors, rtol=_TIED, atol=0):
            bounds = {"low_freq_factor": low, "high_freq_factor": high}
            return found | bounds | {"original_max_position_embeddings": original}
    raise ModelError(f"{keys.container.path}: {_FREQUENCIES} is no table of Llama 3: its frequencies cannot be served")


def _gemma2(keys: _Keys) -> dict[str, Any]:
    return {
        "sliding_window": keys.need("attention.sliding_window"),
        "attn_logit_softcapping": keys.real("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": keys.real("final_logit_softcapping", 30.0),
        "query_pre_attn_scalar": _scaled_by(keys, largest=46),
    }


def _gemma3(keys: _Keys) -> dict[str, Any]:
    rope = _rope(keys)
    local = {"rope_type": "default", "rope_theta": 10_000.0}  # of the layers with a window, in all published models
    return {
        "sliding_window": keys.need("attention.sliding_window"),
        "query_pre_attn_scalar": _scaled_by(keys, largest=62),
        "final_logit_softcapping": keys.real("final_logit_softcapping"),
        "rope_parameters": {"full_attention": rope, "sliding_attention": local},
    }


def _scaled_by(keys: _Keys, largest: int) -> int:
    """The number whose root divides Gemma's attention: the largest model, known by its layers, has one of its own."""
    return keys.need("embedding_length") // keys.heads if keys.need("block_count") == largest else keys.head_dim


def _phi3(keys: _Keys) -> dict[str, Any]:
    rotated, rope = keys.need("rope.dimension_count"), _rope(keys)
    rope["partial_rotary_factor"] = rotated / keys.head_dim
    fields: dict[str, Any] = {"sliding_window": keys.integer("attention.sliding_window") or None}
    long, short = keys.table(_LONG), keys.table(_SHORT)
    if long is not None and short is not None:
        original = keys.need("rope.scaling.original_context_length")
        rope |= {"rope_type": "longrope"}
        rope |= {"long_factor": list(map(meant, long.tolist())), "short_factor": list(map(meant, short.tolist()))}
        rope["original_max_position_embeddings"] = fields["original_max_position_embeddings"] = original
        factor = keys.real("rope.scaling.attn_factor")
        rope |= {} if factor is None else {"attention_factor": factor}
    return fields | {"rope_parameters": rope}


# By llama.cpp's names. Mistral's models are llama.
ARCHITECTURES = {
    "llama": Architecture("llama", _llama, permuted=True),
    "qwen2": Architecture("qwen2"),
    "qwen3": Architecture("qwen3", names=_NORMS_OF_HEADS),
    "gemma2": Architecture("gemma2", _gemma2, names=_GEMMA, norms_plus_one=True),
    "gemma3": Architecture("gemma3_text", _gemma3, names=_GEMMA | _NORMS_OF_HEADS, norms_plus_one=True),
    "phi3": Architecture("phi3", _phi3, names={"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}),
}


@dataclass(frozen=True, slots=True)
class Weight:
    """A weight of the model: the tensor of the file that holds it, and what undoes the converter's changes."""

    stored: str
    heads: int = 0  # of a matrix or bias whose rows are reordered within each head; else 0
    minus_one: bool = False

    def rows(self, count: int) -> Tensor | None:
        """The row of the file of each row of the weight; None where they are the same.

        A head of 4: file rows [0, 1, 2, 3] are the pairs (0, 2) and (1, 3) of the weight -> [0, 2, 1, 3].
        """
        if not self.heads:
            return None
        return torch.arange(count).view(self.heads, -1, 2).transpose(1, 2).reshape(-1)


def weights_of(container: Container) -> dict[str, Weight]:
    """The weights of the model in a file, by transformers' names.

    Raises:
        ModelError: the file holds a tensor for which its family has no place.
    """
    family = architecture_of(container)
    keys = _Keys(container, container.need("general.architecture", str))
    heads = {"attn_q": keys.heads, "attn_k": keys.integer("attention.head_count_kv", keys.heads) or keys.heads}
    found = dict[str, Weight]()
    for name in container.tensors:
        if name in _NO_WEIGHTS:
            continue
        renamed = family.renamed(name)
        if renamed is None:
            raise ModelError(f"{container.path} holds {name}, for which a {family.model_type} model has no place")
        part = name.split(".")[-2]
        found[renamed] = Weight(
            name, heads.get(part, 0) if family.permuted else 0, family.norms_plus_one and part.endswith("norm")
        )
    return found
