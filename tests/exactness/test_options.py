"""Every option, alone and in random company of others: speculation changes nothing that a caller can see.

What plain decoding gives is the law: tokens, text, finish reason, stop position, usage, seed and logprobs must be
the same with any proposer, any K, batch mates, preemption, and with the prefix cache warm, cold or off.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from dataclasses import fields, replace
from functools import cache

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

from engine.build import assemble
from engine.config import EngineConfig
from engine.engine import Engine
from engine.llm import LLM, Completion
from engine.proposers.scripted import ScriptedProposer
from engine.text import Codec
from engine.types import (
    SamplingParams,
    Sequence,
    SpeculationMode,
    SpeculationParams,
    TokenLogprob,
)
from models import embedded_target
from tests import zoo

MAX_TOKENS = 16
PROMPTS = (
    "def add(a, b):\n    return a + b\n\ndef add(a",
    "import os\nimport sys\n",
    "x",
    "for i in range(10):\n    print(i)\nfor i in range(10):\n    print(",
)
# Options alone. Values are chosen to bite: each changes what this model says, or cuts it.
ALONE = {
    "greedy": SamplingParams(),
    "temperature": SamplingParams(temperature=1.1, seed=1),
    "top_p": SamplingParams(temperature=1.0, top_p=0.7, seed=2),
    "top_k": SamplingParams(temperature=1.0, top_k=5, seed=3),
    "min_p": SamplingParams(temperature=1.0, min_p=0.1, seed=4),
    "seed": SamplingParams(temperature=1.0, seed=2**64 - 1),
    "repetition_penalty": SamplingParams(repetition_penalty=1.8),
    "presence_penalty": SamplingParams(presence_penalty=1.5),
    "frequency_penalty": SamplingParams(frequency_penalty=1.2, logit_bias={7: 6.0, 9: 5.0}),
    "logit_bias": SamplingParams(logit_bias={7: 4.0, 11: 3.5, 300: -100.0}),
    "allowed_token_ids": SamplingParams(allowed_token_ids=tuple(range(5, 400, 7))),
    "banned_token_ids": SamplingParams(banned_token_ids=tuple(range(0, 2048, 2))),
    "min_tokens": SamplingParams(min_tokens=9, stop_token_ids=tuple(range(100, 112)), logit_bias={105: 30.0}),
    "max_tokens": SamplingParams(max_tokens=5),
    "stop": SamplingParams(stop=("e", "zz")),
    "stop_token_ids": SamplingParams(temperature=1.0, seed=6, stop_token_ids=(5, 6, 7), logit_bias={6: 6.0}),
    "ignore_eos": SamplingParams(ignore_eos=True, logit_bias={0: 5.0}),
    "logprobs": SamplingParams(logprobs=3),
    "prompt_logprobs": SamplingParams(prompt_logprobs=2),
    "n": SamplingParams(n=3, temperature=1.0, seed=7),
}


@cache
def codec() -> Codec:
    return Codec.load(embedded_target())


@cache
def models() -> tuple[torch.nn.Module, torch.nn.Module]:
    """A small random target that speaks the embedded tokenizer's tokens, and a draft that is often right."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=2048,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        bos_token_id=1,
        eos_token_id=0,
    )
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.copy_(torch.randn_like(parameter) * 0.25)
    return zoo.ours(model), zoo.near(model, 0.01)


@cache
def llm(*, plenty: bool, prefix_cache: bool) -> LLM:
    """Every proposer in one engine; without `plenty`, few small pages, so that batch mates get preempted."""
    few = {} if plenty else {"kv_memory": _gib_of_pages(30), "max_batch_tokens": 24}
    config = _config(prefix_cache=prefix_cache, **few)
    return LLM.of(assemble(config, *models(), extra_proposers=_scripted()), codec())


def _config(**options: object) -> EngineConfig:
    usual = {"num_draft_tokens": 8, "page_size": 4, "max_batch_size": 16, "max_batch_tokens": 64}
    return EngineConfig(**{"target": "llama", "draft": "near", **usual, **options})


def _scripted() -> dict[str, ScriptedProposer]:
    return {
        "right": ScriptedProposer(lambda s, k: _future(s)[:k]),
        "wrong": ScriptedProposer(lambda s, k: [(t + 1) % 2048 for t in _future(s)[:k]]),
    }


def _gib_of_pages(pages: int) -> float:
    bytes_per_token = 2 * 2 * 2 * 2 * 8 * 4  # models, layers, K and V, heads, head size, float32
    return (pages * 4 * bytes_per_token + 1) / 2**30


PROPOSERS = ("none", "ngram", "model", "right", "wrong")
_futures: dict[tuple[tuple[int, ...], int, str], list[int]] = {}


def _future(sequence: Sequence) -> list[int]:
    """What plain decoding said that this output will say."""
    return _futures.get(_key(sequence.request.token_ids, sequence.seed, sequence.request.sampling), [])[
        sequence.num_generated :
    ]


