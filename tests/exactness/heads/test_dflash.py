"""With drafts of DFlash the tokens are those of plain decoding: any number of drafts, any law, whatever K/V becomes."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from engine.config import EngineConfig
from engine.engine import Engine
from engine.model.runner import kv_layout
from engine.params import SamplingParams, SpeculationParams, Verification
from engine.startup.build import assemble
from engine.types import Request
from tests import fakes, heads, laws, zoo
from tests.engine.proposers.heads import dflash_checkpoints as made

LAWS = (
    SamplingParams(max_tokens=24),
    SamplingParams(temperature=3.0, top_p=0.9, seed=11, max_tokens=24),
    SamplingParams(temperature=4.0, seed=0, max_tokens=24),
    SamplingParams(temperature=3.0, seed=5, max_tokens=24, repetition_penalty=1.3, presence_penalty=0.5, min_tokens=20),
    SamplingParams(max_tokens=24, frequency_penalty=0.7, logit_bias={5: 2.0, 9: -100.0}, banned_token_ids=(11, 12)),
)
CAPPED = made.AUTHORS | {"final_logit_softcapping": 30.0}


@lru_cache
def target(name: str) -> PreTrainedModel:
    """`planted`: flat enough that sampled tokens often differ from the likeliest, so drafts are kept and are not."""
    if name == "planted":
        return made.planted_target(sharpness=2.0)
    config = zoo.further_families()[name] if name != "llama" else zoo.config_of("llama", num_hidden_layers=4)
    return zoo.with_large_weights(config)


def engine_of(folder: Path, name: str = "planted", **config: object) -> Engine:
    """A fresh target each: its features are read by a hook that stays."""
    draft = made.planted(folder) if name == "planted" else heads.save(folder, CAPPED, made.tensors())
    settings = EngineConfig(target=name, dflash=draft, **{"max_batch_size": 16, "proposer": "dflash", **config})
    return assemble(settings, zoo.ours(target(name)))


def requests(name: str = "planted", **speculation: object) -> list[Request]:
    """Prompts of the target's tokens; the first is a single one."""
    prompts = [[made.FIRST + token % 20 for token in p] if name == "planted" else p for p in zoo.prompts(10)]
    prompts[0] = prompts[0][:1]
    return [
        Request(
            request_id=str(i),
            token_ids=tuple(prompt),
            sampling=LAWS[i % len(LAWS)],
            speculation=SpeculationParams(**speculation),
        )
        for i, prompt in enumerate(prompts)
    ]


@lru_cache
def plain(name: str) -> dict[str, list[int]]:
    """Each request by itself, one token at a time."""
    engine = assemble(EngineConfig(target=name, proposer="none"), zoo.ours(target(name)))
    return {r.request_id: fakes.run(engine, [r]).tokens[r.request_id] for r in requests(name)}


def mixed(name: str) -> tuple[list[Request], dict[str, list[int]]]:
    """All requests with each number of drafts up to 8, and beside them plain ones; and what they are to give."""
    asked = [
        replace(request, request_id=f"{k}-{request.request_id}")
        for k in range(9)
        for request in requests(name, num_draft_tokens=k)
    ]
    return asked, {request.request_id: plain(name)[request.request_id.partition("-")[2]] for request in asked}


@pytest.mark.parametrize(
    ("name", "max_batch_tokens"), [("planted", 512), ("planted", 17), ("llama", 512), ("lfm-2", 17)]
)
def test_any_k_in_one_batch(tmp_path: Path, name: str, max_batch_tokens: int) -> None:
    engine = engine_of(tmp_path, name, speculation="fixed", max_batch_tokens=max_batch_tokens, page_size=8)
    asked, want = mixed(name)
    outputs = fakes.run(engine, asked)
    assert outputs.tokens == want
    if name == "planted":
        kept = sum(f.stats.accepted for f in outputs.finished.values())
        assert 0.2 < kept / sum(f.stats.drafted for f in outputs.finished.values()) < 0.9


def test_as_many_drafts_as_pay(tmp_path: Path) -> None:
    asked, want = mixed("planted")
    assert fakes.run(engine_of(tmp_path), asked).tokens == want


def test_rounded_keys_and_values_of_the_draft(tmp_path: Path) -> None:
    """The option rounds those of the target, too: so it is compared with itself."""
    asked = requests("planted")
    outputs = [
        fakes.run(engine_of(tmp_path, kv_cache_dtype="int8", proposer=p), asked).tokens for p in ("none", "dflash")
    ]
    assert outputs[0] == outputs[1]


def test_preempted(tmp_path: Path) -> None:
    """Pages for a few of ten sequences: features and K/V are given up and made again."""
    draft = made._DEPTH * 2 * 4 * made.HIDDEN
    per_token = kv_layout(target("planted").config, torch.float32).bytes_per_token + draft
    engine = engine_of(
        tmp_path, page_size=8, attention="reference", speculation="fixed", kv_memory=13 * 8 * per_token / 2**30
    )
    assert engine.total_pages == 13
    outputs = fakes.run(engine, requests())
    assert outputs.preempted
    assert outputs.tokens == plain("planted")
    assert sum(f.stats.accepted for f in outputs.finished.values())


def test_behind_a_cached_prefix(tmp_path: Path) -> None:
    """The target's K/V of a prompt come from an earlier request, so the draft never sees their features."""
    engine = engine_of(tmp_path, page_size=8, speculation="fixed", prefix_cache=True)
    first, second = (fakes.run(engine, requests()) for _ in range(2))
    assert first.tokens == second.tokens == plain("planted")
    assert sum(f.cached_prompt_tokens for f in second.finished.values()) > 50
    assert sum(f.stats.accepted for f in second.finished.values())


def test_greedy_under_the_rejection_rule(tmp_path: Path) -> None:
    """At temperature 0 a law is certain, so rejection too must give plain decoding's tokens."""
    greedy = [r for r in requests(verification=Verification.REJECTION) if not r.sampling.temperature]
    outputs = fakes.run(engine_of(tmp_path, speculation="fixed"), greedy)
    assert outputs.tokens == {r.request_id: plain("planted")[r.request_id] for r in greedy}
    assert sum(f.stats.accepted for f in outputs.finished.values())


def test_the_law_under_the_rejection_rule(tmp_path: Path) -> None:
    """1,500 seeds: the law of the third token, the second of two that one pass drafted, over all those before it."""
    law = SamplingParams(temperature=4.0, top_k=6, max_tokens=4, ignore_eos=True)
    asked = SpeculationParams(verification=Verification.REJECTION, num_draft_tokens=2)
    prompt = (made.FIRST, made.successor(made.FIRST))
    many = [
        Request(request_id=str(i), token_ids=prompt, sampling=replace(law, seed=i), speculation=asked)
        for i in range(1500)
    ]
    outputs = fakes.run(engine_of(tmp_path, max_batch_size=64, speculation="fixed"), many)
    rounds = [f.stats for f in outputs.finished.values()]
    by_depth = [sum(one.accepted_per_position[depth] for one in rounds) for depth in range(2)]
    assert all(50 < kept < 0.95 * sum(one.rounds for one in rounds) for kept in by_depth), "some are kept, some are not"
    want = laws.of_later(target("planted"), prompt, law, 2)
    laws.assert_drawn((tokens[2] for tokens in outputs.tokens.values()), want)
