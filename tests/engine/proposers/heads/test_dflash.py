"""DFlash: drafts are those of the paper's formulas over the whole text."""

from __future__ import annotations

from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu
from transformers import PreTrainedModel

from pilotfish.engine.attention import paged, registry
from pilotfish.engine.attention.reference import AttentionSpec
from pilotfish.engine.config import EngineConfig
from pilotfish.engine.engine import Engine
from pilotfish.engine.kv.batch import Feed, RaggedBatch
from pilotfish.engine.proposers.heads.dflash import DFlashConfig, attend_bidirectionally
from pilotfish.engine.stats import Forward
from tests import heads, zoo
from tests.engine.proposers.heads import dflash_checkpoints as made
from tests.scripted import drafts_from


@cache
def reference() -> PreTrainedModel:
    return zoo.with_large_weights(zoo.config_of("llama", num_hidden_layers=4))


def engine_of(folder: str, **config: object) -> Engine:
    """A fresh target each: its features are read by a hook that stays."""
    settings = EngineConfig(target="llama", draft=folder, **{"speculation": "fixed", "proposer": "dflash", **config})
    return heads.assembled(settings, zoo.ours(reference()))


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


def own(**changes: object) -> dict[str, object]:
    return made.AUTHORS | {"dflash_config": made.AUTHORS["dflash_config"] | changes}


SLIDING_SPECULATORS = made.SPECULATORS | {"transformer_layer_config": made.BACKBONE | made.SLIDING}


@pytest.mark.parametrize(
    ("config", "kind", "how", "options"),
    [
        (made.AUTHORS, {}, {}, {"max_batch_tokens": 11, "page_size": 8}),
        (own(causal=True) | {"attention_bias": True}, {"bias": True}, {"causal": True}, {}),
        # Layers are counted otherwise; embedding, output and a reduced vocabulary are the draft's own.
        (SLIDING_SPECULATORS, {"speculators": True}, {"window": made.WINDOW}, {"attention": "reference"}),
    ],
    ids=["in chunks", "causal, with biases", "window of speculators"],
)
def test_drafts_are_those_of_the_formulas(
    tmp_path: Path, config: dict[str, object], kind: dict[str, bool], how: dict[str, Any], options: dict[str, object]
) -> None:
    """Layers with a window are causal, and so are all where the config says it."""
    check(tmp_path, config, made.tensors(**kind), **how, **options)


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
    engine = engine_of(heads.save(tmp_path, made.AUTHORS | {"block_size": 4}, made.tensors()))
    draft, tokens = engine.proposers.by_name["dflash"], list(range(3, 15))
    sequence = heads.opened(tokens)
    heads.show(draft, sequence, dict(zip((1, 3), features(tokens).chunk(2, -1), strict=True)), 0, len(tokens) - 1)
    assert drafts_from(draft, [sequence], [8]) == (tuple(drafts_of(tokens, 3, made.tensors())),)


@pytest.mark.parametrize(
    ("config", "causal"),
    [
        (made.AUTHORS, [False] * 3),
        (own(causal=True), [True] * 3),
        (made.AUTHORS | {"is_causal": True}, [True] * 3),
        (made.AUTHORS | made.SLIDING, [True, False, True]),
    ],
)
def test_which_layers_are_causal(config: dict[str, object], causal: list[bool]) -> None:
    assert DFlashConfig.of("a draft", config, zoo.ours(reference()), made.tensors()).is_causal == tuple(causal)


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
