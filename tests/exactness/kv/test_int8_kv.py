"""Keys and values in int8: other numbers than in floats, and the same ones in any company and under any drafts."""

from __future__ import annotations

import pytest
import torch

from engine import LLM, SamplingParams
from engine.config import EngineConfig
from engine.engine import Engine
from engine.errors import ModelError
from engine.kv.rounded import SCALE_BYTES
from engine.model.runner import layout_of_model
from engine.params import SpeculationMode, SpeculationParams
from engine.startup.build import assemble
from engine.types import Request, Sequence
from models import corpus, embedded_draft, embedded_eagle, embedded_medusa, embedded_target
from tests import fakes, zoo
from tests.covering import some

FAMILIES = (
    "llama", "gpt2", "gemma2", "gpt-oss", "deepseek-v3", "llama-4", "gemma-3n", "qwen-3.5"
)  # fmt: skip
PROPOSERS = ("none", "ngram", "model")
NEW_TOKENS = 16
PAGE, PAGES = 4, 30


def tokens_of(engine: Engine, prompts: list[list[int]], proposer: str) -> list[list[int]]:
    asked = {
        "sampling": SamplingParams(max_tokens=NEW_TOKENS, temperature=0.7, seed=3, ignore_eos=True),
        "speculation": SpeculationParams(mode=SpeculationMode.FIXED, num_draft_tokens=3, proposer=proposer),
    }
    done = fakes.run(engine, [Request(request_id=str(i), token_ids=tuple(p), **asked) for i, p in enumerate(prompts)])
    return [done.tokens[str(i)] for i in range(len(prompts))]


@pytest.mark.parametrize("family", some(FAMILIES, ["deepseek-v3", "qwen-3.5"]))
def test_each_family_in_chunks_with_drafts_cached_and_preempted(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = zoo.reference(family)
    pair, prompts = (zoo.as_served(zoo.ours(model)), zoo.as_served(zoo.near(model))), zoo.prompts()
    options = {"target": family, "draft": "near", "kv_cache_dtype": "int8", "max_batch_size": 4}
    law = assemble(EngineConfig(**options, prefix_cache=False), *pair)
    want = [tokens_of(law, [prompt], "none")[0] for prompt in prompts]
    per_token = sum(layout_of_model(m).stored_as("int8").bytes_per_token for m in pair)
    # Of layers that keep states these take half of the memory.
    few = {} if family == "qwen-3.5" else {"kv_memory": (PAGES * PAGE * per_token + 1) / 2**30}
    small = {"page_size": PAGE, "max_batch_tokens": 13, "num_draft_tokens": 3}
    engine = assemble(EngineConfig(**options, **small, **few), *pair)
    lost, preempt = list[Sequence](), engine.scheduler._preempt
    monkeypatch.setattr(engine.scheduler, "_preempt", lambda s: (lost.append(s), preempt(s)))
    for proposer in PROPOSERS:  # the later ones find the prompts cached
        assert tokens_of(engine, prompts, proposer) == want, proposer
    assert lost or not few


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_embedded_pair_has_the_same_bits(dtype: str) -> None:
    """Each prompt alone and undrafted against all together: in chunks, with every kind of draft, over cached pages."""
    prompts = [text[-n:] for text, n in zip(corpus.held_out_prompts(4), (300, 20, 1, 150), strict=True)]
    asked = SamplingParams(max_tokens=16, temperature=0.7, seed=3, ignore_eos=True, logprobs=2)
    settings = {"dtype": dtype, "kv_cache_dtype": "int8", "threads": 1, "max_model_len": 512}
    alone = LLM(embedded_target(), **settings, prefix_cache=False, max_batch_size=1, proposer="none")
    want = [alone.generate(prompt, asked)[0] for prompt in prompts]
    heads = {"self_layers": 3, "eagle": str(embedded_eagle()), "medusa": str(embedded_medusa())}
    small = {"max_batch_size": 8, "max_batch_tokens": 48, "page_size": 16}
    engine = LLM(embedded_target(), embedded_draft(), **settings, **heads, **small)
    for proposer in ("none", "model", "self", "eagle", "medusa"):
        drafts = SpeculationParams(mode=SpeculationMode.FIXED, num_draft_tokens=4, proposer=proposer)
        got = engine.generate(prompts, asked, speculation=drafts)
        assert [(done.token_ids, done.logprobs) for done in got] == [(done.token_ids, done.logprobs) for done in want]
        assert proposer == "none" or sum(done.stats.accepted for done in got)


@pytest.mark.slow
def test_reproducible_holds_too() -> None:
    """With torch's products in tiles, and attention of a fixed order."""
    prompts = [text[-n:] for text, n in zip(corpus.held_out_prompts(2), (90, 20), strict=True)]
    asked = SamplingParams(max_tokens=8, temperature=0.7, seed=3, ignore_eos=True, logprobs=1)
    engine = LLM(
        embedded_target(), embedded_draft(), kv_cache_dtype="int8", reproducible=True, fuse=False, dtype="float32",
        max_model_len=256, threads=1, max_batch_size=2,
    )  # fmt: skip
    off = SpeculationParams(mode=SpeculationMode.OFF)
    alone = [engine.generate(p, asked, speculation=off, cache_salt=str(i))[0] for i, p in enumerate(prompts)]
    got = engine.generate(prompts, asked, speculation=SpeculationParams(num_draft_tokens=3, proposer="model"))
    assert [(done.token_ids, done.logprobs) for done in got] == [(done.token_ids, done.logprobs) for done in alone]


@pytest.mark.parametrize(("dtype", "head_dim"), [("bfloat16", 64), ("bfloat16", 128), ("float32", 64)])
def test_the_same_memory_has_more_pages(dtype: str, head_dim: int) -> None:
    """A vector of d numbers takes d bytes and 4 for its scale: of 128 numbers in bfloat16, 256 bytes become 132."""
    config = zoo.config_of("llama", head_dim=head_dim)
    model = zoo.ours(zoo.with_large_weights(config)).to(getattr(torch, dtype))
    few = {"kv_memory": 0.001, "max_batch_size": 64, "page_size": 4, "max_model_len": 128}
    pages = [
        assemble(EngineConfig(target="t", kv_cache_dtype=kind, **few), model).total_pages for kind in ("auto", "int8")
    ]
    ratio = head_dim * model.dtype.itemsize / (head_dim + SCALE_BYTES)
    assert ratio > 1.88
    assert pages[1] == pytest.approx(pages[0] * ratio, abs=2)


def test_it_is_refused_where_transformers_attends() -> None:
    model = zoo.ours(zoo.reference("falcon"))
    with pytest.raises(ModelError, match="one sequence at a time it could be served, but not with kv_cache_dtype"):
        assemble(EngineConfig(target="falcon", kv_cache_dtype="int8"), model)
