"""Checkpoints with a multi-token prediction layer, and what it drafts: the equations of DeepSeek-V3, section 2.2.

The model that is saved has one layer more than the target; transformers writes that layer as it writes all of them, and
here it becomes the decoder layer of the MTP layer. The oracle runs it over the whole text, with transformers' eager
attention under a causal mask: no cache, no arena and no page.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from tests import zoo

FAMILIES = ("deepseek-v3", "glm-4-moe", "glm-4-moe-lite", "qwen-3-next", "qwen-3.5", "qwen-3.5-moe")
DEEPSEEK = FAMILIES[:3]  # those that name the layer's tensors as DeepSeek does
_HIDDEN = zoo.COMMON["hidden_size"]
_QWEN_NAMES = {"enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "eh_proj": "fc", "norm": "norm"}


def config_of(family: str, *, further: int = 0, vocab: int = zoo.VOCAB) -> PreTrainedConfig:
    """A tiny config of a family, its target `further` layers deeper: they attend, and have experts where others do."""
    if family == "glm-4-moe-lite":
        return zoo.config_of("glm4_moe_lite", **zoo.LATENT, n_routed_experts=4, num_experts_per_tok=2,
                             moe_intermediate_size=16, num_hidden_layers=2 + further, vocab_size=vocab,
                             mlp_layer_types=["dense"] + ["sparse"] * (1 + further))  # fmt: skip
    if family == "qwen-3.5-moe":
        base = zoo.family_config("qwen-3-next").to_dict()
        kept = {k: v for k, v in base.items() if k.startswith(("linear_", "moe_", "shared_", "num_expert", "head_dim"))}
        found = zoo.config_of("qwen3_5_moe_text", **kept, num_hidden_layers=4)
    else:
        found = zoo.family_config(family)
    found.num_hidden_layers += further
    found.vocab_size = vocab
    if getattr(found, "layer_types", None) is not None:
        found.layer_types = [*found.layer_types, *["full_attention"] * further]
    return found


@dataclass
class SavedWithMTP:
    """A checkpoint, and the plain tensors and modules that it was written from."""

    folder: str
    family: str
    target: PreTrainedModel  # plain, without the MTP layer
    whole: PreTrainedModel  # plain: its last layer is the decoder layer
    parts: dict[str, Tensor]  # enorm, hnorm, eh_proj, norm; perhaps embedding and head

    @property
    def is_qwen(self) -> bool:
        """Whether norms multiply by 1 + weight, as those of Qwen3-Next."""
        return self.family not in DEEPSEEK

    def norm(self, x: Tensor, name: str) -> Tensor:
        """RMSNorm, from its definition."""
        weight = self.parts[name] + self.is_qwen
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.whole.config.rms_norm_eps) * weight

    @torch.no_grad()
    def drafts(self, tokens: list[int], count: int) -> list[int]:
        """Greedy drafts behind `tokens`, from the target's true features, then from the layer's own."""
        features, text = self.features(tokens[:-1]), list(tokens)
        embedding = self.parts.get("embedding", self.target.get_input_embeddings().weight)
        head = self.parts.get("head", self.target.get_output_embeddings().weight)
        for _ in range(count):
            embedded = embedding[torch.tensor(text[1:])]
            x = torch.cat([self.norm(embedded, "enorm"), self.norm(features, "hnorm")], -1) @ self.parts["eh_proj"].T
            last = self.norm(self._decoder(x), "norm")[-1:]
            features = torch.cat([features, last])
            text.append(int((last @ head.T).argmax()))
        return text[len(tokens) :]

    @torch.no_grad()
    def features(self, tokens: list[int]) -> Tensor:
        """Of every position, behind the target's final norm."""
        return self.target.model(torch.tensor([tokens])).last_hidden_state[0]

    def _decoder(self, x: Tensor) -> Tensor:
        length, trunk = len(x), self.whole.model
        mask = torch.full((length, length), -torch.inf).triu(1)[None, None]
        positions = torch.arange(length)[None]
        rotary = trunk.rotary_emb(x[None], positions.expand(3, 1, -1) if "3.5" in self.family else positions)
        made = trunk.layers[-1](x[None], attention_mask=mask, position_ids=positions, position_embeddings=rotary)
        return (made[0] if isinstance(made, tuple) else made)[0]


def save(family: str, folder: Path, **how: bool) -> SavedWithMTP:
    """A checkpoint of random weights; `how` is that of `write`."""
    target = zoo.with_large_weights(config_of(family))
    whole = _eager(config_of(family, further=1), seed=7)
    generator = torch.Generator().manual_seed(5)
    parts = {name: torch.rand(_HIDDEN, generator=generator) * 0.5 for name in ("enorm", "hnorm", "norm")}
    if family in DEEPSEEK:
        parts = {name: weight + 0.75 for name, weight in parts.items()}
    parts["eh_proj"] = torch.randn(_HIDDEN, 2 * _HIDDEN, generator=generator) * 0.2
    return write(family, folder, target, whole, parts, **how)


