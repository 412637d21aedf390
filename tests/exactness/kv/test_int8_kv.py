"""Keys and values in int8: other numbers than in floats, and the same ones in any company and under any drafts."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from pilotfish.engine.config import EngineConfig
from pilotfish.engine.engine import Engine
from pilotfish.engine.errors import ModelError
from pilotfish.engine.kv.arena import SCALE_BYTES
from pilotfish.engine.model.runner import layout_of_model
from pilotfish.engine.params import SamplingParams, SpeculationMode, SpeculationParams
from pilotfish.engine.startup.build import assemble
from pilotfish.engine.types import Request, Sequence
from tests import fakes, zoo
from tests.card import here
from tests.covering import some
from tests.loops import asking, engine_of, on_the_card, request

FAMILIES = (
    "llama", "gpt2", "gemma2", "gpt-oss", "deepseek-v3", "llama-4", "gemma-3n", "qwen-3.5"
)  # fmt: skip
PROPOSERS = ("none", "ngram", "model")
NEW_TOKENS = 10
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


@pytest.mark.parametrize("family", some(("llama", "gemma2", "deepseek-v3"), ["gemma2"]))
def test_rounds_on_the_device_say_what_one_token_after_another_says(family: str) -> None:
    asked = [request(i) for i in range(6)]
    options = {"kv_cache_dtype": "int8", "prefix_cache": False}
    plain = engine_of(family, loop="plain", draft=None, proposer="none", **options)
    off = [asking(one, mode=SpeculationMode.OFF) for one in asked]
    want = {name: tokens for one in off for name, tokens in fakes.run(plain, [one]).tokens.items()}
    engine = engine_of(family, **options)
    assert engine.rounds.name == "rounds"
    assert fakes.run(engine, asked).tokens == want


def test_a_step_on_a_card_takes_as_many_launches_as_over_floats() -> None:
    """Keys and values are rounded by the kernel that writes them: it was 33 launches more for each layer."""
    launched = []
    for kind in ("auto", "int8"):
        with here() as card:
            engine = engine_of(pair=on_the_card(), device="cuda", attention="auto", loop="plain", kv_cache_dtype=kind)
            card.launched.clear()
            fakes.run(engine, [request(1, max_tokens=6)])
        launched.append(Counter(card.launched))
    assert launched[0]["rotate_and_write"] >= 6
    assert launched[0] == launched[1]


@pytest.mark.parametrize(("dtype", "head_dim"), [("bfloat16", 64), ("bfloat16", 128), ("float32", 64)])
def test_the_same_memory_has_more_pages(dtype: str, head_dim: int) -> None:
    """A vector of d numbers takes d bytes and 4 for its scale: of 128 numbers in bfloat16, 256 bytes become 132."""
    config = zoo.config_of("llama", head_dim=head_dim)
    model = zoo.ours(zoo.with_large_weights(config), getattr(torch, dtype))
    few = {"kv_memory": 0.001, "max_batch_size": 64, "page_size": 4, "max_model_len": 128}
    pages = [
        assemble(EngineConfig(target="t", kv_cache_dtype=kind, **few), model).facts.total_pages
        for kind in ("auto", "int8")
    ]
    ratio = head_dim * model.dtype.itemsize / (head_dim + SCALE_BYTES)
    assert ratio > 1.88
    assert pages[1] == pytest.approx(pages[0] * ratio, abs=2)


def test_it_is_refused_where_transformers_attends() -> None:
    model = zoo.ours(zoo.reference("falcon"))
    with pytest.raises(ModelError, match="kv_cache_dtype is not supported for 'falcon'"):
        assemble(EngineConfig(target="falcon", kv_cache_dtype="int8"), model)
