"""The shapes of the measured models in the form of transformers' configs. This module does not import torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

_ROPE = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
         "original_max_position_embeddings": 8192}  # fmt: skip
_SHARED = {"vocab_size": 128256, "max_position_embeddings": 131072, "rope_parameters": _ROPE, "num_attention_heads": 32,
           "num_key_value_heads": 8, "eos_token_id": None}  # fmt: skip
SHAPES: dict[str, Any] = {
    "8b": {**_SHARED, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "head_dim": 128},
    "1b": {**_SHARED, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "head_dim": 64,
           "tie_word_embeddings": True},
    "tiny": {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 16,
             "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 4096, "eos_token_id": None},
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Heads:
    """The part of a model's shape that attention uses."""

    heads: int
    kv_heads: int
    dim: int

    @classmethod
    def of(cls, shape: str) -> Heads:
        """Return the heads of `8b`, `1b` or `tiny`."""
        found = SHAPES[shape]
        return cls(found["num_attention_heads"], found["num_key_value_heads"], found["head_dim"])

    @property
    def group(self) -> int:
        """Return the number of query heads per KV head."""
        return self.heads // self.kv_heads