def planted(family: str, folder: Path, *, noise: float = 0.0, vocab: int = zoo.VOCAB) -> SavedWithMTP:
    """A target whose next token is a function of its last one, and a layer that computes it from the embedding alone.

    `noise` is added to the target's layers.
    """
    generator = torch.Generator().manual_seed(11)
    table = torch.nn.functional.normalize(torch.randn(vocab, _HIDDEN, generator=generator), dim=-1)
    order = torch.randperm(vocab, generator=generator)
    target = zoo.with_large_weights(config_of(family, vocab=vocab))
    whole = _eager(config_of(family, further=1, vocab=vocab), seed=7)
    with torch.no_grad():
        for model, amount in ((target, noise), (whole, 0.0)):
            for name, weight in model.named_parameters():
                if name.split(".")[-2] in ("o_proj", "out_proj") or "down_proj" in name:
                    weight.mul_(amount)
        target.get_input_embeddings().weight.copy_(table)
        target.get_output_embeddings().weight.copy_(table[order])
    ones = torch.zeros(_HIDDEN) if family not in DEEPSEEK else torch.ones(_HIDDEN)
    parts = {name: ones.clone() for name in ("enorm", "hnorm", "norm")}
    parts["eh_proj"] = torch.cat([torch.eye(_HIDDEN), torch.zeros(_HIDDEN, _HIDDEN)], 1)
    return write(family, folder, target, whole, parts)


def _eager(config: PreTrainedConfig, seed: int) -> PreTrainedModel:
    model = zoo.with_large_weights(config, seed)
    model.set_attn_implementation("eager")
    return model


def write(
    family: str,
    folder: Path,
    target: PreTrainedModel,
    whole: PreTrainedModel,
    parts: dict[str, Tensor],
    *,
    own: bool = False,
    copies: bool = False,
    sharded: bool = False,
) -> SavedWithMTP:
    """Write the target and its MTP layer.

    `own`: with an embedding and an output matrix of its own; `copies`: with copies of the target's, as DeepSeek's are;
    `sharded`: in two files with an index, the target in the first one.
    """
    target.save_pretrained(folder)
    whole.save_pretrained(folder / "whole")
    depth = target.config.num_hidden_layers
    last = f"model.layers.{depth}."
    layer = {k.removeprefix(last): t for k, t in load_file(folder / "whole" / "model.safetensors").items() if last in k}
    if own:
        generator = torch.Generator().manual_seed(9)
        shape = (zoo.VOCAB, _HIDDEN)
        parts = parts | {name: torch.randn(shape, generator=generator) * 0.25 for name in ("embedding", "head")}
    saved = SavedWithMTP(str(folder), family, target, whole, parts)
    stored = parts | ({} if not copies else {
        "embedding": target.get_input_embeddings().weight, "head": target.get_output_embeddings().weight
    })  # fmt: skip
    _store(folder, _named(stored, layer, depth, family), sharded=sharded)
    return saved


def _named(parts: dict[str, Tensor], layer: dict[str, Tensor], depth: int, family: str) -> dict[str, Tensor]:
    if family not in DEEPSEEK:
        shared = {f"mtp.{ours}.weight": parts[name] for name, ours in _QWEN_NAMES.items()}
        return shared | {f"mtp.layers.0.{name}": tensor for name, tensor in layer.items()}
    names = {"norm": "shared_head.norm", "head": "shared_head.head", "embedding": "embed_tokens"}
    named = {f"model.layers.{depth}.{names.get(name, name)}.weight": tensor for name, tensor in parts.items()}
    return named | {f"model.layers.{depth}.{name}": tensor for name, tensor in layer.items()}


def _store(folder: Path, mtp: dict[str, Tensor], *, sharded: bool) -> None:
    whole = folder / "model.safetensors"
    plain, mtp = load_file(whole), {name: tensor.detach().contiguous().clone() for name, tensor in mtp.items()}
    if not sharded:
        save_file(plain | mtp, whole, {"format": "pt"})
        return
    whole.unlink()
    files = {f"model-0000{i}-of-00002.safetensors": tensors for i, tensors in enumerate((plain, mtp), 1)}
    for file, tensors in files.items():
        save_file(tensors, folder / file, {"format": "pt"})
    index = {"metadata": {}, "weight_map": {name: file for file, tensors in files.items() for name in tensors}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def change(folder: str, changed: dict[str, Tensor], *, without: str = "") -> None:
    """Add tensors to a checkpoint in one file, and leave out those with `without` in their names."""
    [file] = Path(folder).glob("*.safetensors")
    kept = {name: tensor for name, tensor in load_file(file).items() if not without or without not in name}
    save_file(kept | changed, file, {"format": "pt"})
