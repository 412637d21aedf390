"""Writes a head as a folder in the published layout of EAGLE-3: config.json and model.safetensors."""

from __future__ import annotations

import json
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save

from engine.training.eagle3 import Eagle3Shape, TrainedEagle3

ARCHITECTURE = "LlamaForCausalLMEagle3"


def config_of(shape: Eagle3Shape, places: Seq[int], positions: int) -> dict[str, Any]:
    """The head's config, with the names of the published ones; `positions` are those of the target."""
    return {
        "architectures": [ARCHITECTURE],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "hidden_size": shape.hidden,
        "target_hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": shape.eps,
        "rope_theta": shape.rope_theta,
        "max_position_embeddings": positions,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "vocab_size": shape.vocab,
        "draft_vocab_size": shape.draft_vocab,
        "fc_norm": True,
        "norm_output": True,
        "eagle_aux_hidden_state_layer_ids": list(places),  # layers whose input is read
        "dtype": "bfloat16",
    }


def export_head(head: TrainedEagle3, config: dict[str, Any], out: Path) -> None:
    """Write both files; the weights come last, and whole or not at all. The embedding is left to the target."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", "utf-8")
    tensors = {
        name: tensor.to("cpu", torch.bfloat16 if tensor.is_floating_point() else tensor.dtype).contiguous()
        for name, tensor in head.state_dict().items()
    }
    unfinished = out / "model.unfinished"
    unfinished.write_bytes(save(tensors, {"format": "pt"}))  # `save_file` would let nobody else read it
    unfinished.replace(out / "model.safetensors")