def _key(prompt: Seq[int], seed: int, sampling: SamplingParams) -> tuple[tuple[int, ...], int, str]:
    return tuple(prompt), seed, repr(sampling)


@cache
def _plain_llm() -> LLM:
    config = EngineConfig(target="llama", proposer="none", prefix_cache=False)
    return LLM.of(assemble(config, models()[0]), codec())


_plain_results: dict[tuple[str, str], list[Completion]] = {}


def plain(prompt: str, sampling: SamplingParams) -> list[Completion]:
    """One prompt alone, no drafts, no cache, pages to spare."""
    known = _plain_results.get((prompt, repr(sampling)))
    if known is None:
        known = _plain_results[prompt, repr(sampling)] = _plain_llm().generate(prompt, sampling)
        for done in known:
            _futures[_key(codec().encode(prompt), done.seed, sampling)] = list(done.token_ids)
    return known


def assert_same(got: Completion, want: Completion) -> None:
    for name in ("index", "token_ids", "text", "finish_reason", "matched_stop", "prompt_tokens", "seed", "error"):
        assert getattr(got, name) == getattr(want, name), name
    assert_close(got.logprobs, want.logprobs, len(want.token_ids))
    assert_close(got.prompt_logprobs, want.prompt_logprobs, want.prompt_tokens)


def assert_close(got: Seq[TokenLogprob | None] | None, want: Seq[TokenLogprob | None] | None, length: int) -> None:
    assert (got is None) == (want is None)
    if got is None or want is None:
        return
    assert len(got) == len(want) == length
    for ours, theirs in zip(got, want, strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None and theirs is not None:
            numbers = [ours.logprob, *(c.logprob for c in ours.top)]
            assert numbers == pytest.approx([theirs.logprob, *(c.logprob for c in theirs.top)], abs=1e-4)


def assert_speculation_changes_nothing(
    engine: LLM, sampling: SamplingParams, proposer: str, num_draft: int, prompts: Seq[str] = PROMPTS
) -> None:
    want = [done for prompt in prompts for done in plain(prompt, sampling)]
    asked = SpeculationParams(mode=SpeculationMode.FIXED, num_draft_tokens=num_draft, proposer=proposer)
    got = engine.generate(list(prompts), sampling, speculation=asked)
    for ours, theirs in zip(got, want, strict=True):
        assert_same(ours, theirs)
    engine.engine.check_invariants()


@pytest.mark.feature
@pytest.mark.parametrize("proposer", PROPOSERS)
@pytest.mark.parametrize("option", ALONE)
def test_each_option_alone(option: str, proposer: str) -> None:
    sampling = ALONE[option]
    sampling = replace(sampling, max_tokens=sampling.max_tokens or MAX_TOKENS, seed=sampling.seed or 9)
    for num_draft, prefix_cache in ((1, True), (4, False), (8, True)):
        engine = llm(plenty=num_draft != 4, prefix_cache=prefix_cache)
        assert_speculation_changes_nothing(engine, sampling, proposer, num_draft)


CONDITIONS = {
    "alone": {"prefix_cache": False},
    "among 31 others": {"prefix_cache": False, "max_batch_size": 32},
    "chunked prefill": {"prefix_cache": False, "max_batch_tokens": 5, "max_batch_size": 4},
    "preemption": {"prefix_cache": False, "kv_memory": _gib_of_pages(30)},
    "prefix cache": {"prefix_cache": True},
    "prefix cache and preemption": {"prefix_cache": True, "kv_memory": _gib_of_pages(30)},
    "one page per sequence": {"prefix_cache": False, "page_size": 128},
}


@pytest.mark.feature
@pytest.mark.parametrize("proposer", PROPOSERS)
@pytest.mark.parametrize("condition", CONDITIONS)
def test_each_condition(condition: str, proposer: str) -> None:
    """The same four requests, greedy and sampled, with penalties and logprobs, wherever they find themselves."""
    engine = engine_under(condition)
    asked = SpeculationParams(mode=SpeculationMode.FIXED, num_draft_tokens=4, proposer=proposer)
    others = [(PROMPTS[i % 4], replace(REQUESTS[i % 3][1], seed=100 + i)) for i in range(28)]
    crowd = REQUESTS + (others if condition == "among 31 others" else [])
    for _ in range(2):  # the second time, a prefix cache is warm
        if condition == "alone":
            got = [done for prompt, params in REQUESTS for done in engine.generate(prompt, params, speculation=asked)]
        else:
            got = engine.generate([p for p, _ in crowd], [params for _, params in crowd], speculation=asked)
        for ours, (prompt, params) in zip(got, REQUESTS, strict=False):
            assert_same(ours, plain(prompt, params)[0])
    engine.engine.check_invariants()


REQUESTS = [
    (PROMPTS[0], SamplingParams(max_tokens=30, logprobs=1, seed=0)),
    (PROMPTS[1], SamplingParams(max_tokens=30, temperature=1.0, top_p=0.9, seed=1)),
    (PROMPTS[3], SamplingParams(max_tokens=30, temperature=0.8, frequency_penalty=0.7, seed=2)),
    (PROMPTS[0] * 2, SamplingParams(max_tokens=20, temperature=1.2, top_k=20, seed=3)),
]


@cache
def engine_under(condition: str) -> LLM:
    return LLM.of(assemble(_config(**CONDITIONS[condition]), *models(), extra_proposers=_scripted()), codec())


@pytest.mark.parametrize("option", sorted(ALONE.keys() - {"greedy"}))
def test_each_option_bites(option: str) -> None:
    """A test of an option that changes nothing would pass for an option that does nothing."""
    sampling = replace(ALONE[option], max_tokens=ALONE[option].max_tokens or MAX_TOKENS)
    default = {"max_tokens": MAX_TOKENS, "seed": 1}.get(option, getattr(SamplingParams(), option))
    without = replace(sampling, **{option: default})
    seen = [[_visible(done) for done in plain(prompt, sampling)] for prompt in PROMPTS]
    assert seen != [[_visible(done) for done in plain(prompt, without)] for prompt in PROMPTS]


def _visible(done: Completion) -> tuple[object, ...]:
    return done.token_ids, done.text, done.finish_reason, done.logprobs, done.prompt_logprobs


def test_every_field_of_sampling_params_is_tried() -> None:
    assert {field.name for field in fields(SamplingParams)} - {"guided"} <= ALONE.keys()


TOKENS = st.integers(0, 2047)
COMBINATIONS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.0, 0.7, 1.0, 1.4]),
    top_p=st.sampled_from([1.0, 1.0, 0.9, 0.5]),
    top_k=st.sampled_from([0, 0, 1, 7, 50]),
    min_p=st.sampled_from([0.0, 0.0, 0.05, 0.3]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 0.8, 1.3]),
    presence_penalty=st.sampled_from([0.0, 0.0, -1.0, 0.9]),
    frequency_penalty=st.sampled_from([0.0, 0.0, -0.5, 0.6]),
    logit_bias=st.one_of(st.just({}), st.dictionaries(TOKENS, st.floats(-4, 4, width=16), max_size=5)),
    allowed_token_ids=st.one_of(st.none(), st.just(tuple(range(3, 2048, 3)))),
    banned_token_ids=st.lists(TOKENS, max_size=5).map(tuple),
    seed=st.integers(0, 2**64 - 1),
    n=st.sampled_from([1, 1, 1, 2]),
    max_tokens=st.integers(1, 14),
    stop=st.lists(st.sampled_from(["e", "  ", "\n", "self", "th"]), max_size=2).map(tuple),
    stop_token_ids=st.lists(TOKENS, max_size=16).map(tuple),
    ignore_eos=st.booleans(),
    logprobs=st.sampled_from([None, None, 0, 2]),
    prompt_logprobs=st.sampled_from([None, None, 0, 1]),
).flatmap(lambda params: st.integers(0, params.max_tokens).map(lambda least: replace(params, min_tokens=least)))


