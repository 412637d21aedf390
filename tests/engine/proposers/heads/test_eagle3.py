"""EAGLE-3 heads: every published form drafts what the paper's equations give, computed here from scratch."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu
from transformers import LlamaConfig, PreTrainedModel

from pilotfish.engine.attention import native
from pilotfish.engine.config import EngineConfig
from pilotfish.engine.control.prefill_budget import PrefillBudget
from pilotfish.engine.errors import ModelError
from pilotfish.engine.kv.arena import KVArena
from pilotfish.engine.kv.batch import Feed
from pilotfish.engine.model.decoder.decoder import DecoderModel
from pilotfish.engine.model.decoder.stack import FINAL
from pilotfish.engine.native import multiplies
from pilotfish.engine.proposers.heads import layers
from pilotfish.engine.proposers.heads.base import HeadContext
from pilotfish.engine.proposers.heads.eagle import load_eagle
from pilotfish.engine.proposers.heads.eagle3 import Eagle3Options
from tests import fakes, heads, zoo

DEPTH = 8
TARGET = LlamaConfig(**zoo.COMMON | {"num_hidden_layers": DEPTH})
SMALL = {"draft_vocab_size": 60}
LAYER = {k: v for k, v in heads.EAGLE3_CONFIG.items() if k != "architectures"}
IDS = "eagle_aux_hidden_state_layer_ids"


@cache
def reference() -> PreTrainedModel:
    return zoo.with_large_weights(TARGET)


@cache
def hidden_states(tokens: tuple[int, ...]) -> tuple[Tensor, ...]:
    """All heads see the same texts."""
    return reference()(torch.tensor([tokens]), output_hidden_states=True).hidden_states


# -------------------------------------------------------------------- the paper's equations, without a cache


class Paper:
    """A head as the paper and the notes of the 3.1 form have it: plain torch, every position computed every time."""

    def __init__(self, config: dict[str, Any], tensors: dict[str, Tensor], places: tuple[int, ...]) -> None:
        self.config, self.places = config, places
        self.tensors = {k.replace("midlayer.", "layers.0."): t for k, t in tensors.items()}

    def times(self, x: Tensor, name: str) -> Tensor:
        return x @ self.tensors[f"{name}.weight"].T + self.tensors.get(f"{name}.bias", 0)

    def layer(self, i: int, hidden: Tensor, embedded: Tensor) -> Tensor:
        mark, own = f"layers.{i}.", self.tensors
        if i == 0:
            normed = heads.rms(hidden, own[mark + "hidden_norm.weight"])
            hidden = normed if self.config.get("norm_before_residual") else hidden
            x = torch.cat([heads.rms(embedded, own[mark + "input_layernorm.weight"]), normed], -1)
        else:
            x = heads.rms(hidden, own[mark + "input_layernorm.weight"])
        hidden = hidden + self.attention(i, x)
        x = heads.rms(hidden, own[mark + "post_attention_layernorm.weight"])
        gated = silu(self.times(x, mark + "mlp.gate_proj")) * self.times(x, mark + "mlp.up_proj")
        return hidden + self.times(gated, mark + "mlp.down_proj")

    def attention(self, i: int, x: Tensor) -> Tensor:
        heads_, kv, n = self.config["num_attention_heads"], self.config["num_key_value_heads"], len(x)
        q, k, v = (self.times(x, f"layers.{i}.self_attn.{name}_proj").view(n, -1, self.dim) for name in "qkv")
        q, k = (heads.turned(y, torch.arange(n), self.theta) for y in (q, k))
        k, v = (y.repeat_interleave(heads_ // kv, 1) for y in (k, v))
        scores = torch.einsum("ihd,jhd->hij", q, k) / self.dim**0.5
        distance = torch.arange(n)[:, None] - torch.arange(n)
        seen = (distance >= 0) & (distance < self.window(i))
        mixed = torch.einsum("hij,jhd->ihd", scores.masked_fill(~seen, float("-inf")).softmax(-1), v)
        return self.times(mixed.reshape(n, -1), f"layers.{i}.self_attn.o_proj")

    @property
    def dim(self) -> int:
        return self.config.get("head_dim") or self.config["hidden_size"] // self.config["num_attention_heads"]

    @property
    def theta(self) -> float:
        return self.config.get("rope_theta", 1e4)

    def window(self, i: int) -> int:
        kinds = self.config.get("layer_types", ["full_attention"] * 9)
        return self.config["sliding_window"] if kinds[i] == "sliding_attention" else 10**6

    def projected(self, states: list[Tensor]) -> Tensor:
        if self.places == (FINAL,):
            return states[0]
        if self.config.get("fc_norm"):
            states = [heads.rms(state, self.tensors[f"fc_norm.{i}.weight"]) for i, state in enumerate(states)]
        joined = torch.cat(states, -1)
        if self.config.get("norm_before_fc"):
            joined = heads.rms(joined, self.tensors["input_norm.weight"])
        return self.times(joined, "fc")

    @torch.no_grad()
    def chain(self, states: list[Tensor], embedded: Callable[[int], Tensor]) -> Iterator[Tensor]:
        """Logits of one draft after another; `embedded(n)`: the rows that are fed with n features."""
        fed, is_tied = self.projected(states), self.config.get("tie_word_embeddings")
        own = self.tensors.get("embed_tokens.weight" if is_tied else "lm_head.weight")
        matrix = reference().lm_head.weight if own is None else own
        while True:
            hidden = fed
            for i in range(self.config["num_hidden_layers"]):
                hidden = self.layer(i, hidden, embedded(len(fed)))
            normed = heads.rms(hidden[-1:], self.tensors["norm.weight"])
            yield (normed @ matrix.T)[0]
            fed = torch.cat([fed, normed if self.config.get("norm_output") else hidden[-1:]])

    def drafts(self, tokens: list[int], k: int) -> list[int]:
        every = hidden_states(tuple(tokens))
        states = [every[-1 if place == FINAL else place][0, :-1] for place in self.places]
        text, table = list(tokens), self.tensors.get("embed_tokens.weight", reference().model.embed_tokens.weight)
        for logits in islice(self.chain(states, lambda n: table[torch.tensor(text[1 : n + 1])]), k):
            best = int(logits.argmax())
            text.append(best + int(self.tensors["d2t"][best]) if "d2t" in self.tensors else best)
        return text[len(tokens) :]


# --------------------------------------------------------------------------------- all published forms


@dataclass(frozen=True)
class Form:
    """What a config says beside the authors', how its tensors are made, and where the target is read."""

    changes: dict[str, Any] = field(default_factory=dict)
    kind: dict[str, object] = field(default_factory=dict)  # as in `eagle3_tensors`
    places: tuple[int, ...] = (2, 4, 5)
    has_output: bool = True  # an output matrix of its own

    def files(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Its config, flat, and its tensors."""
        flat = {**heads.EAGLE3_CONFIG, **self.changes, **self.changes.get("eagle_config", {})}
        tensors = heads.eagle3_tensors(flat, **self.kind)
        return flat, {name: tensor for name, tensor in tensors.items() if self.has_output or name != "lm_head.weight"}


NVIDIA = {IDS: [1, 4, 6], "use_aux_hidden_state": True, "norm_before_fc": True}
WINDOW = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5}
FORMS = {
    "3.1": Form(
        {"fc_norm": True, "norm_output": True, "num_hidden_layers": 2, **WINDOW, **SMALL}, {"mark": "layers.0."}
    ),
    "nvidia": Form(
        {"eagle_config": NVIDIA, "norm_before_residual": True, "head_dim": 16, "rope_theta": 100.0}, {}, (2, 5, 7)
    ),
    "narrow": Form(
        {"hidden_size": 16, "target_hidden_size": heads.HIDDEN, IDS: [0, 3, 5, 7], **SMALL},
        {"embedding": True, "bias": True, "places": 4}, (0, 3, 5, 7),
    ),
    "tied": Form({"tie_word_embeddings": True}, {"embedding": True}, has_output=False),
    # Its output matrix is the target's.
    "final": Form(
        {"eagle_config": {"use_aux_hidden_state": False},
         "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]}},
        {"places": 0}, (FINAL,), has_output=False,
    ),
}  # fmt: skip


def check(folder: str, paper: Paper, **config: object) -> None:
    """Serve sequences of unequal lengths and K, and compare every draft."""
    heads.decode("eagle", folder, zoo.as_served(reference()), paper.drafts, **config)


@pytest.mark.parametrize("form", FORMS)
def test_drafts_are_the_papers(tmp_path: Path, form: str) -> None:
    flat, tensors = FORMS[form].files()
    folder = heads.save(tmp_path, heads.EAGLE3_CONFIG | FORMS[form].changes, tensors)
    check(folder, Paper(flat, tensors, FORMS[form].places))


def test_the_authors_own_with_prefixes_of_names_in_chunks(tmp_path: Path) -> None:
    """Names as `torch.save` of wrapped models leaves them; the authors' rotary buffer."""
    config, tensors = Form().files()
    stored = {f"module.model.{k}": t for k, t in tensors.items()}
    stored["module.model.midlayer.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    check(heads.save(tmp_path, config, stored), Paper(config, tensors, (2, 4, 5)), max_batch_tokens=11)


@pytest.mark.parametrize(
    ("config", "places"),
    [
        ({}, (2, 4, 5)),
        ({IDS: None}, (2, 4, 5)),
        ({IDS: [1, 2, 7]}, (1, 2, 7)),
        ({IDS: [1, 3, 4]}, (2, 4, 5)),  # copied from an `eagle_config`
        ({"eagle_config": {IDS: [1, 3, 5]}}, (2, 4, 6)),  # layers whose output is read
        ({"eagle_config": {IDS: [2, 3, 5]}}, (2, 3, 5)),
    ],
)
def test_where_the_target_is_read(config: dict[str, object], places: tuple[int, ...]) -> None:
    assert Eagle3Options.of(heads.EAGLE3_CONFIG | config, "a head", DEPTH).places == places


def speculators(**own: object) -> dict[str, object]:
    """A config of that library."""
    verifier = {"name_or_path": "llama", "architectures": ["LlamaForCausalLM"]}
    return {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.5.0",
        "speculators_config": {"algorithm": "eagle3", "verifier": verifier},
        "model_type": "speculators",
        "transformer_layer_config": LAYER,
        "norm_before_residual": False,
        **own,
    }


def test_speculators(tmp_path: Path) -> None:
    own = {"norm_before_residual": True, "norm_before_fc": True, "norm_output": True, IDS: [1, 2, 7], **SMALL}
    unused = {"target_hidden_size": None, "embed_requires_grad": True}
    tensors = heads.eagle3_tensors(LAYER | own, mark="layers.0.")
    stored = tensors | {"verifier_norm.weight": torch.ones(heads.HIDDEN)}
    check(heads.save(tmp_path, speculators(**own, **unused), stored), Paper({**LAYER, **own}, tensors, (1, 2, 7)))


def test_eagle_1_of_speculators(tmp_path: Path) -> None:
    """The same drafts as from the authors' form."""
    tensors = heads.eagle_tensors(fc_bias=True)
    config = speculators(speculators_model_type="eagle", layernorms=False, fusion_bias=True)
    config |= {"architectures": ["EagleSpeculator"], "transformer_layer_config": LAYER | {"num_hidden_layers": DEPTH}}
    stored = {k.replace("fc.", "fusion_fc.").replace("layers.0.", "transformer."): t for k, t in tensors.items()}
    request, runs = fakes.request((5, 6, 7, 8), max_tokens=12), []
    for folder in (heads.save(tmp_path / "one", config, stored), heads.eagle(tmp_path, fc_bias=True)):
        settings = EngineConfig(target="llama", draft=folder, proposer="eagle", speculation="fixed")
        outputs = fakes.run(heads.assembled(settings, zoo.as_served(reference())), [request])
        runs.append((outputs.tokens, outputs.finished["r"].stats.accepted_per_position))
    assert runs[0] == runs[1]
    (tmp_path / "one" / "config.json").write_text(json.dumps(config | {"layernorms": True}))
    with pytest.raises(ModelError, match="layernorms is true"):
        load_eagle(str(tmp_path / "one"), None, zoo.as_served(reference()))


# ------------------------------------------------------------------------------------------------------- in C

IN_C = pytest.mark.skipif(not multiplies(torch.float32), reason="our C does not run here")


def off(folder: str, target: DecoderModel, passes: list[list[Feed]]) -> float:
    """How far layers in C are from those in torch, in standard deviations: features of all passes, and logits."""
    made = []
    for attend in (native.attend, lambda *given, **named: native.attend(*given, **named)):
        head, generator, rows = load_eagle(folder, None, target), torch.Generator().manual_seed(1), list[Tensor]()
        arena = KVArena(head.layout, 4, 8, torch.device("cpu"))
        proposer: Any = head.proposer(HeadContext("eagle3", target, None, arena, attend, PrefillBudget(1.0, 512)))
        made_of = proposer.head
        assert made_of.dtype == target.dtype
        assert made_of.layers._parts
        with torch.inference_mode():
            for feeds in passes:
                size = sum(len(f.tokens) for f in feeds), len(head.places) * target.config.hidden_size
                features = made_of.project(torch.randn(size, generator=generator))
                rows.append(made_of(features, proposer.ragged(feeds)))
            rows.append(made_of.logits(rows[-1]))
        made.append(torch.cat([x.float().flatten() for x in rows]).nan_to_num(neginf=0))
    return float((made[0] - made[1]).square().mean().sqrt() / made[1].std())


PASSES = [[Feed(range(5), 0, [2, 0], 3), Feed([9], 0, [1])], [Feed([7, 8, 9, 4], 5, [2, 0], 4), Feed([3], 1, [1])]]
SCALED = {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}
FORMS_IN_C = {
    "authors": Form(), "3.1": FORMS["3.1"], "nvidia": FORMS["nvidia"], "scaled": Form(SCALED, {"bias": True})
}  # fmt: skip


@IN_C
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", FORMS_IN_C)
def test_layers_in_c_agree_with_torch(
    tmp_path: Path, form: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 32}
    config, kind = heads.EAGLE3_CONFIG | FORMS_IN_C[form].changes | sizes, FORMS_IN_C[form].kind
    tensors = heads.eagle3_tensors(config | config.get("eagle_config", {}), target=64, **kind)
    wide = LlamaConfig(**zoo.COMMON | {"hidden_size": 64, "num_hidden_layers": DEPTH})
    target = zoo.as_served(zoo.with_large_weights(wide).to(dtype))
    monkeypatch.setattr(layers, "multiplies", lambda asked: asked == dtype)  # else a head is always in bfloat16
    assert off(heads.save(tmp_path, config, tensors), target, PASSES) < (1e-5 if dtype == torch.float32 else 0.03)


@IN_C
@pytest.mark.parametrize("has_norm", [False, True], ids=["paper", "normed"])
def test_the_layer_of_eagle_1_in_c_agrees_with_torch(
    tmp_path: Path, has_norm: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = heads.EAGLE_CONFIG | {"num_attention_heads": 1, "num_key_value_heads": 1}
    tensors = heads.eagle_tensors()
    tensors |= {f"layers.0.self_attn.{name}_proj.weight": torch.randn(32, 32) * 0.2 for name in "kv"}
    tensors |= {"layers.0.input_layernorm.weight": 1 + torch.randn(32) * 0.2} if has_norm else {}
    target = zoo.as_served(zoo.with_large_weights(LlamaConfig(**zoo.COMMON)))
    monkeypatch.setattr(layers, "multiplies", lambda _: False)
    assert off(heads.save(tmp_path, config, tensors), target, PASSES[:1]) < 1e-5
