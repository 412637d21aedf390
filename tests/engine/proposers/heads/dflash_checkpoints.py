"""DFlash drafts written to disk: random ones in both published forms, and one that is right by construction."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor
from transformers import LlamaConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaForCausalLM

from tests import heads, zoo

HIDDEN, HEAD_DIM, HEADS, KV_HEADS, MLP, LAYERS = heads.HIDDEN, 16, 4, 2, 40, 3
MASK = 90
BACKBONE = {
    "model_type": "qwen3",
    "hidden_size": HIDDEN,
    "vocab_size": zoo.VOCAB,
    "intermediate_size": MLP,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000.0,
    "rope_scaling": None,
    "attention_bias": False,
    "layer_types": ["full_attention"] * LAYERS,
}
WINDOW = 7
SLIDING = {
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "sliding_window": WINDOW,
    "use_sliding_window": True,
}
AUTHORS = BACKBONE | {
    "architectures": ["DFlashDraftModel"],
    "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
    "block_size": 9,
    "dflash_config": {"mask_token_id": MASK, "target_layer_ids": [0, 2]},
    "num_target_layers": 4,
    "dtype": "float32",
}
KNOWN = 50  # tokens of the reduced vocabulary
SPECULATORS = {
    "architectures": ["DFlashDraftModel"],
    "speculators_model_type": "dflash",
    "speculators_version": "0.5.0",
    "speculators_config": {"algorithm": "dflash", "verifier": {"name_or_path": "target"}},
    "transformer_layer_config": BACKBONE,
    "draft_vocab_size": KNOWN,
    "block_size": 9,
    "aux_hidden_state_layer_ids": [1, 3],
    "mask_token_id": MASK,
    "sliding_window_non_causal": False,
    "sample_from_anchor": False,
}


def layer_shapes(
    hidden: int, q: int, kv: int, head_dim: int, mlp: int, *, bias: bool = False
) -> dict[str, tuple[int, ...]]:
    """Of one layer, by name within it."""
    sizes = {"q": (q, hidden), "k": (kv, hidden), "v": (kv, hidden), "o": (hidden, q)}
    shapes: dict[str, tuple[int, ...]] = {f"self_attn.{n}_proj.weight": shape for n, shape in sizes.items()}
    if bias:
        shapes |= {f"self_attn.{n}_proj.bias": shape[:1] for n, shape in sizes.items()}
    return shapes | {
        "self_attn.q_norm.weight": (head_dim,),
        "self_attn.k_norm.weight": (head_dim,),
        "mlp.gate_proj.weight": (mlp, hidden),
        "mlp.up_proj.weight": (mlp, hidden),
        "mlp.down_proj.weight": (hidden, mlp),
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }


def tensors(*, places: int = 2, speculators: bool = False, bias: bool = False) -> dict[str, Tensor]:
    """A random draft of the sizes above; `speculators`: with an embedding, an output and a vocabulary of its own."""
    layer = layer_shapes(HIDDEN, HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM, HEAD_DIM, MLP, bias=bias)
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (HIDDEN, places * HIDDEN)}
    shapes |= {f"layers.{i}.{name}": shape for i in range(LAYERS) for name, shape in layer.items()}
    shapes |= {"hidden_norm.weight": (HIDDEN,), "norm.weight": (HIDDEN,)}
    if speculators:
        shapes |= {"embed_tokens.weight": (zoo.VOCAB, HIDDEN), "lm_head.weight": (KNOWN, HIDDEN)}
    made = heads.random(shapes, seed=5)
    for name in made:
        if name.endswith("norm.weight"):
            made[name] += 1
    if speculators:
        kept = torch.randperm(zoo.VOCAB, generator=torch.Generator().manual_seed(6))[:KNOWN].sort().values
        made["d2t"] = kept - torch.arange(KNOWN)
        made["t2d"] = torch.zeros(zoo.VOCAB, dtype=torch.bool).index_fill(0, kept, value=True)
    return made


def authors(folder: Path, **kind: object) -> str:
    """In the form of `z-lab/*-DFlash`."""
    return heads.save(folder / "dflash", AUTHORS, tensors(**kind))


def sized(folder: Path, hidden: int, vocab: int, depth: int, *, says: int | None = None) -> str:
    """In the authors' form, for a target of other sizes: one layer that reads it after its first layer.

    Random, or always the token that it `says`, if the target's embedding and output matrix are one.
    """
    own = {"mask_token_id": 1 if says is None else says, "target_layer_ids": [0]}
    config = AUTHORS | {"hidden_size": hidden, "vocab_size": vocab, "num_hidden_layers": 1, "dflash_config": own,
                        "num_target_layers": depth, "layer_types": ["full_attention"]}  # fmt: skip
    layer = layer_shapes(hidden, HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM, HEAD_DIM, MLP)
    shapes = {"fc.weight": (hidden, hidden), "hidden_norm.weight": (hidden,), "norm.weight": (hidden,)}
    made = heads.random(shapes | {f"layers.0.{name}": shape for name, shape in layer.items()})
    if says is not None:  # a row stays its embedding
        made["norm.weight"].fill_(1)
        for name in ("self_attn.o_proj", "mlp.down_proj"):
            made[f"layers.0.{name}.weight"].zero_()
    return heads.save(folder / "dflash", config, made)


# ------------------------------------------------------------------------------------------- right by construction

NUMBER, FIRST, LAST = 24, 3, 22  # tokens; those of the text are FIRST .. LAST
PLANTED_MASK = 23
_DEPTH = 8  # drafts that are right: a layer carries each one place further
_BIAS = 30  # the coordinate that is 1 in every embedding


def planted_target(sharpness: float = 10.0) -> PreTrainedModel:
    """The next token is a function of the last one: layers add nothing, and the output matrix is that function."""
    config = LlamaConfig(**zoo.COMMON | {"vocab_size": NUMBER, "num_hidden_layers": 4})
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.zero_()
        model.model.embed_tokens.weight.copy_(_embeddings())
        model.lm_head.weight.normal_(0, 0.03)  # no two tokens are equally likely
        for token in range(FIRST, LAST + 1):
            model.lm_head.weight[successor(token), token] = sharpness
    return model


def successor(token: int) -> int:
    """The token that the planted target writes after `token`: one cycle through all of the text's."""
    return FIRST + (token - FIRST + 7) % (LAST - FIRST + 1)


