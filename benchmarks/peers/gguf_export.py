"""Export a Llama checkpoint to a GGUF file in f16 with the `gguf` package: weights only, without a tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray
from safetensors import safe_open

_BLOCK = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
_OUTER = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}

Floats = NDArray[Any]


def export(model: Path, out: Path) -> None:
    """Write the file `out`."""
    config = json.loads((model / "config.json").read_text("utf-8"))
    writer = gguf.GGUFWriter(out, "llama")
    _describe(writer, config)
    with safe_open(model / "model.safetensors", "pt") as file:
        for name in file.keys():  # noqa: SIM118 - it is no mapping
            array = file.get_tensor(name).float().numpy()
            writer.add_tensor(_name(name), _stored(name, array, config))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _describe(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    heads = config["num_attention_heads"]
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_dimension_count(config["hidden_size"] // heads)
    writer.add_rope_freq_base(_theta(config))
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("none")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)


def _theta(config: dict[str, Any]) -> float:
    return float(config.get("rope_theta") or config["rope_parameters"]["rope_theta"])


def _name(name: str) -> str:
    stem, _, kind = name.rpartition(".")
    if stem in _OUTER:
        return f"{_OUTER[stem]}.{kind}"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{_BLOCK[part]}.{kind}"


def _stored(name: str, array: Floats, config: dict[str, Any]) -> Floats:
    """Convert matrices to f16; reorder queries and keys for llama.cpp's rotation, which rotates adjacent pairs."""
    if array.ndim == 1:
        return array.astype(np.float32)
    for part, heads in (("q_proj", "num_attention_heads"), ("k_proj", "num_key_value_heads")):
        if part in name:
            halves = array.reshape(config[heads], 2, -1, array.shape[1])
            array = halves.swapaxes(1, 2).reshape(array.shape)
    return array.astype(np.float16)
