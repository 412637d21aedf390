"""Greedy output equals transformers' own `generate`, whatever drafts, K, chunks or batch mates there are."""

from __future__ import annotations

import itertools
from functools import lru_cache

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from engine.config import EngineConfig
from engine.engine import Engine
from engine.model.runner import kv_layout
from engine.params import SamplingParams, SpeculationParams
from engine.proposers.scripted import ScriptedProposer
from engine.startup.build import assemble, build_engine
from engine.types import Request, Sequence
from models import corpus, embedded_draft, embedded_target
from tests import fakes, zoo
from tests.covering import covering, some

NEW_TOKENS = 24
PROPOSERS = ("none", "ngram", "model")


@lru_cache
def expected(family: str) -> list[list[int]]:
    model = zoo.reference(family)
    return [_generate(model, prompt, NEW_TOKENS) for prompt in zoo.prompts()]


def _generate(model: torch.nn.Module, prompt: list[int], new_tokens: int) -> list[int]:
    ids = torch.tensor([prompt])
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=new_tokens, pad_token_id=0
    )
    return out[0, len(prompt) :].tolist()


@lru_cache
def pair(family: str) -> tuple[torch.nn.Module, torch.nn.Module]:
    model = zoo.reference(family)
    return zoo.ours(model), zoo.near(model)


def engine_of(family: str, **config: object) -> Engine:
    target, draft = pair(family)
    return assemble(EngineConfig(target=family, draft="near", max_batch_size=8, **config), target, draft)


def greedy(engine: Engine, prompts: list[list[int]], new_tokens: int, **speculation: object) -> fakes.Outputs:
    both = {"sampling": SamplingParams(max_tokens=new_tokens), "speculation": SpeculationParams(**speculation)}
    return fakes.run(engine, [Request(request_id=str(i), token_ids=tuple(p), **both) for i, p in enumerate(prompts)])


@pytest.mark.parametrize(("family", "proposer"), covering(zoo.configs(), PROPOSERS, every=8))
def test_equals_generate(family: str, proposer: str) -> None:
    """Prompts whole, then in chunks."""
    for num_draft, max_batch_tokens in itertools.product((0, 1, 2, 4, 8), (512, 13)):
        options = {"max_batch_tokens": max_batch_tokens, "num_draft_tokens": 8, "prefix_cache": False}
        engine = engine_of(family, proposer=proposer, **options)
        outputs = greedy(engine, zoo.prompts(), NEW_TOKENS, num_draft_tokens=num_draft)
        assert [outputs.tokens[str(i)] for i in range(4)] == expected(family), f"K={num_draft}"


@pytest.mark.slow
@pytest.mark.parametrize("family", zoo.configs())
def test_equals_generate_in_small_pages(family: str) -> None:
    """Pages of 8 tokens go through the reference attention; the longest request alone takes most of them."""
    layout = kv_layout(zoo.configs()[family], torch.float32)
    engine = engine_of(
        family, page_size=8, attention="reference", kv_memory=14 * 8 * 2 * layout.bytes_per_token / 2**30
    )
    assert engine.total_pages == 14
    outputs = greedy(engine, zoo.prompts(8), NEW_TOKENS)
    model = zoo.reference(family)
    assert [outputs.tokens[str(i)] for i in range(8)] == [_generate(model, p, NEW_TOKENS) for p in zoo.prompts(8)]


def test_the_draft_model_is_of_use() -> None:
    """The grid above would also pass if no draft were ever accepted."""
    outputs = greedy(engine_of("llama", proposer="model"), zoo.prompts(), NEW_TOKENS)
    assert sum(f.stats.accepted for f in outputs.finished.values()) > NEW_TOKENS


@lru_cache
def embedded_expected() -> tuple[list[list[int]], list[list[int]]]:
    tokenizer = AutoTokenizer.from_pretrained(embedded_target())
    model = AutoModelForCausalLM.from_pretrained(embedded_target(), dtype=torch.float32).eval()
    prompts = [tokenizer.encode(text)[-n:] for text, n in zip(corpus.held_out_prompts(4), (400, 7, 60, 1), strict=True)]
    return prompts, [_generate(model, prompt, 40) for prompt in prompts]


@pytest.mark.parametrize(("proposer", "max_batch_tokens"), covering(PROPOSERS, [512, 64], every=6, first=5))
def test_embedded_pair_equals_generate(proposer: str, max_batch_tokens: int) -> None:
    prompts, want = embedded_expected()
    config = EngineConfig(
        target=str(embedded_target()),
        draft=str(embedded_draft()),
        proposer=proposer,
        num_draft_tokens=8,
        max_batch_size=8,
        max_batch_tokens=max_batch_tokens,
        prefix_cache=False,  # it would know the prompts from the second K on
        dtype="float32",  # as transformers' model is
        threads=1,
    )
    engine = build_engine(config)
    for num_draft in range(9):
        outputs = greedy(engine, prompts, 40, num_draft_tokens=num_draft)
        assert [outputs.tokens[str(i)] for i in range(4)] == want, f"K={num_draft}"


@pytest.mark.parametrize("right", some([True, False], [True]))
@pytest.mark.parametrize("family", some(["llama", "gpt2"], ["llama"]))
def test_scripted_drafts_change_nothing(family: str, right: bool) -> None:
    table = {tuple(p): p + e for p, e in zip(zoo.prompts(), expected(family), strict=True)}

    def script(sequence: Sequence, k: int) -> list[int]:
        whole, at = table[sequence.request.token_ids], len(sequence.tokens)
        return [token if right else (token + 1) % zoo.VOCAB for token in whole[at : at + k]]

    config = EngineConfig(target=family, proposer="scripted", num_draft_tokens=8, max_batch_size=8)
    engine = assemble(config, pair(family)[0], extra_proposers={"scripted": ScriptedProposer(script)})
    for num_draft in range(9):
        outputs = greedy(engine, zoo.prompts(), NEW_TOKENS, num_draft_tokens=num_draft)
        assert [outputs.tokens[str(i)] for i in range(4)] == expected(family)
        rates = {f.stats.acceptance_rate for f in outputs.finished.values() if f.stats.drafted}
        assert rates == (set() if num_draft == 0 else {1.0} if right else {0.0})
