"""Checkpoints of random heads in their published layouts, written to disk, and engines whose every draft is checked."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from pilotfish.engine.config import EngineConfig
from pilotfish.engine.engine import Engine
from pilotfish.engine.kv.batch import Feed
from pilotfish.engine.params import SpeculationParams
from pilotfish.engine.proposers.base import Passed, Proposer
from pilotfish.engine.proposers.sources import draft_sources
from pilotfish.engine.startup.build import assemble
from pilotfish.engine.stats import Forward
from pilotfish.engine.step import Work
from pilotfish.engine.types import Sequence
from tests import fakes, zoo

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


def medusa_tensors(*, own_output: bool = True, vocab: int = zoo.VOCAB) -> dict[str, Tensor]:
    """Of four heads of one block."""
    shapes: dict[str, tuple[int, ...]] = {}
    for i in range(4):
        shapes |= {f"{i}.0.linear.weight": (HIDDEN, HIDDEN), f"{i}.0.linear.bias": (HIDDEN,)}
        if own_output:
            shapes[f"{i}.1.weight"] = (vocab, HIDDEN)
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


def medusa(folder: Path, **kind: Any) -> str:
    config = {"medusa_num_heads": 4, "medusa_num_layers": 1}
    return save(folder / "medusa", config, medusa_tensors(**kind), "medusa_lm_head.safetensors")


def eagle(folder: Path, vocab: int = zoo.VOCAB, **kind: bool) -> str:
    return save(folder / "eagle", EAGLE_CONFIG | {"vocab_size": vocab}, eagle_tensors(**kind))


EAGLE3_CONFIG = EAGLE_CONFIG | {"architectures": ["LlamaForCausalLMEagle3"], "rms_norm_eps": 1e-6}


def eagle3_tensors(
    config: dict[str, object],
    *,
    target: int = HIDDEN,
    places: int = 3,
    embedding: bool = False,
    bias: bool = False,
    mark: str = "midlayer.",
) -> dict[str, Tensor]:
    """Of a head with this config, for a target of this width; a reduced vocabulary has every second token or so."""
    wanted = {k: int(str(v)) for k, v in config.items() if str(v).isdecimal()}
    hidden, inner, vocab = wanted["hidden_size"], wanted["intermediate_size"], wanted["vocab_size"]
    kept = wanted.get("draft_vocab_size", vocab)
    dim = wanted.get("head_dim", hidden // wanted["num_attention_heads"])
    queries, keys = wanted["num_attention_heads"] * dim, wanted["num_key_value_heads"] * dim
    shapes: dict[str, tuple[int, ...]] = {"norm.weight": (hidden,), "lm_head.weight": (kept, hidden)}
    if places:
        shapes["fc.weight"] = (hidden, places * target)
    for i in range(wanted["num_hidden_layers"]):
        layer, width = mark if i == 0 else f"layers.{i}.", 2 * hidden if i == 0 else hidden
        outputs = {"self_attn.q_proj": queries, "self_attn.k_proj": keys, "self_attn.v_proj": keys}
        shapes |= {f"{layer}{name}.weight": (out, width) for name, out in outputs.items()}
        outputs["self_attn.o_proj"] = hidden
        shapes[layer + "self_attn.o_proj.weight"] = (hidden, queries)
        shapes |= {f"{layer}mlp.{name}_proj.weight": (inner, hidden) for name in ("gate", "up")}
        shapes[layer + "mlp.down_proj.weight"] = (hidden, inner)
        norms = ("input_layernorm", "post_attention_layernorm", *(("hidden_norm",) if i == 0 else ()))
        shapes |= {f"{layer}{name}.weight": (hidden,) for name in norms}
        if bias:
            shapes |= {f"{layer}{name}.bias": (out,) for name, out in outputs.items()}
    if config.get("fc_norm"):
        shapes |= {f"fc_norm.{i}.weight": (target,) for i in range(places)}
    if config.get("norm_before_fc"):
        shapes["input_norm.weight"] = (places * target,)
    if embedding:
        shapes["embed_tokens.weight"] = (vocab, hidden)
    made = random(shapes)
    if kept < vocab:
        ids = torch.randperm(vocab, generator=torch.Generator().manual_seed(3))[:kept].sort().values
        made |= {"d2t": ids - torch.arange(kept), "t2d": torch.isin(torch.arange(vocab), ids)}
    return {name: 1 + t if name.endswith("norm.weight") or "fc_norm" in name else t for name, t in made.items()}


def eagle3(folder: Path, changes: dict[str, object] | None = None, **kind: Any) -> str:
    """A folder with such a head; `changes` to the config, `kind` as in `eagle3_tensors`."""
    config = EAGLE3_CONFIG | (changes or {})
    return save(folder / "eagle3", config, eagle3_tensors(config, **kind))


# ---------------------------------------------------------------------------- formulas of papers, without any cache


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight


def turned(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Rotary embedding of `[rows, heads, dim]`."""
    half = x.shape[-1] // 2
    angles = positions[:, None, None] * theta ** (-torch.arange(half) / half)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], -1)


