"""DFlash: drafts are those of the paper's formulas over the whole text, and what is not served is refused by name."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from pathlib import Path

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
from engine.params import SamplingParams, SpeculationParams
from engine.proposers.base import Passed, Proposal
from engine.proposers.heads.dflash import attend_bidirectionally, load_dflash
from engine.startup.build import assemble
from engine.stats import Forward
from engine.types import Request, Sequence
from tests import fakes, heads, zoo
from tests.engine.proposers.heads import dflash_checkpoints as made

NAN = float("nan")


@lru_cache
def reference() -> PreTrainedModel:
    return zoo.with_large_weights(zoo.config_of("llama", num_hidden_layers=4))


def engine_of(folder: str, **config: object) -> Engine:
    """A fresh target each: its features are read by a hook that stays."""
    settings = EngineConfig(target="llama", dflash=folder, **{"speculation": "fixed", "proposer": "dflash", **config})
    return assemble(settings, zoo.ours(reference()))


# ------------------------------------------------------------------------ the paper's formulas, without any cache


def normed(x: Tensor, weight: Tensor) -> Tensor:
    return x * (x.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt() * weight


def turned(x: Tensor, positions: Tensor, theta: float = 1000.0) -> Tensor:
    """Rotary embedding of `[rows, heads, dim]`."""
    half = x.shape[-1] // 2
    angles = positions[:, None, None] * theta ** (-torch.arange(half) / half)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], -1)


def layer_of(t: dict[str, Tensor], i: int, x: Tensor, context: Tensor, seen: Tensor) -> Tensor:
    """One layer over a block `[k + 1, hidden]` behind its context `[n, hidden]`; `seen` `[k + 1, n + k + 1]`."""

    def projected(name: str, rows: Tensor) -> Tensor:
        out = rows @ t[f"layers.{i}.self_attn.{name}_proj.weight"].T
        return out + t.get(f"layers.{i}.self_attn.{name}_proj.bias", torch.zeros(()))

    own = normed(x, t[f"layers.{i}.input_layernorm.weight"])
    both, positions = torch.cat([context, own]), torch.arange(len(context) + len(x))
    q, k, v = (
        projected(n, rows).unflatten(1, (-1, made.HEAD_DIM)) for n, rows in (("q", own), ("k", both), ("v", both))
    )
    q = turned(normed(q, t[f"layers.{i}.self_attn.q_norm.weight"]), positions[len(context) :])
    k = turned(normed(k, t[f"layers.{i}.self_attn.k_norm.weight"]), positions)
    group = q.shape[1] // k.shape[1]
    scores = torch.einsum("thd,shd->hts", q, k.repeat_interleave(group, 1)) * made.HEAD_DIM**-0.5
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    x = x + projected("o", torch.einsum("hts,shd->thd", weights, v.repeat_interleave(group, 1)).flatten(1))
    y = normed(x, t[f"layers.{i}.post_attention_layernorm.weight"])
    gate, up, down = (t[f"layers.{i}.mlp.{n}_proj.weight"] for n in ("gate", "up", "down"))
    return x + (silu(y @ gate.T) * (y @ up.T)) @ down.T


@torch.no_grad()
def features(tokens: list[int]) -> Tensor:
    """Of all positions but the newest, which is never fed: the target's states before its layers 1 and 3."""
    states = reference()(torch.tensor([tokens]), output_hidden_states=True).hidden_states
    return torch.cat([states[1][0], states[3][0]], -1)[: len(tokens) - 1]


@torch.no_grad()
def drafts_of(
    tokens: list[int], k: int, t: dict[str, Tensor], first: int = 0, *, window: int | None = None, causal: bool = False
) -> list[int]:
    """`window`: of the first layer and the last; `causal`: all layers are."""
    model = reference()
    context = normed(features(tokens)[first:] @ t["fc.weight"].T, t["hidden_norm.weight"])
    table = t.get("embed_tokens.weight", model.model.embed_tokens.weight)
    x = table[torch.tensor([tokens[-1], *[made.MASK] * k])]
    row, key = torch.arange(len(context), len(context) + k + 1)[:, None], torch.arange(len(context) + k + 1)
    before = key <= row
    for i in range(made.LAYERS):
        slides = window is not None and i != 1
        seen = before & (key > row - window) if slides else before if causal else torch.ones_like(before)
        x = layer_of(t, i, x, context, seen)
    logits = normed(x[1:], t["norm.weight"]) @ t.get("lm_head.weight", model.lm_head.weight).T
    found = logits.argmax(-1)
    return (found + t["d2t"][found] if "d2t" in t else found).tolist()


