"""EAGLE-3 heads: every published form drafts what the paper's equations give, computed here from scratch."""

from __future__ import annotations

import json
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu
from transformers import LlamaConfig, PreTrainedModel

from engine.attention import native
from engine.config import EngineConfig
from engine.engine import Engine
from engine.errors import ModelError
from engine.kv.arena import KVArena
from engine.kv.batch import Feed
from engine.model.runner import kv_layout
from engine.model.tap import FINAL
from engine.native import multiplies
from engine.proposers.heads.eagle import EagleHead, EagleRunner, load_eagle
from engine.proposers.heads.eagle3 import Eagle3Head, Eagle3Options, Eagle3Runner
from engine.startup.build import assemble
from tests import fakes, heads, zoo

DEPTH = 8
TARGET = LlamaConfig(**zoo.COMMON | {"num_hidden_layers": DEPTH})
SMALL = {"draft_vocab_size": 60}
LAYER = {k: v for k, v in heads.EAGLE3_CONFIG.items() if k != "architectures"}
AS_OUTPUTS = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 4, 6], "use_aux_hidden_state": True}}


@cache
def reference() -> PreTrainedModel:
    return zoo.with_large_weights(TARGET)


@cache
def hidden_states(tokens: tuple[int, ...]) -> tuple[Tensor, ...]:
    """All heads see the same texts."""
    return reference()(torch.tensor([tokens]), output_hidden_states=True).hidden_states


def engine_of(**config: object) -> Engine:
    """A fresh target each: its features are read by a hook that stays."""
    return assemble(EngineConfig(target="llama", **{"speculation": "fixed", **config}), zoo.ours(reference()))


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
    def drafts(self, tokens: list[int], k: int) -> list[int]:
        every = hidden_states(tuple(tokens))
        states = [every[-1 if place == FINAL else place][0, :-1] for place in self.places]
        fed, following, made = self.projected(states), tokens[1:], list[int]()
        table = self.tensors.get("embed_tokens.weight", reference().model.embed_tokens.weight)
        for _ in range(k):
            hidden = fed
            for i in range(self.config["num_hidden_layers"]):
                hidden = self.layer(i, hidden, table[torch.tensor(following)])
            normed = heads.rms(hidden[-1:], self.tensors["norm.weight"])
            matrix = self.tensors.get("lm_head.weight", reference().lm_head.weight)
            best = int((normed @ matrix.T).argmax())
            made.append(best + int(self.tensors["d2t"][best]) if "d2t" in self.tensors else best)
            fed = torch.cat([fed, normed if self.config.get("norm_output") else hidden[-1:]])
            following = [*following, made[-1]]
        return made


# --------------------------------------------------------------------------------- all published forms