@settings(
    max_examples=200,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(
    sampling=COMBINATIONS,
    proposer=st.sampled_from(PROPOSERS),
    num_draft=st.integers(0, 8),
    plenty=st.booleans(),
    prefix_cache=st.booleans(),
    prompts=st.lists(st.sampled_from(PROMPTS), min_size=1, max_size=5),
)
def test_random_combinations(
    sampling: SamplingParams, proposer: str, num_draft: int, plenty: bool, prefix_cache: bool, prompts: list[str]
) -> None:
    engine = llm(plenty=plenty, prefix_cache=prefix_cache)
    assert_speculation_changes_nothing(engine, sampling, proposer, num_draft, prompts)


def test_the_starved_engine_preempts_and_the_cache_is_hit() -> None:
    """What the tests above rest on: without preemption and without hits they would show less."""
    starved, warm = llm(plenty=False, prefix_cache=False).engine, llm(plenty=True, prefix_cache=True)
    assert _count(starved, "preempted") > 0
    warm.generate(PROMPTS[0])
    [again] = warm.generate(PROMPTS[0])
    assert again.cached_prompt_tokens > 0
    assert math.isfinite(again.stats.rounds)


def _count(engine: Engine, name: str) -> int:
    from engine.types import Request

    for i in range(8):
        prompt = codec().encode(PROMPTS[i % 4])
        engine.add(Request(request_id=str(i), token_ids=prompt, sampling=SamplingParams(max_tokens=30)))
    total = 0
    while engine.has_work:
        total += getattr(engine.step().stats, name)
    return total
