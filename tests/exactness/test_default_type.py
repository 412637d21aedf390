"""The embedded pair in the type that it is loaded in here when nobody asks for one: one prompt alone is the law.

Where our C multiplies bfloat16 that is bfloat16, and elsewhere float32; the tokens hold to the law in either.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from random import Random

import pytest
import torch

from pilotfish.engine import LLM, SamplingParams
from pilotfish.engine.model.checkpoint import read_config
from pilotfish.engine.model.fallback import kv_layout
from pilotfish.engine.native import multiplies
from pilotfish.engine.params import SpeculationMode, SpeculationParams
from pilotfish.engine.step import Step
from pilotfish.engine.types import Sequence
from pilotfish.models import corpus, embedded_draft, embedded_eagle, embedded_medusa, embedded_target
from tests.respell import shuffled

OWN = torch.bfloat16 if multiplies(torch.bfloat16) else torch.float32
LAWS = (
    SamplingParams(max_tokens=14, ignore_eos=True),
    SamplingParams(max_tokens=14, ignore_eos=True, temperature=0.8, top_p=0.95, seed=3),
)
LENGTHS = (5, 150, 77, 40)  # characters
PROPOSERS = ("none", "model", "self", "eagle", "medusa")
PAGE, PAGES = 4, 32  # four prompts fit, and not what follows them
SMALL = {"threads": 1, "max_model_len": 128, "page_size": PAGE, "max_batch_size": 4, "max_batch_tokens": 48}


def prompts() -> list[str]:
    return [text[-length:] for text, length in zip(corpus.held_out_prompts(len(LENGTHS)), LENGTHS, strict=True)]


@cache
def alone(law: int) -> list[tuple[int, ...]]:
    """What each prompt is answered by itself, without drafts or a cache."""
    llm = LLM(embedded_target(), threads=1, max_batch_size=1, prefix_cache=False, proposer="none")
    assert llm.engine.facts.dtype == str(OWN).removeprefix("torch.")
    return [llm.generate(prompt, LAWS[law])[0].token_ids for prompt in prompts()]


def together(llm: LLM, law: SamplingParams, proposer: str) -> tuple[list[tuple[int, ...]], int]:
    """All prompts in one batch; their tokens, and how many drafts were kept."""
    asked = SpeculationParams(mode=SpeculationMode.FIXED, num_draft_tokens=3, proposer=proposer)
    done = llm.generate(prompts(), law, speculation=asked)
    return [each.token_ids for each in done], sum(each.stats.accepted for each in done)


@pytest.mark.slow
def test_whoever_drafts_and_over_cached_pages() -> None:
    drafts = [embedded_draft(), embedded_eagle(), embedded_medusa(), "self:3"]
    llm = LLM(embedded_target(), drafts, **SMALL)
    for i, proposer in enumerate(PROPOSERS):
        got, accepted = together(llm, LAWS[i % 2], proposer)
        assert got == alone(i % 2), proposer
        assert accepted or proposer == "none"
    [again] = llm.generate(prompts()[1], LAWS[0])
    assert again.cached_prompt_tokens


def test_after_preemption() -> None:
    pair = embedded_target(), embedded_draft()
    per_token = sum(kv_layout(read_config(str(path), None), OWN).bytes_per_token for path in pair)
    llm = LLM(*pair, **SMALL, prefix_cache=False, kv_memory=(PAGES * PAGE * per_token + 1) / 2**30)
    assert llm.engine.facts.total_pages == PAGES
    scheduler, lost = llm.engine.scheduler, list[Sequence]()
    preempt = scheduler._preempt
    scheduler._preempt = lambda sequence: (lost.append(sequence), preempt(sequence))
    assert together(llm, LAWS[1], "model")[0] == alone(1)
    assert lost


@pytest.mark.slow
def test_in_chunks_as_an_erratic_clock_would_have_them() -> None:
    """Time decides how much of a prompt a step reads (`max_step_ms`), and never what comes of it."""
    llm = LLM(embedded_target(), embedded_draft(), **SMALL, prefix_cache=False, max_step_ms=20.0)
    chance, now, sizes = Random(5), 0.0, set[int]()
    plan = llm.engine.scheduler.plan

    def clock() -> float:
        nonlocal now
        now += chance.choice((0.0, 0.0005, 0.004, 0.02))
        return now

    def watched() -> Step:
        planned = plan()
        sizes.update(len(work.span) for work in planned.works)
        return planned

    llm.engine._clock, llm.engine.scheduler.plan = clock, watched
    for i, law in enumerate(LAWS):
        for proposer in ("none", "model"):
            assert together(llm, law, proposer)[0] == alone(i)
    assert len(sizes) > 8


@pytest.mark.slow
def test_a_draft_of_another_vocabulary_and_another_type(tmp_path: Path) -> None:
    shuffled(embedded_draft(), tmp_path / "other", without=300)
    got, accepted = together(LLM(embedded_target(), tmp_path / "other", **SMALL), LAWS[0], "model")
    assert got == alone(0)
    assert accepted