FORMS: dict[str, tuple[dict[str, object], dict[str, object]]] = {
    "authors": ({}, {}),
    "reduced": (SMALL, {}),
    "3.1": ({"fc_norm": True, "norm_output": True, **SMALL}, {}),
    "norm_output": ({"norm_output": True}, {}),
    "before_residual": ({"norm_before_residual": True}, {"mark": "layers.0."}),
    "before_fc": ({"norm_before_fc": True}, {}),
    "nvidia": ({"eagle_config": {"norm_before_fc": True, **AS_OUTPUTS["eagle_config"]}}, {}),
    "own_embedding": ({}, {"embedding": True}),
    "narrow": ({"hidden_size": 16, "target_hidden_size": heads.HIDDEN, **SMALL}, {"embedding": True}),
    "head_dim": ({"head_dim": 16, "rope_theta": 100.0}, {}),
    "biases": ({}, {"bias": True}),
    "deeper": ({"num_hidden_layers": 2}, {"mark": "layers.0."}),
    "window": ({"layer_types": ["sliding_attention"], "sliding_window": 5}, {}),
    "four_places": ({"eagle_aux_hidden_state_layer_ids": [0, 3, 5, 7]}, {"places": 4}),
    "mrope": ({"rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]}}, {}),
    "final": ({"eagle_config": {"use_aux_hidden_state": False}}, {"places": 0}),
}
PLACES = {"nvidia": (2, 5, 7), "four_places": (0, 3, 5, 7), "final": (FINAL,)}


def flat(config: dict[str, Any]) -> dict[str, Any]:
    """The fields where `Paper` looks for them."""
    return {**config, **config.get("eagle_config", {})}


def check(folder: str, paper: Paper, **config: object) -> None:
    """Serve sequences of unequal lengths and K, and compare every draft."""
    heads.decode("eagle", folder, zoo.ours(reference()), paper.drafts, (4, 1, 2, 3, 4), **config)


QUICK = ("authors", "3.1", "nvidia", "narrow", "biases", "deeper")
slow = partial(pytest.param, marks=pytest.mark.slow)


@pytest.mark.parametrize("form", [form if form in QUICK else slow(form) for form in FORMS])
def test_drafts_are_the_papers(tmp_path: Path, form: str) -> None:
    changes, kind = FORMS[form]
    if form == "nvidia":
        changes = {**changes, "norm_before_fc": True}  # so that the writer makes the norm
    config = heads.EAGLE3_CONFIG | changes
    tensors = heads.eagle3_tensors(config, **kind)
    folder = heads.eagle3(tmp_path, changes, **kind)
    if form == "nvidia":
        (Path(folder) / "config.json").write_text(json.dumps({k: v for k, v in config.items() if "norm_b" not in k}))
    check(folder, Paper(flat(config), tensors, PLACES.get(form, (2, 4, 5))))


@pytest.mark.slow
def test_chunks_and_prefixes_of_names(tmp_path: Path) -> None:
    """A prompt in parts; names as `torch.save` of wrapped models leaves them; the authors' rotary buffer."""
    tensors = heads.eagle3_tensors(heads.EAGLE3_CONFIG)
    stored = {f"module.model.{k}": t for k, t in tensors.items()}
    stored["module.model.midlayer.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    folder = heads.save(tmp_path, heads.EAGLE3_CONFIG, stored)
    check(folder, Paper(heads.EAGLE3_CONFIG, tensors, (2, 4, 5)), max_batch_tokens=11)


@pytest.mark.parametrize("is_tied", [slow(False, id="target"), pytest.param(True, id="tied")])
def test_no_output_matrix_of_its_own(tmp_path: Path, is_tied: bool) -> None:
    """Then it is the target's, or the head's embedding where the config says so."""
    config = heads.EAGLE3_CONFIG | {"tie_word_embeddings": is_tied}
    tensors = heads.eagle3_tensors(config, embedding=is_tied)
    stored = {k: t for k, t in tensors.items() if k != "lm_head.weight"}
    own = {"lm_head.weight": tensors["embed_tokens.weight"]} if is_tied else {}
    check(heads.save(tmp_path, config, stored), Paper(config, stored | own, (2, 4, 5)))


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


@pytest.mark.parametrize(
    ("own", "places"),
    [
        ({"norm_before_residual": True, "norm_before_fc": True, "norm_output": True, **SMALL}, (2, 4, 5)),
        slow({"fc_norm": True, "eagle_aux_hidden_state_layer_ids": [1, 2, 7]}, (1, 2, 7)),
        slow({"eagle_aux_hidden_state_layer_ids": [1, 3, 4]}, (2, 4, 5)),
        slow(
            {"target_hidden_size": None, "eagle_aux_hidden_state_layer_ids": None, "embed_requires_grad": True},
            (2, 4, 5),
        ),
    ],
    ids=["newest", "inputs", "converted", "nulls"],
)
def test_speculators(tmp_path: Path, own: dict[str, object], places: tuple[int, ...]) -> None:
    config = speculators(**own)
    tensors = heads.eagle3_tensors(LAYER | {k: v for k, v in own.items() if v is not None}, mark="layers.0.")
    folder = heads.save(tmp_path, config, tensors | {"verifier_norm.weight": torch.ones(heads.HIDDEN)})
    check(folder, Paper({**LAYER, **own}, tensors, places))


@pytest.mark.parametrize("fusion_bias", [slow(False), True])
def test_eagle_1_of_speculators(tmp_path: Path, fusion_bias: bool) -> None:
    """The same drafts as from the authors' form."""
    tensors = heads.eagle_tensors(fc_bias=fusion_bias)
    config = speculators(speculators_model_type="eagle", layernorms=False, fusion_bias=fusion_bias)
    config |= {"architectures": ["EagleSpeculator"], "transformer_layer_config": LAYER | {"num_hidden_layers": DEPTH}}
    stored = {k.replace("fc.", "fusion_fc.").replace("layers.0.", "transformer."): t for k, t in tensors.items()}
    request, runs = fakes.request((5, 6, 7, 8), max_tokens=20), []
    for folder in (heads.save(tmp_path / "one", config, stored), heads.eagle(tmp_path, fc_bias=fusion_bias)):
        outputs = fakes.run(engine_of(eagle=folder, proposer="eagle"), [request])
        runs.append((outputs.tokens, outputs.finished["r"].stats.accepted_per_position))
    assert runs[0] == runs[1]
    (tmp_path / "one" / "config.json").write_text(json.dumps(config | {"layernorms": True}))
    with pytest.raises(ModelError, match="layernorms is true"):
        load_eagle(str(tmp_path / "one"), None, zoo.ours(reference()))


# ------------------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": ["Eagle3DeepseekV2ForCausalLM"]}, r"architectures are \['Eagle3DeepseekV2ForCausalLM'\]"),
        (
            {"architectures": ["PEagleDraftModel"], "parallel_drafting": True},
            r"architectures are \['PEagleDraftModel'\]",
        ),
        ({"model_type": "qwen3"}, "model_type is 'qwen3'"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config is"),
        ({"eagle_config": 3}, "eagle_config is 3; expected an object"),
        ({"eagle_config": {"parallel_draft_step": 4}}, "parallel_draft_step is 4"),
        ({"eagle_config": {"use_mtp_layernorm": True}}, "use_mtp_layernorm is True"),
        ({"partial_rotary_factor": 0.25}, "partial_rotary_factor is 0.25"),
        ({"logit_scale": 0.5}, "logit_scale is 0.5"),
        ({"eagle_aux_hidden_state_layer_ids": [2, 4, 9]}, r"layer_ids are \[2, 4, 9\]; the target has 8 layers"),
        ({"fc_norm": True}, r"fc_norm\.0\.weight is missing"),
        ({"fc_norm": True, "norm_before_fc": True}, "fc_norm and norm_before_fc are both true"),
        ({"num_hidden_layers": 2}, r"layers\.1\.input_layernorm\.weight is missing"),
        ({"vocab_size": 50}, "a head for 32 features and 50 tokens; the target has 32 and 97"),
        ({"target_hidden_size": 64}, "a head for 64 features"),
        ({"draft_vocab_size": 50}, r"lm_head\.weight is \(97, 32\), expected \(50, 32\)"),
        ({"rope_scaling": {"rope_type": "spiral"}}, "its config is not like a Llama's"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_variants_are_refused_by_name(tmp_path: Path, changes: dict[str, object], words: str) -> None:
    folder = heads.save(tmp_path, heads.EAGLE3_CONFIG | changes, heads.eagle3_tensors(heads.EAGLE3_CONFIG))
    with pytest.raises(ModelError, match=words):
        load_eagle(folder, None, zoo.ours(reference()))


def test_checkpoints_that_do_not_fit(tmp_path: Path) -> None:
    target, config = zoo.ours(reference()), heads.EAGLE3_CONFIG | SMALL
    tensors = heads.eagle3_tensors(config)

    def refused(words: str, changed: dict[str, Tensor], config: dict[str, object] = config) -> None:
        with pytest.raises(ModelError, match=words):
            load_eagle(heads.save(tmp_path, config, changed), None, target)

    refused("drafts 60 of the target's 97 tokens, and d2t", {k: t for k, t in tensors.items() if k != "d2t"})
    refused("d2t is no map from the head's 60 tokens", tensors | {"d2t": torch.zeros(60).long() + 40})
    refused("d2t is no map", tensors | {"d2t": torch.zeros(59).long()})
    refused(r"mask_hidden is not known", tensors | {"mask_hidden": torch.zeros(1, 96)})
    refused(r"self_attn\.q_norm\.weight is not known", tensors | {"midlayer.self_attn.q_norm.weight": torch.ones(8)})
    narrow = SMALL | {"hidden_size": 16, "target_hidden_size": 32}
    refused("16 wide, and embed_tokens", heads.eagle3_tensors(config | narrow), config | narrow)
    refused(
        "does not say norm_before_residual", tensors, {k: v for k, v in speculators().items() if "residual" not in k}
    )
    refused("'peagle'; expected 'eagle3'", tensors, speculators(speculators_model_type="peagle"))
    refused("transformer_layer_config names no model_type", tensors, speculators(transformer_layer_config={}))


# ---------------------------------------------------------------------------------------- planted, and in C


def planted(size: int, step: int) -> tuple[PreTrainedModel, dict[str, object], dict[str, Tensor]]:
    """A target whose next token is that after the last one on a ring, and a head that goes `step` places on it."""
    ring = torch.randperm(size, generator=torch.Generator().manual_seed(5))
    then = torch.zeros(size, size)
    then[ring, ring.roll(-1)] = 1  # [token, next]
    sizes = {"vocab_size": size, "hidden_size": size, "intermediate_size": size, "num_attention_heads": 2}
    model = zoo.with_large_weights(
        LlamaConfig(**zoo.COMMON | sizes | {"num_hidden_layers": DEPTH, "num_key_value_heads": 1, "eos_token_id": None})
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(size))
        model.lm_head.weight.copy_(then.T)
    config = heads.EAGLE3_CONFIG | sizes | {"num_key_value_heads": 1}
    tensors = heads.eagle3_tensors(config, target=size)
    tensors = {k: torch.ones_like(t) if k.endswith("norm.weight") else t for k, t in tensors.items()}
    tensors["midlayer.self_attn.o_proj.weight"].zero_()
    # The feature of a token is made that of its next by fc, and that one's next by the MLP: silu(a) b with a = b.
    tensors["fc.weight"] = torch.cat([then.T, torch.zeros(size, 2 * size)], -1)
    tensors["lm_head.weight"] = torch.eye(size)
    tensors |= {f"midlayer.mlp.{name}_proj.weight": torch.eye(size) for name in ("gate", "up")}
    root = torch.tensor(size**0.5)
    moved = torch.linalg.matrix_power(then, step).T - torch.eye(size)
    tensors["midlayer.mlp.down_proj.weight"] = moved / (silu(root) * root)
    return model, config, {name: tensor.contiguous() for name, tensor in tensors.items()}


@pytest.mark.parametrize(  # in torch, and in C
    ("size", "step", "rate"), [(32, 1, 1.0), (64, 2, 0.0), slow(32, 2, 0.0), slow(64, 1, 1.0)]
)
def test_a_right_head_is_always_accepted_and_a_wrong_one_never(
    tmp_path: Path, size: int, step: int, rate: float
) -> None:
    model, config, tensors = planted(size, step)
    target = zoo.as_served(zoo.ours(model)) if size == 64 else zoo.ours(model)
    settings = {"speculation": "fixed", "proposer": "eagle", "eagle": heads.save(tmp_path, config, tensors)}
    engine = assemble(EngineConfig(target="llama", **settings), target)
    fused = engine.proposers.by_name["eagle"].head._fused
    assert (fused is not None) == (size == 64 and multiplies(torch.bfloat16))
    prompts = [range(i, i + 3 * i + 1) for i in range(5)]
    requests = fakes.requests(prompts, range(1, 6), max_tokens=30, ignore_eos=True)
    stats = [ended.stats for ended in fakes.run(engine, requests).finished.values()]
    assert sum(s.drafted for s in stats) > 100
    assert sum(s.accepted for s in stats) == rate * sum(s.drafted for s in stats)


@pytest.mark.skipif(not multiplies(torch.float32), reason="our C does not run here")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "form", ["authors", "3.1", "before_residual", "before_fc", "biases", "deeper", "window", "dynamic"]
)
def test_layers_in_c_agree_with_torch(form: str, dtype: torch.dtype) -> None:
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "head_dim": 32,
        "num_key_value_heads": 2,
    }
    longer = {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}, "max_position_embeddings": 4}
    changes, kind = (longer, {}) if form == "dynamic" else FORMS[form]
    config = heads.EAGLE3_CONFIG | changes | sizes
    stored = heads.eagle3_tensors(config, target=64, **kind)
    named = {k.replace("midlayer.", "layers.0."): t for k, t in stored.items() if k not in ("d2t", "t2d")}
    options = Eagle3Options.of(config, "a head", DEPTH)
    own = ("model_type", "architectures", "layer_types", "sliding_window")
    settings = LlamaConfig(**{k: v for k, v in config.items() if k not in own})
    settings._attn_implementation = "pilotfish_ragged"
    target = zoo.with_large_weights(LlamaConfig(**zoo.COMMON | {"hidden_size": 64})).to(dtype)
    made = []
    for attend in (native.attend, lambda *given, **named: native.attend(*given, **named)):
        head = Eagle3Head(settings, options, list(named), (64, zoo.VOCAB))
        head.load_state_dict(named)
        arena = KVArena(kv_layout(settings, dtype), 4, 8, torch.device("cpu"))
        runner = Eagle3Runner(head.to(dtype).eval(), None, target, arena, attend)
        assert (runner._fused is not None) == (attend is native.attend)
        generator, rows = torch.Generator().manual_seed(1), []
        with torch.inference_mode():
            for feeds in (
                [Feed(range(5), 0, [2, 0]), Feed([9], 0, [1])],
                [Feed([7, 8, 9, 4], 5, [2, 0], 4), Feed([3], 1, [1])],
            ):
                seen = runner.project(torch.randn(sum(len(f.tokens) for f in feeds), 3 * 64, generator=generator))
                rows += [runner.forward(feeds, seen)]
            made.append(torch.cat([x.float().flatten() for x in (*rows, runner.logits(rows[-1]))]))
    off = (made[0] - made[1]).square().mean().sqrt() / made[1].std()
    assert off < (1e-5 if dtype == torch.float32 else 0.03)


@pytest.mark.skipif(not multiplies(torch.float32), reason="our C does not run here")
@pytest.mark.parametrize("has_norm", [False, True], ids=["paper", "normed"])
def test_the_layer_of_eagle_1_in_c_agrees_with_torch(has_norm: bool) -> None:
    sizes = {"num_attention_heads": 1, "num_key_value_heads": 1, "num_hidden_layers": 1}
    settings = LlamaConfig(**zoo.COMMON | sizes)
    settings._attn_implementation = "pilotfish_ragged"
    tensors = heads.eagle_tensors()
    tensors |= {f"layers.0.self_attn.{name}_proj.weight": torch.randn(32, 32) * 0.2 for name in "kv"}
    tensors |= {"layers.0.input_layernorm.weight": 1 + torch.randn(32) * 0.2} if has_norm else {}
    target, made = zoo.with_large_weights(LlamaConfig(**zoo.COMMON)), []
    for attend in (native.attend, lambda *given, **named: native.attend(*given, **named)):
        head = EagleHead(settings, list(tensors), target.get_input_embeddings())
        head.load_state_dict(tensors)
        arena = KVArena(kv_layout(settings, torch.float32), 4, 8, torch.device("cpu"))
        runner = EagleRunner(head.eval(), target, arena, attend)
        assert (runner._fused is not None) == (attend is native.attend)
        generator = torch.Generator().manual_seed(1)
        with torch.inference_mode():
            feeds = [Feed(range(5), 0, [2, 0], 3), Feed([9], 0, [1])]
            made.append(runner.logits(runner.forward(feeds, torch.randn(6, 32, generator=generator))))
    assert (made[0] - made[1]).square().mean().sqrt() < 1e-5 * made[1].std()
