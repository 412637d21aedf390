"""The config of the model in a GGUF file, and the names and forms of its weights.

llama.cpp's converter renames weights and changes a few: it reorders the rows of a Llama's queries and keys for a
rotation of neighbouring pairs, adds 1 to a Gemma's norms, and parts the two halves of a mixture's first matrices. All
of it is undone here, on codes without any rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from engine.errors import ModelError
from engine.model.decoder.families.described import described_by
from engine.model.gguf.blocks import float_type
from engine.model.gguf.container import Container
from engine.model.gguf.families import architecture_of
from engine.model.gguf.keys import EPSILON, Keys
from engine.model.gguf.names import GATE_UP, GGUFFamily, part_of
from engine.model.gguf.ropes import TABLES, rope_of
from engine.model.gguf.sizes import check_sizes
from engine.model.gguf.tokenizer import check_tokens, end_tokens_in

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_RMS_EPSILON = "attention.layer_norm_rms_epsilon"
METHOD, HAS_CODES = "gguf", "has_codes"  # in `quantization_config`, with which configs of GGUF files are marked


def config_of(container: Container, *, of_transformers: bool = False) -> PreTrainedConfig:
    """The config of the model in a file; with `of_transformers` always one of transformers' classes.

    Raises:
        ModelError: the file holds a model that is not read, or lacks a number of its config.
    """
    keys = Keys(container)
    family = architecture_of(keys)
    check_sizes(keys)
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
        "intermediate_size": keys.need("feed_forward_length"),  # of no tensor where all layers have experts
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
    """Refuse heads whose values have another size than keys, or of which only a part is rotated in such a family."""
    if keys.integer("attention.value_length", keys.head_dim) != keys.head_dim:
        raise keys.fault("attention.value_length", keys.need("attention.value_length"), f"{keys.head_dim}, as of keys")
    if "partial_rotary_factor" not in rope and keys.rotated != keys.head_dim:
        raise keys.fault("rope.dimension_count", keys.rotated, f"the size of a head, {keys.head_dim}")


def _float_type(container: Container) -> torch.dtype:
    """The type of most numbers that are stored as floats; bfloat16 where most are codes, which lose least in it."""
    counts: dict[torch.dtype | None, int] = {}
    for tensor in container.tensors.values():
        kind = float_type(tensor.kind)
        counts[kind] = counts.get(kind, 0) + tensor.num_weights
    most = max(counts, key=lambda kind: counts[kind])
    return torch.bfloat16 if most is None else most


@dataclass(frozen=True, slots=True)
class Weight:
    """A weight of the model: the tensors of the file that hold it, and what undoes the converter's changes.

    Attributes:
        stored: names of tensors, whose rows follow each other.
        order: of so many rows in the file, which of them each row of the weight is; None where they are the same.
        axis: the dimension of rows, of floats.
        transposed: whether the matrices of a stack are `[in, out]` in the model.
        undo: what is done to floats; None where nothing is.
    """

    stored: tuple[str, ...]
    order: Callable[[int], Tensor] | None = None
    axis: int = 0
    transposed: bool = False
    undo: Callable[[Tensor], Tensor] | None = None


def weights_of(container: Container) -> dict[str, Weight]:
    """The weights of the model in a file, by transformers' names.

    Raises:
        ModelError: the file holds a tensor for which its family has no place.
    """
    keys = Keys(container)
    family = architecture_of(keys)
    found = dict[str, Weight]()
    drafting = tuple(f"blk.{layer}." for layer in range(keys.layers, keys.blocks))
    for name in container.tensors:
        if name in TABLES or name.startswith(drafting):
            continue
        renamed = family.renamed(name)
        if renamed is None:
            raise ModelError(f"{container.path} holds {name}, for which a {family.model_type} model has no place")
        earlier = found.get(renamed)
        stored = (name,) if earlier is None else tuple(sorted((*earlier.stored, name)))
        found[renamed] = _weight(keys, family, stored)
    return found


def _weight(keys: Keys, family: GGUFFamily, stored: tuple[str, ...]) -> Weight:
    part = part_of(stored[0])
    in_pairs = family.pairs_experts and part.endswith("_exps")
    return Weight(
        stored,
        order=_order(keys, family, part),
        axis=-1 if in_pairs and stored[0].endswith(".bias") else 0,
        transposed=in_pairs and stored[0].endswith(".weight"),
        undo=family.undone(part),
    )


def _order(keys: Keys, family: GGUFFamily, part: str) -> Callable[[int], Tensor] | None:
    heads = {"attn_q": keys.heads, "attn_k": keys.kv_heads}
    if family.permuted and part in heads:
        return partial(_halves, heads[part])
    if family.pairs_experts and part in GATE_UP:
        return lambda count: torch.arange(count).view(2, -1).t().reshape(-1)
    made = family.order.get(part)
    return None if made is None else partial(made, keys)


def _halves(heads: int, count: int) -> Tensor:
    """Neighbouring pairs of each head as two halves of it.

    A head of 4: file rows [0, 1, 2, 3] are the pairs (0, 2) and (1, 3) of the weight -> [0, 2, 1, 3].
    """
    return torch.arange(count).view(heads, -1, 2).transpose(1, 2).reshape(-1)
