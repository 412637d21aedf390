"""Rounds on the device through `LLM`: every option, all of them in one batch, says what plain decoding says."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given, settings

from pilotfish.engine.llm import LLM
from pilotfish.engine.params import SpeculationMode
from tests.exactness.test_options import ALONE, BOLD, MAX_TOKENS, SITUATIONS, AnyK
from tests.loops import gib
from tests.sameness import (
    PROMPTS,
    Pair,
    asking,
    assert_same,
    assert_speculation_changes_nothing,
    random_of,
    random_pair,
)

torch_pair = partial(random_pair, as_served=False)

CONDITIONS = {
    "plenty": {},
    "preemption": {"pages": 40, "max_batch_tokens": 24},
    "no prefix cache": {"prefix_cache": False, "page_size": 16},
}


def llm(pair: Pair, proposer: str, **options) -> LLM:
    """The same engine as in other tests of exactness, in rounds on the device."""
    return pair.llm(proposer, loop="rounds", **options)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("condition", "mode"),
    [
        ("plenty", SpeculationMode.FIXED),
        ("preemption", SpeculationMode.AUTO),
        ("no prefix cache", SpeculationMode.FIXED),
    ],
)
def test_every_option_in_one_batch(condition: str, mode: SpeculationMode) -> None:
    """Most of these ride; penalties, bias, bans, structures and logprobs decode in plain steps beside them."""
    engine = llm(torch_pair(), "model", **CONDITIONS[condition])
    params = [replace(p, max_tokens=p.max_tokens or MAX_TOKENS, seed=p.seed or 9) for p in ALONE.values()]
    wanted = [(prompt, p) for prompt in PROMPTS[::3] for p in params]
    asked = replace(asking("model", 8 if mode is SpeculationMode.AUTO else 4), mode=mode)
    got = engine.generate([prompt for prompt, _ in wanted], [p for _, p in wanted], speculation=asked)
    want = [done for prompt, p in wanted for done in torch_pair().plain(prompt, p)]
    for ours, theirs in zip(got, want, strict=True):
        assert_same(ours, theirs)
    assert engine.engine.rounds.name == "rounds"
    engine.engine.check_invariants()


@pytest.mark.slow
@settings(BOLD, max_examples=8)
@given(**SITUATIONS)
def test_random_combinations(sampling, proposer, num_draft, plenty, prefix_cache, prompts) -> None:
    few = {} if plenty else {"pages": 30, "max_batch_tokens": 24}
    pair = random_of(proposer, as_served=False)
    engine = llm(pair, proposer, prefix_cache=prefix_cache, **few)
    assert_speculation_changes_nothing(pair, engine, sampling, proposer, num_draft, prompts)


@pytest.mark.slow
def test_any_number_of_drafts_in_any_round(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = llm(torch_pair(), "model", pages=60)
    monkeypatch.setattr(engine.engine.scheduler, "round_control", AnyK())
    params = [replace(ALONE[name], max_tokens=40) for name in ("temperature", "top_p", "stop_token_ids", "greedy")]
    for _ in range(3):
        got = engine.generate(list(PROMPTS), params, speculation=asking("model", 8))
        for ours, prompt, sampling in zip(got, PROMPTS, params, strict=True):
            if sampling.seed is not None or not sampling.temperature:
                assert ours.token_ids == torch_pair().plain(prompt, sampling)[0].token_ids


def test_memory_for_rounds_is_that_of_plain_steps() -> None:
    """The page of nobody comes on top: it takes none of those that sequences share."""
    pair = torch_pair()
    both = pair.target, pair.draft
    plain, rounds = (pair.llm("model", loop=loop, kv_memory=gib(40, both, 4), draft=()) for loop in ("plain", "rounds"))
    assert plain.engine.facts.total_pages == rounds.engine.facts.total_pages
