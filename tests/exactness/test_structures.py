"""Structured output through the whole engine: valid documents, the same with drafts and without."""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import cache

import jsonschema
import pytest

from pilotfish.engine.llm import LLM, CompletionOutput
from pilotfish.engine.params import Guided, SamplingParams
from pilotfish.engine.types import FinishReason
from tests.sameness import asking, assert_same, embedded_pair
from tests.schemas import random_schema

NUMBER = 12
SCHEMAS = [random_schema(seed) for seed in range(NUMBER)]
OPTIONS = {"max_model_len": 1024, "max_batch_size": 32, "max_batch_tokens": 256, "page_size": 32}


def asked(seed: int) -> tuple[str, SamplingParams]:
    """The prompt, cut differently for each, and half of them greedy."""
    guided = Guided(json_schema=json.dumps(SCHEMAS[seed]))
    sampling = SamplingParams(guided=guided, temperature=seed % 2, seed=seed, max_tokens=900, logprobs=0)
    return "import json\n\nprint(json.dumps(value)) # -> "[seed % 20 :], sampling


def generate(llm: LLM, proposer: str, seeds: Iterable[int] = range(NUMBER)) -> list[CompletionOutput]:
    prompts, params = zip(*map(asked, seeds), strict=True)
    return llm.generate(list(prompts), list(params), speculation=asking(proposer, 4))


@cache
def plain() -> list[CompletionOutput]:
    return generate(embedded_pair().llm("none", **OPTIONS, prefix_cache=False), "none")


def test_random_schemas_give_valid_documents() -> None:
    for schema, done in zip(SCHEMAS, plain(), strict=True):
        assert done.finish_reason is FinishReason.STOP, done
        assert done.error is None
        jsonschema.validate(json.loads(done.text), schema)


@pytest.mark.parametrize("proposer", ["model"])
def test_random_schemas_are_the_same_with_drafts(proposer: str) -> None:
    """Every second one of them twice, so greedy and sampled."""
    seeds = [seed for seed in range(NUMBER) if seed % 4 < 2]
    got = generate(embedded_pair().llm(proposer, **OPTIONS), proposer, seeds)
    for ours, seed in zip(got, seeds, strict=True):
        assert_same(ours, plain()[seed])
    assert sum(done.stats.accepted for done in got) > 0, "no draft was kept, so nothing was shown"
