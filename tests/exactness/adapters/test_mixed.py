"""Hybrids, mixtures and sinks with all that users combine, in one batch: adapters, structures, penalties, several
outputs, every way to draft, starved pages and a warm cache. Each output is what its request gives alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pilotfish.engine.config import EngineConfig
from pilotfish.engine.llm import LLM, CompletionOutput
from pilotfish.engine.params import Guided, SamplingParams, ThinkingBudget
from pilotfish.engine.startup.build import build_engine
from pilotfish.engine.types import KVCursor
from tests import adapters, zoo
from tests.covering import some
from tests.exactness.test_options import BOLD, COMBINATIONS
from tests.families import PROPOSERS
from tests.sameness import PROMPTS, VOCAB, asking, assert_same, codec, run

LONGEST, PAGE, FREE_PAGES = 100, 4, 27  # pages for one sequence of full length, and a few more
NAMES = (None, "a", "b")  # of adapters
THINKING = Guided(regex="(.|\n){0,40}", thinking=ThinkingBudget(max_tokens=3, end="}"))


@dataclass(frozen=True, eq=False)
class Served:
    """An engine that drafts, one that does not, and what the latter said."""

    drafting: LLM
    plain: LLM
    known: dict[tuple[str, str, str | None], list[CompletionOutput]] = field(default_factory=dict)

    def alone(self, prompt: str, sampling: SamplingParams, adapter: str | None) -> list[CompletionOutput]:
        key = (prompt, repr(sampling), adapter)
        if key not in self.known:
            self.known[key] = self.plain.generate(prompt, sampling, adapter=adapter)
        return self.known[key]


@pytest.fixture(scope="module", params=some(["granite-4", "gpt-oss"], ["granite-4"]))
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Served:
    folder = tmp_path_factory.mktemp(request.param)
    kind, extra = zoo._BY_KIND[request.param]
    model = zoo.with_large_weights(zoo.config_of(kind, **extra | {"vocab_size": VOCAB, "eos_token_id": 0}))
    model.save_pretrained(folder / "target")
    zoo.disturbed(model, 0.01).save_pretrained(folder / "draft")
    loaded = {
        name: str(adapters.write(folder / name, model, rank, 4.0, targets))
        for name, rank, targets in (("a", 2, ["q_proj", "o_proj"]), ("b", 5, ["q_proj", "k_proj", "v_proj"]))
    }
    usual = {"target": str(folder / "target"), "threads": 1, "max_model_len": LONGEST, "adapter": loaded}
    plain = build_engine(EngineConfig(**usual, max_batch_size=1, proposer="none", prefix_cache=False))
    drafts = {"draft": (str(folder / "draft"), "self:1"), "num_draft_tokens": 8, "page_size": PAGE}
    drafting = build_engine(EngineConfig(**usual, **drafts, max_batch_size=8, max_batch_tokens=24))
    assert drafting.pages.reserve(KVCursor(), PAGE * (drafting.pages.num_pages - FREE_PAGES))
    return Served(LLM.of(drafting, codec()), LLM.of(plain, codec()))


SAMPLING = st.one_of(
    COMBINATIONS.map(lambda params: replace(params, max_tokens=params.max_tokens + 6)),
    st.builds(SamplingParams, guided=st.just(THINKING), seed=st.integers(0, 99), max_tokens=st.just(20)),
)
ASKED = st.tuples(
    st.sampled_from(PROMPTS), SAMPLING, st.sampled_from(NAMES), st.sampled_from(PROPOSERS), st.integers(0, 8)
)


@settings(BOLD, max_examples=2)
@given(st.lists(ASKED, min_size=6, max_size=9))
def test_speculation_changes_nothing(
    served: Served, asked: list[tuple[str, SamplingParams, str | None, str, int]]
) -> None:
    llm = served.drafting
    requests = [
        llm._request(prompt, sampling, asking(proposer, num_draft), None, adapter=adapter)
        for prompt, sampling, adapter, proposer, num_draft in asked
    ]
    want = [done for prompt, sampling, adapter, *_ in asked for done in served.alone(prompt, sampling, adapter)]
    got = [done for outputs in run(llm, requests) for done in outputs]
    for ours, theirs in zip(got, want, strict=True):
        assert_same(ours, theirs)
