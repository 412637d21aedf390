"""DFlash: drafts are those of the paper's formulas over the whole text, and what is not served is refused by name."""

from __future__ import annotations

from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu
from transformers import PreTrainedModel

from engine.attention import paged, registry
from engine.attention.spec import AttentionSpec
from engine.config import EngineConfig
from engine.engine import Engine
from engine.errors import ModelError
from engine.kv.batch import Feed, RaggedBatch
from engine.native import multiplies
from engine.params import SpeculationParams
from engine.proposers.heads.dflash import attend_bidirectionally, load_dflash
from engine.startup.build import assemble
from engine.stats import Forward
from tests import fakes, heads, zoo
from tests.engine.proposers.heads import dflash_checkpoints as made


@cache
def reference() -> PreTrainedModel:
    return zoo.with_large_weights(zoo.config_of("llama", num_hidden_layers=4))


def engine_of(folder: str, **config: object) -> Engine:
    """A fresh target each: its features are read by a hook that stays."""
    settings = EngineConfig(target="llama", dflash=folder, **{"speculation": "fixed", "proposer": "dflash", **config})
    return assemble(settings, zoo.ours(reference()))


# ------------------------------------------------------------------------ the paper's formulas, without any cache


def layer_of(t: dict[str, Tensor], i: int, x: Tensor, context: Tensor, seen: Tensor) -> Tensor:
    """One layer over a block `[k + 1, hidden]` behind its context `[n, hidden]`; `seen` `[k + 1, n + k + 1]`."""

    def projected(name: str, rows: Tensor) -> Tensor:
        out = rows @ t[f"layers.{i}.self_attn.{name}_proj.weight"].T
        return out + t.get(f"layers.{i}.self_attn.{name}_proj.bias", torch.zeros(()))

    own = heads.rms(x, t[f"layers.{i}.input_layernorm.weight"])
    both, positions = torch.cat([context, own]), torch.arange(len(context) + len(x))
    q, k, v = (
        projected(n, rows).unflatten(1, (-1, made.HEAD_DIM)) for n, rows in (("q", own), ("k", both), ("v", both))
    )
    q = heads.turned(heads.rms(q, t[f"layers.{i}.self_attn.q_norm.weight"]), positions[len(context) :], 1000.0)
    k = heads.turned(heads.rms(k, t[f"layers.{i}.self_attn.k_norm.weight"]), positions, 1000.0)
    group = q.shape[1] // k.shape[1]
    scores = torch.einsum("thd,shd->hts", q, k.repeat_interleave(group, 1)) * made.HEAD_DIM**-0.5
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    x = x + projected("o", torch.einsum("hts,shd->thd", weights, v.repeat_interleave(group, 1)).flatten(1))
    y = heads.rms(x, t[f"layers.{i}.post_attention_layernorm.weight"])
    gate, up, down = (t[f"layers.{i}.mlp.{n}_proj.weight"] for n in ("gate", "up", "down"))
    return x + (silu(y @ gate.T) * (y @ up.T)) @ down.T


@torch.no_grad()
def features(tokens: list[int]) -> Tensor:
    """Of all positions but the newest, which is never fed: the target's states before its layers 1 and 3."""
    states = _states(tuple(tokens))
    return torch.cat([states[1][0], states[3][0]], -1)[: len(tokens) - 1]


@cache
def _states(tokens: tuple[int, ...]) -> tuple[Tensor, ...]:
    return reference()(torch.tensor([tokens]), output_hidden_states=True).hidden_states


@torch.no_grad()
def drafts_of(
    tokens: list[int], k: int, t: dict[str, Tensor], first: int = 0, *, window: int | None = None, causal: bool = False
) -> list[int]:
    """`window`: of the first layer and the last; `causal`: all layers are."""
    model = reference()
    context = heads.rms(features(tokens)[first:] @ t["fc.weight"].T, t["hidden_norm.weight"])
    table = t.get("embed_tokens.weight", model.model.embed_tokens.weight)
    x = table[torch.tensor([tokens[-1], *[made.MASK] * k])]
    row, key = torch.arange(len(context), len(context) + k + 1)[:, None], torch.arange(len(context) + k + 1)
    before = key <= row
    for i in range(made.LAYERS):
        slides = window is not None and i != 1
        seen = before & (key > row - window) if slides else before if causal else torch.ones_like(before)
        x = layer_of(t, i, x, context, seen)
    logits = heads.rms(x[1:], t["norm.weight"]) @ t.get("lm_head.weight", model.lm_head.weight).T
    found = logits.argmax(-1)
    return (found + t["d2t"][found] if "d2t" in t else found).tolist()


