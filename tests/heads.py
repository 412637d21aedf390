"""Checkpoints of random heads in their published layouts, written to disk: what is tested is the loading code."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from tests import zoo

HIDDEN = 32
EAGLE_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": zoo.VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}


def random(shapes: dict[str, tuple[int, ...]], seed: int = 3) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) * 0.2 for name, shape in shapes.items()}


def medusa_tensors(
    heads: int = 4, blocks: int = 1, *, own_output: bool = True, vocab: int = zoo.VOCAB
) -> dict[str, Tensor]:
    shapes: dict[str, tuple[int, ...]] = {}
    for i in range(heads):
        for j in range(blocks):
            shapes |= {f"{i}.{j}.linear.weight": (HIDDEN, HIDDEN), f"{i}.{j}.linear.bias": (HIDDEN,)}
        if own_output:
            shapes[f"{i}.{blocks}.weight"] = (vocab, HIDDEN)
    return random(shapes)


def eagle_tensors(*, embedding: bool = False, fc_bias: bool = False, qkv_bias: bool = False) -> dict[str, Tensor]:
    layer = "layers.0."
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (HIDDEN, 2 * HIDDEN),
        layer + "self_attn.q_proj.weight": (HIDDEN, HIDDEN),
        layer + "self_attn.k_proj.weight": (HIDDEN // 2, HIDDEN),
        layer + "self_attn.v_proj.weight": (HIDDEN // 2, HIDDEN),
        layer + "self_attn.o_proj.weight": (HIDDEN, HIDDEN),
        layer + "mlp.gate_proj.weight": (48, HIDDEN),
        layer + "mlp.up_proj.weight": (48, HIDDEN),
        layer + "mlp.down_proj.weight": (HIDDEN, 48),
        layer + "post_attention_layernorm.weight": (HIDDEN,),
    }
    if embedding:
        shapes["embed_tokens.weight"] = (zoo.VOCAB, HIDDEN)
    if fc_bias:
        shapes["fc.bias"] = (HIDDEN,)
    if qkv_bias:
        shapes |= {f"{layer}self_attn.{n}_proj.bias": (HIDDEN // (1 if n == "q" else 2),) for n in "qkv"}
    return random(shapes)


def save(folder: Path, config: object, tensors: dict[str, Tensor], file: str = "model.safetensors") -> str:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / file)
    return str(folder)


def medusa(folder: Path, heads: int = 4, blocks: int = 1, *, own_output: bool = True, vocab: int = zoo.VOCAB) -> str:
    config = {"medusa_num_heads": heads, "medusa_num_layers": blocks}
    tensors = medusa_tensors(heads, blocks, own_output=own_output, vocab=vocab)
    return save(folder / "medusa", config, tensors, "medusa_lm_head.safetensors")


def eagle(folder: Path, vocab: int = zoo.VOCAB, **kind: bool) -> str:
    return save(folder / "eagle", EAGLE_CONFIG | {"vocab_size": vocab}, eagle_tensors(**kind))
