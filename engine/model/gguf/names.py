"""What a family of models is: its names of weights, and what llama.cpp's converter does to them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from engine.model.gguf.keys import Keys

GATE_UP = ("ffn_gate_exps", "ffn_up_exps")  # together the first matrices of a layer's experts
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
NORMS_OF_HEADS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_SCALES = {  # Granite's numbers, and their keys
    "attention_multiplier": "attention.scale",
    "embedding_multiplier": "embedding_scale",
    "logits_scaling": "logit_scale",
    "residual_multiplier": "residual_scale",
}


@dataclass(frozen=True, slots=True)
class GGUFFamily:
    """One family.

    Attributes:
        model_type: of transformers.
        describe: the fields of the config besides those that all families have.
        names: of parts of a block, besides `_BLOCK`; with `.weight` or `.bias` where the model has neither.
        outer: of parts outside of blocks, besides `_OUTER`.
        undo: what undoes a change of floats, by parts of a block.
        order: by parts of a block: for a number of rows of the file, which of them each row of the weight is.
        permuted: whether rows of queries and keys are reordered.
        norms_plus_one: whether norms have 1 more in the file.
        pairs_experts: whether the model has matrices of experts as `[in, out]`, and gate and up by turns.
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

    def renamed(self, name: str) -> str | None:
        """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`; None where the family has no such part."""
        stem, _, kind = name.rpartition(".")
        outer_names = {**_OUTER, **self.outer}
        if stem in outer_names:
            return f"{outer_names[stem]}.{kind}"
        first, _, rest = name.partition(".")
        layer, _, part = rest.partition(".")
        names = {**_BLOCK, **self.names}
        found = names.get(part) or (f"{names[outer]}.{kind}" if (outer := part.rpartition(".")[0]) in names else None)
        return f"model.layers.{layer}.{found}" if first == "blk" and found else None

    def undone(self, part: str) -> Callable[[Tensor], Tensor] | None:
        """What undoes the converter's change of a float part; None where there is none."""
        if part in self.undo or not (self.norms_plus_one and part.endswith("norm")):
            return self.undo.get(part)
        return lambda stored: stored.float() - 1


def part_of(name: str) -> str:
    """`blk.3.attn_q.weight` -> `attn_q`; `blk.3.ssm_a` -> `ssm_a`; `output_norm.weight` -> `output_norm`."""
    inner = name.split(".", 2)[-1] if name.startswith("blk.") else name
    return inner.removesuffix(".weight").removesuffix(".bias")


def scales_of(keys: Keys) -> dict[str, Any]:
    """The factors of a Granite; a file lacks those that are 1."""
    return {field: keys.real(key, 1.0) for field, key in _SCALES.items()}