def check(
    folder: Path, config: dict[str, object], t: dict[str, Tensor], *, window: int | None = None, causal: bool = False,
    **options: object,
) -> heads.Checked:  # fmt: skip
    """Serve a draft of this config and these tensors, and compare every draft with the formulas."""
    expected = partial(drafts_of, t=t, window=window, causal=causal)
    checked = heads.decode("dflash", heads.save(folder, config, t), zoo.ours(reference()), expected, **options)
    assert set(checked.counts) >= {1, 2, 3, 5}
    return checked


# ------------------------------------------------------------------------------------------------ served drafts

slow = partial(pytest.param, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("attention", "max_batch_tokens"),  # prompts in one pass or in chunks
    [("reference", 512), ("auto", 11), slow("sdpa", 11), slow("rows", 512), slow("fixed", 512)],
)
def test_drafts_are_those_of_the_formulas(tmp_path: Path, attention: str, max_batch_tokens: int) -> None:
    options = {"attention": attention, "max_batch_tokens": max_batch_tokens, "page_size": 8}
    check(tmp_path, made.AUTHORS, made.tensors(), **options)


def own(**changes: object) -> dict[str, object]:
    return made.AUTHORS | {"dflash_config": made.AUTHORS["dflash_config"] | changes}


SLIDING_SPECULATORS = made.SPECULATORS | {"transformer_layer_config": made.BACKBONE | made.SLIDING}


@pytest.mark.parametrize(
    ("config", "kind", "how"),
    [
        slow(made.AUTHORS | made.SLIDING, {}, {"window": made.WINDOW}),
        slow(made.AUTHORS | {"is_causal": True}, {}, {"causal": True}),
        (own(causal=True), {}, {"causal": True}),
        slow(made.AUTHORS | {"attention_bias": True}, {"bias": True}, {}),
        # Layers are counted otherwise; embedding, output and a reduced vocabulary are the draft's own.
        slow(made.SPECULATORS, {"speculators": True}, {}),
        (SLIDING_SPECULATORS, {"speculators": True}, {"window": made.WINDOW}),
    ],
    ids=["window", "is_causal", "causal", "biases", "speculators", "window of speculators"],
)
def test_other_forms_too(tmp_path: Path, config: dict[str, object], kind: dict[str, bool], how: dict[str, Any]) -> None:
    """Layers with a window are causal, and so are all where the config says it."""
    check(tmp_path, config, made.tensors(**kind), **how)


def test_logits_are_capped(tmp_path: Path) -> None:
    draft, capped = (
        engine_of(heads.save(tmp_path / str(more), made.AUTHORS | more, made.tensors()))
        .proposers.by_name["dflash"]
        .head
        for more in ({}, {"final_logit_softcapping": 5.0})
    )
    hidden = torch.randn(3, made.HIDDEN, generator=torch.Generator().manual_seed(0)) * 3
    logits = draft.logits(hidden)
    assert logits.abs().max() > 5
    torch.testing.assert_close(capped.logits(hidden), torch.tanh(logits / 5) * 5)


def test_a_draft_keeps_its_type_on_a_cpu(tmp_path: Path) -> None:
    """Stored in bfloat16, for a target in float32: it stays in bfloat16 where our C multiplies that, and is right."""
    tensors = {name: tensor.bfloat16() for name, tensor in made.tensors().items()}
    engine = engine_of(heads.save(tmp_path, made.AUTHORS, tensors))
    draft = engine.proposers.by_name["dflash"].head
    want = torch.bfloat16 if multiplies(torch.bfloat16) else torch.float32
    assert draft.arena.layout.dtype == draft.project(torch.zeros(1, 2 * made.HIDDEN)).dtype == want
    planted, _ = acceptance(tmp_path, right=True, dtype=torch.bfloat16)
    assert planted == [1.0] * 8


