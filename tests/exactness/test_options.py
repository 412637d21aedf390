"""Every option, alone and in random company of others: speculation changes nothing that a caller can see.

What plain decoding gives is the law: tokens, text, finish reason, stop position, usage, seed and logprobs must be
the same with any proposer, any K, batch mates, preemption, and with the prefix cache warm, cold or off.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import fields, replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.control.controller import FixedK, within
from engine.engine import Engine
from engine.llm import LLM, CompletionOutput
from engine.params import Guided, SamplingParams, SpeculationMode
from engine.types import Request, Sequence
from tests.sameness import (
    PROMPTS,
    PROPOSERS,
    Pair,
    asking,
    assert_same,
    assert_speculation_changes_nothing,
    codec,
    embedded_pair,
    random_pair,
)

MAX_TOKENS = 16
SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 4}, "on": {"type": "boolean"}},
        "required": ["name", "on"],
        "additionalProperties": False,
    }
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
    "json_schema": SamplingParams(guided=Guided(json_schema=SCHEMA), temperature=1.0, seed=8),
    "regex": SamplingParams(guided=Guided(regex="(ab|cd)+ [0-9]{3}"), temperature=1.0, seed=9),
    "grammar": SamplingParams(guided=Guided(grammar='start: "(" start ")" | /[xyz]+/'), temperature=1.0, seed=10),
    "choice": SamplingParams(guided=Guided(choice=("yes", "yesterday", "no", "not at all"))),
}


@pytest.mark.feature
@pytest.mark.parametrize("proposer", PROPOSERS)
@pytest.mark.parametrize("option", ALONE)
def test_each_option_alone(option: str, proposer: str) -> None:
    sampling = ALONE[option]
    sampling = replace(sampling, max_tokens=sampling.max_tokens or MAX_TOKENS, seed=sampling.seed or 9)
    # By turns: each option meets both ways, with one proposer or another, and each proposer too.
    starved = (list(ALONE).index(option) + PROPOSERS.index(proposer)) % 2 == 0
    engine = llm(proposer, plenty=not starved, prefix_cache=not starved)
    assert_speculation_changes_nothing(random_pair(), engine, sampling, proposer, 4 if starved else 8)


def llm(proposer: str, *, plenty: bool, prefix_cache: bool, pair: Callable[[], Pair] = random_pair) -> LLM:
    """Without `plenty` there are few small pages, so that batch mates get preempted."""
    few = {} if plenty else {"pages": 30, "max_batch_tokens": 24}
    return pair().llm(proposer, prefix_cache=prefix_cache, **few)


CONDITIONS = {
    "alone": {"prefix_cache": False},
    "among 31 others": {"prefix_cache": False, "max_batch_size": 32},
    "chunked prefill": {"prefix_cache": False, "max_batch_tokens": 5, "max_batch_size": 4},
    "preemption": {"prefix_cache": False, "pages": 30},
    "prefix cache": {"prefix_cache": True},
    "prefix cache and preemption": {"prefix_cache": True, "pages": 30},
    "one page per sequence": {"prefix_cache": False, "page_size": 128},
    "as many drafts as pay": {"prefix_cache": True, "pages": 60},
}


@pytest.mark.feature
@pytest.mark.parametrize("proposer", PROPOSERS)
@pytest.mark.parametrize("condition", CONDITIONS)
def test_each_condition(condition: str, proposer: str) -> None:
    """The same four requests, greedy and sampled, with penalties and logprobs, wherever they find themselves."""
    engine, asked = random_pair().llm(proposer, **CONDITIONS[condition]), asking(proposer, 4)
    if condition == "as many drafts as pay":
        asked = replace(asked, mode=SpeculationMode.AUTO, num_draft_tokens=8)
    others = [(PROMPTS[i % 4], replace(REQUESTS[i % 3][1], seed=100 + i)) for i in range(28)]
    crowd = REQUESTS + (others if condition == "among 31 others" else [])
    for _ in range(1 + engine.engine.config.prefix_cache):  # the second time, it is warm
        if condition == "alone":
            got = [done for prompt, params in REQUESTS for done in engine.generate(prompt, params, speculation=asked)]
        else:
            got = engine.generate([p for p, _ in crowd], [params for _, params in crowd], speculation=asked)
        for ours, (prompt, params) in zip(got, REQUESTS, strict=False):
            assert_same(ours, random_pair().plain(prompt, params)[0])
    engine.engine.check_invariants()


class AnyK(FixedK):
    """Any number of drafts in any step, and often none."""

    def __init__(self) -> None:
        super().__init__()
        self._random = random.Random(0)

    def choose(self, sequences: Seq[Sequence], limits: Seq[int], budget: int, prompt_rows: int) -> list[int]:
        return within([self._random.choice([0, self._random.randint(0, limit)]) for limit in limits], budget)


@pytest.mark.parametrize("proposer", PROPOSERS)
def test_any_number_of_drafts_in_any_step(proposer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What control could ever choose, and more: drafts that fall behind, catch up, and are not asked for long."""
    engine = llm(proposer, plenty=False, prefix_cache=True)
    monkeypatch.setattr(engine.engine._scheduler, "control", AnyK())
    for _ in range(3):
        got = engine.generate(
            [p for p, _ in REQUESTS], [params for _, params in REQUESTS], speculation=asking(proposer, 8)
        )
        for ours, (prompt, params) in zip(got, REQUESTS, strict=True):
            assert_same(ours, random_pair().plain(prompt, params)[0])
    engine.engine.check_invariants()


