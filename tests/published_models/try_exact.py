"""Published models say with drafts what they say without: alone and in a batch, with prompts read whole and in chunks.

`make test-published` runs it. Every token is compared with those of an engine that has no proposer, one request at a
time. Each model is a GGUF file whose codes our kernels multiply as they are, and drafts for itself as well.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import pytest

from pilotfish.engine import LLM, SamplingParams
from pilotfish.engine.llm import CompletionOutput
from pilotfish.engine.params import SpeculationMode, SpeculationParams
from pilotfish.models import published

pytestmark = pytest.mark.timeout(300)  # the first test with a model loads it twice or three times
NEW_TOKENS = 8
FEEDINGS = {"whole": 512, "chunked": 24}  # max_batch_tokens; the prompts have 5 to 90 tokens
PROPOSERS = ("ngram", "suffix", "self", "model")
NUM_DRAFTS = (1, 4, "auto")
_STORY = "Once upon a time there was a little girl who lived in a small house near the forest. "
PROMPTS = (
    "one two three four, one two three four, one two three four, one two",
    "The capital of France is",
    "def add(a, b):\n    return a + b\n\n\ndef subtract(a, b):\n",
    _STORY * 4 + "Once",
    "Das Wetter ist heute schön, und morgen",
    'The JSON of it: {"name": "Ann", "age": 31}, {"name": "Bob", "age":',
    "Water boils at 100 degrees. Water freezes at",
    "😀 means happy, 😢 means",
)
# Greedily and with a seed, by turns.
REQUESTS = [
    (prompt, SamplingParams(max_tokens=NEW_TOKENS, temperature=0.8 * (i % 2), seed=100 + i))
    for i, prompt in enumerate(PROMPTS)
]


@cache
def plain(name: str) -> list[CompletionOutput]:
    """What the model says to each request, alone and without drafts."""
    llm = LLM(published.model(name), proposer="none", prefix_cache=False, threads=1, max_model_len=256)
    return [done for prompt, params in REQUESTS for done in llm.generate(prompt, params)]


LOADED = [("smollm2", "whole"), ("smollm2", "chunked"), ("gemma-3", "chunked")]
# Every proposer with every number of drafts; each of both meets both models and both feedings.
CASES = [
    (LOADED[(i + j) % len(LOADED)], proposer, num_draft)
    for i, proposer in enumerate(PROPOSERS)
    for j, num_draft in enumerate(NUM_DRAFTS)
] + [(each, None, "off") for each in LOADED]


@pytest.fixture(scope="module")
def loaded(request: pytest.FixtureRequest) -> Iterator[tuple[str, LLM]]:
    """One engine at a time. It has no prefix cache, which would know the prompts after the first test."""
    name, feeding = request.param
    plain(name)
    file = published.model(name)
    llm = LLM(
        file,
        draft=[file, "self"],
        prefix_cache=False,
        threads=1,
        max_model_len=256,
        max_batch_size=len(REQUESTS),
        max_batch_tokens=FEEDINGS[feeding],
    )
    yield name, llm
    llm.engine.check_invariants()


@pytest.mark.parametrize(("loaded", "proposer", "num_draft"), CASES, indirect=["loaded"])
def test_drafts_change_no_token(loaded: tuple[str, LLM], proposer: str | None, num_draft: int | str) -> None:
    name, llm = loaded
    if isinstance(num_draft, int):
        asked = SpeculationParams(mode=SpeculationMode.FIXED, num_draft_tokens=num_draft, proposer=proposer)
    else:
        asked = SpeculationParams(mode=SpeculationMode(num_draft), proposer=proposer)
    (alone,) = llm.generate(*REQUESTS[0], speculation=asked)
    batch = llm.generate([p for p, _ in REQUESTS], [params for _, params in REQUESTS], speculation=asked)
    assert said([alone]) == said(plain(name))[:1]
    assert said(batch) == said(plain(name))
    if isinstance(num_draft, str):  # with `auto`, control may find that drafts do not pay here
        return
    assert sum(done.stats.drafted for done in batch) > 0, "nothing was drafted"
    if proposer == "model":  # the draft is the target; in small steps few drafts find room
        assert alone.stats.accepted > NEW_TOKENS / 3


def said(outputs: list[CompletionOutput]) -> list[tuple[tuple[int, ...], str | None]]:
    return [(done.token_ids, done.text) for done in outputs]
