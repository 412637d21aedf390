"""In int8 equality is bitwise, without being asked for: every row of logits is the same bits in any company."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import lru_cache

import pytest
import torch

from engine import LLM, SamplingParams
from engine.attention import choose
from engine.kv.arena import KVArena
from engine.kv.batch import Feed
from engine.machine.threads import exactly
from engine.model.fusion.fuse import fuse
from engine.model.quantize import quantise
from engine.model.runner import ModelRunner, kv_layout
from engine.params import SpeculationMode, SpeculationParams
from models import corpus, embedded_draft, embedded_eagle, embedded_medusa, embedded_target
from tests import zoo
from tests.covering import covering


@pytest.mark.parametrize(
    ("family", "dtype"), covering(sorted(zoo.families()), [torch.float32, torch.bfloat16], every=8)
)
def test_logits_are_bitwise_the_same_in_any_batch(family: str, dtype: torch.dtype) -> None:
    threads = 1 + (family in ("llama", "gpt2", "gemma2"))
    model = zoo.ours(zoo.reference(family)).to(dtype)
    quantise(model)
    fuse(model)
    runner = ModelRunner(
        model, KVArena(kv_layout(model.config, dtype), 8, 64, torch.device("cpu")), choose("rows", model.device)
    )
    draw = random.Random(family)
    texts = [[draw.randrange(3, zoo.VOCAB) for _ in range(draw.randrange(2, 60))] for _ in range(5)]
    with exactly(threads):
        alone = [torch.cat([runner.forward([Feed([token], i, [0])]) for i, token in enumerate(text)]) for text in texts]
        together = runner.forward([Feed(text, 0, [i], len(text)) for i, text in enumerate(texts)])
        runner.forward([Feed(text[:-1], 0, [i], 0) for i, text in enumerate(texts)])
        last = runner.forward([Feed(text[-1:], len(text) - 1, [i]) for i, text in enumerate(texts)])
    assert torch.equal(together, torch.cat(alone))
    assert torch.equal(last, torch.stack([rows[-1] for rows in alone]))


def llm(**config: object) -> LLM:
    """Each is kept for a while: to round the pair takes longer than what is asked of it."""
    return _made(tuple(config.items()))


@lru_cache(maxsize=4)
def _made(config: tuple[tuple[str, object], ...]) -> LLM:
    settings = {"weights": "int8", "threads": 1, "max_model_len": 512, "max_batch_size": 16, "self_layers": 3}
    heads = {"medusa": str(embedded_medusa()), "eagle": str(embedded_eagle())}
    return LLM(embedded_target(), embedded_draft(), **settings | heads | dict(config))


@lru_cache
def plain(temperature: float, dtype: str) -> list[tuple[int, ...]]:
    """Each prompt alone, one token at a time, no cache."""
    engine = llm(prefix_cache=False, max_batch_size=1, dtype=dtype)
    off = SpeculationParams(mode=SpeculationMode.OFF)
    return [engine.generate(prompt, params(temperature), speculation=off)[0].token_ids for prompt in prompts()]


@lru_cache
def prompts() -> list[str]:
    """Of unequal lengths, some long enough to be cut into chunks."""
    return [text[-n:] for text, n in zip(corpus.held_out_prompts(8), (700, 20, 300, 1, 77, 200, 40, 150), strict=True)]


def params(temperature: float) -> SamplingParams:
    return SamplingParams(max_tokens=32, temperature=temperature, seed=5, ignore_eos=True)


@pytest.mark.parametrize(
    ("proposer", "temperature"),
    covering(["model", "ngram", "suffix", "self", "medusa", "eagle", "auto", "none"], [0.0, 0.8], every=8),
)
def test_speculation_changes_no_token(proposer: str, temperature: float) -> None:
    for num_draft, config in ((4, {"max_batch_tokens": 48}), (7, {"page_size": 8}))[: 1 if temperature else 2]:
        speculation = SpeculationParams(mode=SpeculationMode.FIXED, num_draft_tokens=num_draft, proposer=proposer)
        done = llm(**config).generate(prompts(), params(temperature), speculation=speculation, cache_salt=proposer)
        assert [c.token_ids for c in done] == plain(temperature, "float32"), (num_draft, config)
        if proposer in ("model", "auto"):
            assert sum(c.stats.accepted for c in done) > 50


@pytest.mark.slow
@pytest.mark.parametrize(
    "config", [{"dtype": "bfloat16"}, {"dtype": "bfloat16", "draft_weights": "native"}, {"fuse": False}]
)
def test_in_other_settings(config: dict[str, object]) -> None:
    engine, fixed = llm(**config), SpeculationParams(mode=SpeculationMode.FIXED, num_draft_tokens=4, proposer="model")
    off = SpeculationParams(mode=SpeculationMode.OFF)
    want = [engine.generate(prompt, params(0), speculation=off)[0].token_ids for prompt in prompts()]
    assert [c.token_ids for c in engine.generate(prompts(), params(0), speculation=fixed)] == want


@pytest.mark.slow
@pytest.mark.parametrize("reproducible", [False, True])
@pytest.mark.parametrize("attention", ["auto", "rows"])
def test_log_probabilities_are_the_same_bits(attention: str, reproducible: bool) -> None:
    """With drafts and company, chunked and over cached pages, as alone: integers need no option for it."""
    engine = llm(attention=attention, reproducible=reproducible, max_batch_tokens=48, page_size=8)
    wanted = replace(params(0.8), logprobs=4, prompt_logprobs=1)
    off, fixed = SpeculationParams(mode=SpeculationMode.OFF), SpeculationParams(num_draft_tokens=5, proposer="model")
    alone = [
        engine.generate(prompt, wanted, speculation=off, cache_salt=str(i))[0] for i, prompt in enumerate(prompts())
    ]
    for _ in range(2):
        for got, want in zip(engine.generate(prompts(), wanted, speculation=fixed), alone, strict=True):
            assert (got.token_ids, got.logprobs, got.prompt_logprobs) == (
                want.token_ids,
                want.logprobs,
                want.prompt_logprobs,
            )