REQUESTS = [
    (PROMPTS[0], SamplingParams(max_tokens=30, logprobs=1, seed=0)),
    (PROMPTS[1], SamplingParams(max_tokens=30, temperature=1.0, top_p=0.9, seed=1)),
    (PROMPTS[3], SamplingParams(max_tokens=30, temperature=0.8, frequency_penalty=0.7, seed=2)),
    (PROMPTS[0] * 2, SamplingParams(max_tokens=20, temperature=1.2, top_k=20, seed=3)),
]


@pytest.mark.parametrize("option", sorted(ALONE.keys() - {"greedy"}))
def test_each_option_bites(option: str) -> None:
    """A test of an option that changes nothing would pass for an option that does nothing."""
    sampling = replace(ALONE[option], max_tokens=ALONE[option].max_tokens or MAX_TOKENS)
    default = {"max_tokens": MAX_TOKENS, "seed": 1}
    field = option if hasattr(sampling, option) else "guided"
    without = replace(sampling, **{field: default.get(field, getattr(SamplingParams(), field))})
    seen = [[_visible(done) for done in random_pair().plain(prompt, sampling)] for prompt in PROMPTS]
    assert seen != [[_visible(done) for done in random_pair().plain(prompt, without)] for prompt in PROMPTS]


def _visible(done: CompletionOutput) -> tuple[object, ...]:
    return done.token_ids, done.text, done.finish_reason, done.logprobs, done.prompt_logprobs


def test_every_field_of_sampling_params_is_tried() -> None:
    assert {field.name for field in fields(SamplingParams)} - {"guided"} <= ALONE.keys()
    assert {field.name for field in fields(Guided)} <= ALONE.keys()


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
    guided=st.sampled_from([None] * 8 + [ALONE[kind].guided for kind in ("json_schema", "regex", "grammar", "choice")]),
).flatmap(lambda params: st.integers(0, params.max_tokens).map(lambda least: completed(params, least)))


def completed(params: SamplingParams, least: int) -> SamplingParams:
    """Structured output and `ignore_eos` exclude each other."""
    return replace(params, min_tokens=least, ignore_eos=params.ignore_eos and params.guided is None)


BOLD = settings(
    derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
SITUATIONS = {
    "sampling": COMBINATIONS,
    "proposer": st.sampled_from(PROPOSERS),
    "num_draft": st.integers(0, 8),
    "plenty": st.booleans(),
    "prefix_cache": st.booleans(),
    "prompts": st.lists(st.sampled_from(PROMPTS), min_size=1, max_size=5),
}


@settings(BOLD, max_examples=200)
@given(**SITUATIONS)
def test_random_combinations(
    sampling: SamplingParams, proposer: str, num_draft: int, plenty: bool, prefix_cache: bool, prompts: list[str]
) -> None:
    engine = llm(proposer, plenty=plenty, prefix_cache=prefix_cache)
    assert_speculation_changes_nothing(random_pair(), engine, sampling, proposer, num_draft, prompts)


@settings(BOLD, max_examples=40)
@given(**SITUATIONS)
def test_random_combinations_with_trained_drafters(
    sampling: SamplingParams, proposer: str, num_draft: int, plenty: bool, prefix_cache: bool, prompts: list[str]
) -> None:
    """Whose drafts are kept as often as not, where those of random heads are mostly wrong."""
    engine = llm(proposer, plenty=plenty, prefix_cache=prefix_cache, pair=embedded_pair)
    assert_speculation_changes_nothing(embedded_pair(), engine, sampling, proposer, num_draft, prompts)


@pytest.mark.parametrize("proposer", sorted(set(PROPOSERS) - {"none", "wrong"}))
def test_drafts_are_kept(proposer: str) -> None:
    """What the test above rests on."""
    sampling = SamplingParams(max_tokens=60, seed=0)
    engine = llm(proposer, plenty=True, prefix_cache=True, pair=embedded_pair)
    done = assert_speculation_changes_nothing(embedded_pair(), engine, sampling, proposer, 4)
    assert sum(completion.stats.accepted for completion in done) > 0


def test_the_starved_engine_preempts_and_the_cache_is_hit() -> None:
    """What the tests above rest on: without preemption and without hits they would show less."""
    starved = llm("model", plenty=False, prefix_cache=False).engine
    warm = llm("model", plenty=True, prefix_cache=True)
    assert _count(starved, "preempted") > 0
    warm.generate(PROMPTS[0])
    [again] = warm.generate(PROMPTS[0])
    assert again.cached_prompt_tokens > 0


def _count(engine: Engine, name: str) -> int:
    for i in range(8):
        prompt = codec().encode(PROMPTS[i % 4])
        engine.add(Request(request_id=str(i), token_ids=prompt, sampling=SamplingParams(max_tokens=30)))
    total = 0
    while engine.has_work:
        total += getattr(engine.step().stats, name)
    return total