# ------------------------------------------------------------------------------------------- drafts that are checked

KS = (8, 1, 3, 5)
Expected = Callable[[list[int], int], list[int]]  # (tokens, k) -> drafts


class Checked(Proposer):
    """A proposer whose every draft is compared with a recomputation, after all that must not matter was poisoned."""

    def __init__(self, inner: Any, expected: Expected) -> None:
        self.inner, self.expected = inner, expected
        self.counts, self.passes = list[int](), list[tuple[Forward, ...]]()  # drafts of each sequence; by step
        self.uses_draft_kv, self.shares_draft_kv = inner.uses_draft_kv, inner.shares_draft_kv
        self.is_parallel = inner.is_parallel

    def observe(self, passed: Seq[Passed]) -> None:
        self.inner.observe(passed)

    def propose(self, works: Seq[Work], forwards: list[Forward]) -> list[Work]:
        for work in works:
            self.poison(work.sequence)
        made: list[Work] = self.inner.propose(works, forwards)
        for work in made:
            assert not work.drafts or list(work.drafts) == self.expected(work.sequence.tokens, work.num_draft)
            self.counts.append(len(work.drafts))
        self.passes.append(tuple(forwards))
        return made

    @torch.inference_mode()
    def poison(self, sequence: Sequence) -> None:
        """Features of drafts that were not kept, and all K/V beyond the cursor."""
        features = (self.inner.unfed if self.uses_draft_kv else self.inner.features).get(sequence)
        if features is not None:  # none before the first pass over a prompt of one token
            for i in range(max(0, len(sequence.tokens) - 1 - features.first), len(features.rows)):
                features.rows[i] = torch.full_like(features.rows[i], torch.nan)
        if self.uses_draft_kv:
            arena, cursor = self.inner.arena, sequence.draft
            rows = [p * arena.page_size + i for p in cursor.page_table for i in range(arena.page_size)][cursor.kv_len :]
            for k, v in zip(arena.k, arena.v, strict=True):
                k[rows], v[rows] = torch.nan, torch.nan


def assembled(config: EngineConfig, *models: PreTrainedModel | None, **given: Any) -> Engine:
    """An engine with all that `config.draft` names besides `models`: the target, and a draft model."""
    return assemble(config, *models, sources=draft_sources(config), **given)


def decode(name: str, folder: str, model: PreTrainedModel, expected: Expected, **config: Any) -> Checked:
    """Let an engine decode sequences of unequal lengths and K, and hold every draft of this head against `expected`.

    One of them waits until another is over, so that the batch changes. Towards its end a sequence gets fewer drafts.
    """
    watched = list[Checked]()

    def watch(inner: Any) -> Checked:
        watched.append(Checked(inner, expected))
        return watched[0]

    settings = {"draft": folder, "proposer": name, "speculation": "fixed", "max_batch_size": 3} | config
    engine = assembled(EngineConfig(target="t", **settings), model, wrappers={name: watch})
    asked = [
        fakes.request(prompt[: 1 + i * 9], name=str(i), wish=SpeculationParams(num_draft_tokens=k), max_tokens=k + 3)
        for i, (prompt, k) in enumerate(zip(zoo.prompts(len(KS)), KS, strict=True))
    ]
    fakes.run(engine, asked)
    assert sum(watched[0].counts) > 30
    return watched[0]


def opened(tokens: Seq[int]) -> Sequence:
    """A sequence that a head drafts for, with a page of its arena."""
    one = fakes.sequence(tokens)
    one.draft.page_table.append(0)
    return one


def show(head: Any, sequence: Sequence, states: Mapping[int, Tensor], start: int, stop: int) -> None:
    """What a pass over positions start .. stop - 1 shows a head of `states`, by the place of the target."""
    for place, rows in states.items():
        head.tap.keep(place, rows[start:stop])
    head.observe([Passed(sequence, Feed(sequence.tokens[start:stop], start, [0]), 0)])