class CheckedBlocks:
    """A proposer whose every draft is compared with a recomputation, after all that must not matter was poisoned."""

    uses_draft_kv, shares_draft_kv, is_parallel = True, False, True

    def __init__(self, inner: object, expected: object) -> None:
        self.inner, self.expected, self.depths, self.passes = inner, expected, set[int](), list[tuple[Forward, ...]]()

    def observe(self, passed: list[Passed]) -> None:
        self.inner.observe(passed)

    def propose(self, sequences: list[Sequence], k_each: list[int]) -> Proposal:
        for sequence in sequences:
            self.poison(sequence)
        proposal = self.inner.propose(sequences, k_each)
        for sequence, k, drafts in zip(sequences, k_each, proposal.tokens, strict=True):
            assert not drafts or list(drafts) == self.expected(sequence.tokens, k)
            self.depths.add(len(drafts))
        self.passes.append(proposal.forwards)
        return proposal

    def poison(self, sequence: Sequence) -> None:
        """Keys and values beyond the cursor: of the last block, and of whoever had the pages before."""
        arena = self.inner._draft.arena
        for position in range(sequence.draft.kv_len, len(sequence.draft.page_table) * arena.page_size):
            page, row = divmod(position, arena.page_size)
            where = sequence.draft.page_table[page] * arena.page_size + row
            for layer in range(made.LAYERS):
                arena.k[layer][where] = arena.v[layer][where] = NAN


def check(engine: Engine, expected: object) -> CheckedBlocks:
    """Let the engine decode five sequences and hold every draft against `expected`."""
    by_name = engine._proposers._by_name
    checked = by_name["dflash"] = CheckedBlocks(by_name["dflash"], expected)
    requests = [
        Request(
            request_id=str(i),
            token_ids=tuple(prompt[: 1 + i * 9]),
            sampling=SamplingParams(max_tokens=12),
            speculation=SpeculationParams(num_draft_tokens=k),
        )
        for i, (prompt, k) in enumerate(zip(zoo.prompts(6), (8, 1, 2, 3, 8, 5), strict=True))
    ]
    fakes.run(engine, requests)
    assert checked.depths >= {1, 2, 3, 5}
    return checked


# ------------------------------------------------------------------------------------------------ served drafts


@pytest.mark.parametrize("attention", ["reference", "sdpa", "rows", "auto", "fixed"])
@pytest.mark.parametrize("max_batch_tokens", [512, 11], ids=["whole", "chunked"])
def test_drafts_are_those_of_the_formulas(tmp_path: Path, attention: str, max_batch_tokens: int) -> None:
    engine = engine_of(
        made.authors(tmp_path), attention=attention, max_batch_tokens=max_batch_tokens, max_batch_size=5, page_size=8
    )
    check(engine, lambda tokens, k: drafts_of(tokens, k, made.tensors()))


def test_layers_with_a_window_are_causal(tmp_path: Path) -> None:
    folder = heads.save(tmp_path, made.AUTHORS | made.SLIDING, made.tensors())
    check(engine_of(folder), lambda tokens, k: drafts_of(tokens, k, made.tensors(), window=made.WINDOW))


@pytest.mark.parametrize("where", ["is_causal", "causal"])
def test_a_draft_that_is_causal_throughout(tmp_path: Path, where: str) -> None:
    own = made.AUTHORS["dflash_config"] | ({"causal": True} if where == "causal" else {})
    config = made.AUTHORS | {"dflash_config": own} | ({"is_causal": True} if where == "is_causal" else {})
    engine = engine_of(heads.save(tmp_path, config, made.tensors()))
    check(engine, lambda tokens, k: drafts_of(tokens, k, made.tensors(), causal=True))


def test_attention_with_biases(tmp_path: Path) -> None:
    folder = heads.save(tmp_path, made.AUTHORS | {"attention_bias": True}, made.tensors(bias=True))
    check(engine_of(folder), lambda tokens, k: drafts_of(tokens, k, made.tensors(bias=True)))


def test_the_form_of_speculators(tmp_path: Path) -> None:
    """Layers are counted otherwise; embedding, output and a reduced vocabulary are the draft's own."""
    tensors = made.tensors(speculators=True)
    folder = heads.save(tmp_path, made.SPECULATORS, tensors)
    check(engine_of(folder), lambda tokens, k: drafts_of(tokens, k, tensors))


def test_a_window_in_the_form_of_speculators(tmp_path: Path) -> None:
    config = made.SPECULATORS | {"transformer_layer_config": made.BACKBONE | made.SLIDING}
    tensors = made.tensors(speculators=True)
    folder = heads.save(tmp_path, config, tensors)
    check(engine_of(folder), lambda tokens, k: drafts_of(tokens, k, tensors, window=made.WINDOW))