@pytest.mark.parametrize("name", ["reference", "sdpa", "rows", "native", "fixed", "kernel"])
def test_attention_to_all(name: str) -> None:
    """Rows of unequal blocks in scattered pages, by each attention: a row sees its own sequence, to the end."""
    attend = paged.attend_plainly if name == "kernel" else registry._BY_NAME[name]
    generator = torch.Generator().manual_seed(0)
    tables, starts, sizes = ([5, 2, 7], [0], [3, 6]), (9, 0, 4), (3, 1, 4)
    feeds = [Feed([1] * n, start, table) for n, start, table in zip(sizes, starts, tables, strict=True)]
    batch = RaggedBatch.of(feeds, 4, torch.device("cpu"))
    k, v = (torch.randn(32, 2, 16, generator=generator) for _ in range(2))
    query = torch.randn(8, 4, 16, generator=generator)
    made_of = attend_bidirectionally(attend, query, k, v, batch, AttentionSpec(0.3))
    for feed, rows in zip(feeds, query.split(sizes), strict=True):
        where = torch.tensor([feed.page_table[p // 4] * 4 + p % 4 for p in range(feed.kv_len)])
        keys, values = (x[where].repeat_interleave(2, 1) for x in (k, v))
        weights = (torch.einsum("thd,shd->hts", rows, keys) * 0.3).softmax(-1)
        want = torch.einsum("hts,shd->thd", weights, values)
        torch.testing.assert_close(made_of[: len(rows)], want, rtol=1e-4, atol=1e-5)
        made_of = made_of[len(rows) :]


def test_one_pass_whatever_the_number_of_drafts(tmp_path: Path) -> None:
    checked = check(tmp_path, made.AUTHORS, made.tensors(), max_batch_size=1)
    assert checked.inner.is_parallel
    blocks = [passes[-1] for passes in checked.passes if passes]
    assert {forward.tokens for forward in blocks} >= {2, 3, 4, 6, 9}
    assert all(forward == Forward("draft", 1, forward.tokens) for forward in blocks)
    longer = [passes for passes in checked.passes if len(passes) > 1]
    assert longer, "a prompt of more tokens than a block has rows is reading of its own"
    assert all(read.tokens > 9 for read, _ in longer)
    assert sum(len(passes) == 1 for passes in checked.passes) > len(longer)


def test_no_more_drafts_than_the_block_has_masks(tmp_path: Path) -> None:
    folder = heads.save(tmp_path, made.AUTHORS | {"block_size": 4}, made.tensors())
    checked = heads.decode(
        "dflash", folder, zoo.ours(reference()), lambda tokens, k: drafts_of(tokens, min(k, 3), made.tensors())
    )
    assert max(checked.counts) == 3


# --------------------------------------------------------------------------------------------- right and wrong


def acceptance(
    folder: Path, *, right: bool, dtype: torch.dtype = torch.float32, **law: float
) -> tuple[list[float], list[int]]:
    """For 1 to 8 drafts a round, how many are kept of those of a planted draft, and in how many rounds."""
    draft = made.planted(folder, right=right, dtype=dtype)
    settings = EngineConfig(target="planted", dflash=draft, speculation="fixed", proposer="dflash")
    engine, text = assemble(settings, zoo.ours(made.planted_target())), [made.FIRST]
    while len(text) < 60:
        text.append(made.successor(text[-1]))
    wishes = {k: SpeculationParams(num_draft_tokens=k) for k in range(1, 9)}
    requests = [
        fakes.request(text[: 3 + k], name=str(k), wish=wish, max_tokens=30, **law) for k, wish in wishes.items()
    ]
    outputs = fakes.run(engine, requests)
    assert outputs.tokens == {str(k): text[3 + k : 33 + k] for k in range(1, 9)}
    stats = [outputs.finished[request.request_id].stats for request in requests]
    return [one.acceptance_rate for one in stats], [one.rounds for one in stats]


@pytest.mark.parametrize("law", [{}, {"temperature": 0.9, "seed": 4}], ids=["greedy", "sampled"])
def test_planted(tmp_path: Path, law: dict[str, float]) -> None:
    """Of a draft that is right by construction all drafts are kept, and of one that is wrong none.

    Of 30 tokens the first comes from the prompt, and the last may have no drafts.
    """
    assert acceptance(tmp_path, right=True, **law) == ([1.0] * 8, [-(-28 // (k + 1)) for k in range(1, 9)])
    assert acceptance(tmp_path, right=False, **law) == ([0.0] * 8, [28] * 8)


# --------------------------------------------------------------------------------------------- what is refused


def refused(tmp_path: Path, config: dict[str, object], tensors: dict[str, Tensor] | None = None) -> str:
    """What a load of this draft says."""
    folder = heads.save(tmp_path / "head", config, made.tensors() if tensors is None else tensors)
    with pytest.raises(ModelError) as raised:
        load_dflash(folder, None, reference())
    return str(raised.value)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "neither dflash_config nor speculators_model_type"),
        (made.AUTHORS | {"architectures": ["DFlash2DraftModel"]}, "is a DFlash2DraftModel"),
        (made.AUTHORS | {"model_type": "laguna"}, "model_type is 'laguna'"),
        (made.AUTHORS | {"logit_scale": 0.5}, "logit_scale is 0.5, which is not known"),
        (own(projector_type="domino"), "dflash_config.projector_type is 'domino', which is not known"),
        (own(markov_rank=64), "dflash_config.markov_rank is 64, which is not known"),
        (own(target_layer_ids=None), "target_layer_ids None; expected a list of layers"),
        (own(target_layer_ids=[0, 3]), r"target_layer_ids [0, 3]; expected layers before the last of its 4"),
        (own(mask_token_id=None), "mask_token_id None; expected a token"),
        (own(mask_token_id=97), "mask_token_id is 97; the target has 97 tokens"),
        (made.AUTHORS | {"block_size": None}, "block_size None; expected a positive number"),
        (made.AUTHORS | {"block_size": 1}, "block_size is 1"),
        (made.AUTHORS | {"num_target_layers": 36}, "num_target_layers 36; this one has 4 layers"),
        (made.AUTHORS | {"hidden_size": 64}, "is for 64 features and 97 tokens; the target has (32, 97)"),
        (made.AUTHORS | made.SLIDING | {"use_sliding_window": False}, "need sliding_window, and use_sliding_window"),
        (made.AUTHORS | made.SLIDING | {"is_causal": False}, "causal is false beside sliding_attention"),
        (made.AUTHORS | {"layer_types": ["chunked_attention"] * 3}, "layer_types is ['chunked_attention'"),
        (
            made.AUTHORS | {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
            "its rope_type is 'dynamic'; served are default, linear, llama3, yarn",
        ),
        (made.SPECULATORS | {"speculators_model_type": "dspark"}, "speculators_model_type is 'dspark'"),
        (made.SPECULATORS | {"sample_from_anchor": True}, "sample_from_anchor is true"),
        (made.SPECULATORS | {"target_hidden_size": 64}, "target_hidden_size is 64 beside a hidden_size of 32"),
        (made.SPECULATORS | {"transformer_layer_config": None}, "no transformer_layer_config"),
        (made.SPECULATORS | {"markov_rank": 256}, "markov_rank is 256, which is not known"),
        (
            made.SPECULATORS
            | {"transformer_layer_config": made.BACKBONE | made.SLIDING, "sliding_window_non_causal": True},
            "sliding_window_non_causal is True",
        ),
    ],
)
def test_what_is_not_served_is_named(tmp_path: Path, config: dict[str, object], said: str) -> None:
    assert said in refused(tmp_path, config)


def test_tensors_that_do_not_fit(tmp_path: Path) -> None:
    whole, reduced = made.tensors(), made.tensors(speculators=True)

    def without(tensors: dict[str, Tensor], *names: str) -> dict[str, Tensor]:
        return {name: tensor for name, tensor in tensors.items() if name not in names}

    assert "fc.weight is (32, 32), expected (32, 64)" in refused(tmp_path, made.AUTHORS, made.tensors(places=1))
    assert "norm.weight is missing" in refused(tmp_path, made.AUTHORS, without(whole, "norm.weight"))
    assert "q_norm.weight is missing" in refused(
        tmp_path, made.AUTHORS, without(whole, "layers.0.self_attn.q_norm.weight")
    )
    assert "markov_head.w1 is not known" in refused(tmp_path, made.AUTHORS, whole | {"markov_head.w1": torch.zeros(3)})
    assert "expected d2t and lm_head.weight" in refused(tmp_path, made.SPECULATORS, without(reduced, "d2t"))
    assert "expected d2t and lm_head.weight" in refused(tmp_path, made.SPECULATORS, without(reduced, "lm_head.weight"))
    for d2t in (torch.zeros(9, dtype=torch.int64), reduced["d2t"] + 90, -torch.arange(made.KNOWN)):
        assert "d2t does not map 50 draft tokens" in refused(tmp_path, made.SPECULATORS, reduced | {"d2t": d2t})