def _embeddings() -> Tensor:
    """Token t is coordinate t, and the bias; the mask is the bias alone."""
    table = torch.zeros(NUMBER, HIDDEN)
    table[:, _BIAS] = 1
    for token in range(NUMBER - 1):
        table[token, token] = 1
    return table


def planted(folder: Path, *, dtype: torch.dtype = torch.float32) -> str:
    """A draft for `planted_target`.

    Every row looks at the row before it, by position alone. Each layer but the last adds to a row the successor of what
    the row before it holds, so layer i brings it to row i; the last puts into each row what the row before it holds,
    because the target's output matrix itself takes one step.
    """
    layer = layer_shapes(HIDDEN, HIDDEN, HIDDEN, HIDDEN, 16)
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (HIDDEN, 2 * HIDDEN)}
    shapes |= {f"layers.{i}.{name}": shape for i in range(_DEPTH) for name, shape in layer.items()}
    shapes |= {"hidden_norm.weight": (HIDDEN,), "norm.weight": (HIDDEN,)}
    made = {name: torch.ones(s) if name.endswith("norm.weight") else torch.zeros(s) for name, s in shapes.items()}
    made["fc.weight"][:, :HIDDEN] = torch.eye(HIDDEN)
    half = HIDDEN // 2
    angles = 10000.0 ** (-torch.arange(half) / half)
    for i in range(_DEPTH):
        mark = f"layers.{i}.self_attn."
        made[mark + "q_proj.weight"][:half, _BIAS] = 1  # turned by its position, it meets keys one place before it
        made[mark + "k_proj.weight"][:, _BIAS] = torch.cat([angles.cos(), angles.sin()])
        made[mark + "q_norm.weight"] *= 16
        made[mark + "k_norm.weight"] *= 16
        made[mark + "v_proj.weight"][:PLANTED_MASK, :PLANTED_MASK] = torch.eye(PLANTED_MASK)
        for token in range(FIRST, LAST + 1):
            if i < _DEPTH - 1:
                made[mark + "o_proj.weight"][successor(token), token] = 1
            else:
                made[mark + "o_proj.weight"][token, token] = 100
    sizes = {"num_hidden_layers": _DEPTH, "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": HIDDEN}
    more = {"vocab_size": NUMBER, "intermediate_size": 16, "rope_theta": 10000.0}
    own = {"mask_token_id": PLANTED_MASK, "target_layer_ids": [0, 1]}
    config = AUTHORS | sizes | more | {"layer_types": ["full_attention"] * _DEPTH, "dflash_config": own}
    stored = {name: tensor.to(dtype) for name, tensor in made.items()}
    return heads.save(folder / "planted", config, stored)