def test_logits_are_capped(tmp_path: Path) -> None:
    draft, capped = (
        engine_of(heads.save(tmp_path / str(more), made.AUTHORS | more, made.tensors()))
        ._proposers._by_name["dflash"]
        ._draft
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
    draft = engine._proposers._by_name["dflash"]._draft
    want = torch.bfloat16 if multiplies(torch.bfloat16) else torch.float32
    assert draft.arena.layout.dtype == draft.project(torch.zeros(1, 2 * made.HIDDEN)).dtype == want
    planted, _ = acceptance(tmp_path, SamplingParams(), right=True, dtype=torch.bfloat16)
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
    engine = engine_of(made.authors(tmp_path), max_batch_size=1)
    checked = check(engine, lambda tokens, k: drafts_of(tokens, k, made.tensors()))
    assert engine._proposers._by_name["dflash"].inner.is_parallel
    blocks = [passes[-1] for passes in checked.passes if passes]
    assert {forward.tokens for forward in blocks} >= {2, 3, 4, 6, 9}
    assert all(forward == Forward("draft", 1, forward.tokens) for forward in blocks)
    longer = [passes for passes in checked.passes if len(passes) > 1]
    assert longer, "a prompt of more tokens than a block has rows is reading of its own"
    assert all(read.tokens > 9 for read, _ in longer)
    assert sum(len(passes) == 1 for passes in checked.passes) > len(longer)


def test_no_more_drafts_than_the_block_has_masks(tmp_path: Path) -> None:
    folder = heads.save(tmp_path, made.AUTHORS | {"block_size": 4}, made.tensors())
    engine = engine_of(folder)
    asked = Request(request_id="r", token_ids=(5, 6, 7, 8), sampling=SamplingParams(max_tokens=20))
    by_name = engine._proposers._by_name
    checked = by_name["dflash"] = CheckedBlocks(by_name["dflash"], lambda t, k: drafts_of(t, min(k, 3), made.tensors()))
    fakes.run(engine, [asked])
    assert max(checked.depths) == 3


def test_a_prompt_whose_start_was_never_seen(tmp_path: Path) -> None:
    """A sequence that starts behind a cached prefix: the block attends to what is known, at its true distance."""
    engine = engine_of(made.authors(tmp_path))
    dflash, tokens = engine._proposers._by_name["dflash"], list(range(3, 15))
    [sequence] = engine._intake.open(Request(request_id="r", token_ids=tuple(tokens), sampling=SamplingParams()))
    sequence.draft.page_table.append(0)
    show(dflash, tokens, 5, len(tokens) - 1)
    dflash.observe([Passed(sequence, Feed(tokens[5:-1], 5, [0]), 0)])
    [drafts] = dflash.propose([sequence], [4]).tokens
    assert list(drafts) == drafts_of(tokens, 4, made.tensors(), first=5)
    assert sequence.draft.kv_len == len(tokens) - 1 - 5
    show(dflash, tokens, 8, 9)
    dflash.observe([Passed(sequence, Feed(tokens[8:9], 8, [0]), 0)])
    assert dflash.propose([sequence], [4]).tokens == ((),), "what it was shown does not reach the end: no drafts"


def show(dflash: object, tokens: list[int], start: int, stop: int) -> None:
    """Let the tap hold the features of positions start .. stop - 1."""
    for place, rows in zip((1, 3), features(tokens)[start:stop].chunk(2, -1), strict=True):
        dflash._tap.keep(place, rows)


# --------------------------------------------------------------------------------------------- right and wrong


def acceptance(
    folder: Path, law: SamplingParams, *, right: bool, dtype: torch.dtype = torch.float32
) -> tuple[list[float], list[int]]:
    """For 1 to 8 drafts a round, how many are kept of those of a planted draft, and in how many rounds."""
    draft = made.planted(folder, right=right, dtype=dtype)
    settings = EngineConfig(target="planted", dflash=draft, speculation="fixed")
    engine, text = assemble(settings, zoo.ours(made.planted_target())), [made.FIRST]
    while len(text) < 60:
        text.append(made.successor(text[-1]))
    requests = [
        Request(
            request_id=str(k),
            token_ids=tuple(text[: 3 + k]),
            sampling=replace(law, max_tokens=30),
            speculation=SpeculationParams(num_draft_tokens=k, proposer="dflash"),
        )
        for k in range(1, 9)
    ]
    outputs = fakes.run(engine, requests)
    assert outputs.tokens == {str(k): text[3 + k : 33 + k] for k in range(1, 9)}
    stats = [outputs.finished[request.request_id].stats for request in requests]
    return [one.acceptance_rate for one in stats], [one.rounds for one in stats]


@pytest.mark.parametrize("law", [SamplingParams(), SamplingParams(temperature=0.9, seed=4)], ids=["greedy", "sampled"])
def test_planted(tmp_path: Path, law: SamplingParams) -> None:
    """Of a draft that is right by construction all drafts are kept, and of one that is wrong none.

    Of 30 tokens the first comes from the prompt, and the last may have no drafts.
    """
    assert acceptance(tmp_path, law, right=True) == ([1.0] * 8, [-(-28 // (k + 1)) for k in range(1, 9)])
    assert acceptance(tmp_path, law, right=False) == ([0.0] * 8, [28] * 8)


# --------------------------------------------------------------------------------------------- what is refused


def refused(tmp_path: Path, config: dict[str, object], tensors: dict[str, Tensor] | None = None) -> str:
    """What a load of this draft says."""
    folder = heads.save(tmp_path / "head", config, made.tensors() if tensors is None else tensors)
    with pytest.raises(ModelError) as raised:
        load_dflash(folder, None, reference())
    return str(raised.value)


def own(**changes: object) -> dict[str, object]:
    return made.AUTHORS | {"dflash_config": made.AUTHORS["dflash_config"] | changes}


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
