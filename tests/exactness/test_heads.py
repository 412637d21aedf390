"""Whoever drafts (suffix, self, medusa, eagle, auto), the tokens are those of plain decoding."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import pytest
import torch

from engine.config import EngineConfig
from engine.engine import Engine
from engine.model.runner import kv_layout
from engine.params import SamplingParams, SpeculationParams, Verification
from engine.proposers.early_exit import first_layers
from engine.startup.build import assemble
from engine.types import Request
from tests import fakes, heads, laws, zoo

LAWS = (
    SamplingParams(max_tokens=24),
    SamplingParams(temperature=0.8, top_p=0.9, seed=11, max_tokens=24),
    SamplingParams(temperature=1.3, seed=0, max_tokens=24),
    SamplingParams(temperature=0.9, seed=5, max_tokens=24, repetition_penalty=1.3, presence_penalty=0.5, min_tokens=20),
    SamplingParams(max_tokens=24, frequency_penalty=0.7, logit_bias={5: 2.0, 9: -100.0}, banned_token_ids=(11, 12)),
)
PROPOSERS = ("suffix", "self", "medusa", "eagle", "auto")
EVERYONE = ("none", "ngram", "model", *PROPOSERS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("heads")


@lru_cache
def models(family: str) -> tuple[torch.nn.Module, torch.nn.Module]:
    return zoo.ours(zoo.reference(family)), zoo.near(zoo.reference(family))


def engine_of(folder: Path, family: str = "llama", *, own_output: bool = False, **config: object) -> Engine:
    settings = EngineConfig(
        target=family,
        draft="near",
        self_layers=1,
        medusa=heads.medusa(folder, own_output=own_output),
        eagle=heads.eagle(folder, embedding=own_output, fc_bias=own_output, qkv_bias=own_output),
        **{"max_batch_size": 16, **config},
    )
    target, draft = models(family)
    return assemble(settings, target, draft)


def requests(count: int = 10, **speculation: object) -> list[Request]:
    prompts = zoo.prompts(count)
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
def plain(family: str) -> dict[str, list[int]]:
    """Each request by itself, one token at a time."""
    engine = assemble(EngineConfig(target=family, proposer="none"), models(family)[0])
    return {r.request_id: fakes.run(engine, [r]).tokens[r.request_id] for r in requests()}


@pytest.mark.parametrize("max_batch_tokens", [512, 17], ids=["whole", "chunked"])
@pytest.mark.parametrize("proposer", PROPOSERS)
def test_any_k(folder: Path, proposer: str, max_batch_tokens: int) -> None:
    engine = engine_of(folder, proposer=proposer, num_draft_tokens=8, max_batch_tokens=max_batch_tokens)
    for num_draft in (0, 1, 2, 4, 8):
        asked = requests(num_draft_tokens=num_draft)
        assert fakes.run(engine, asked).tokens == plain("llama"), f"K={num_draft}"
        assert fakes.run(engine, asked[:1]).tokens["0"] == plain("llama")["0"], "alone"


@pytest.mark.parametrize("own_output", [False, True], ids=["shared", "own"])
@pytest.mark.parametrize("family", zoo.configs())
def test_every_family(folder: Path, family: str, own_output: bool) -> None:
    """All proposers in one batch, heads of both layouts."""
    engine = engine_of(folder, family, own_output=own_output)
    asked = requests()[: len(LAWS)]
    mixed = [r for name in EVERYONE for r in _renamed(requests(proposer=name)[: len(LAWS)], name)]
    outputs = fakes.run(engine, mixed).tokens
    assert outputs == {f"{name}-{r.request_id}": plain(family)[r.request_id] for name in EVERYONE for r in asked}


def _renamed(asked: list[Request], name: str) -> list[Request]:
    return [
        Request(
            request_id=f"{name}-{r.request_id}", token_ids=r.token_ids, sampling=r.sampling, speculation=r.speculation
        )
        for r in asked
    ]


@pytest.mark.parametrize("proposer", PROPOSERS)
def test_preempted(folder: Path, proposer: str) -> None:
    """Pages for a few of ten sequences: features and K/V of every drafter are given up and made again."""
    config = zoo.configs()["llama"]
    per_token = 3 * kv_layout(config, torch.float32).bytes_per_token  # target 2 layers, draft 2, self 1, eagle 1
    engine = engine_of(
        folder, proposer=proposer, page_size=8, attention="reference", kv_memory=20 * 8 * per_token / 2**30
    )
    assert engine.total_pages == 20
    outputs = fakes.run(engine, requests())
    assert outputs.preempted
    assert outputs.tokens == plain("llama")


@pytest.mark.parametrize("proposer", ["self", "medusa", "eagle", "auto"])
def test_greedy_under_the_rejection_rule(folder: Path, proposer: str) -> None:
    """At temperature 0 a law is certain, so rejection too must give plain decoding's tokens."""
    greedy = [r for r in requests(proposer=proposer, verification=Verification.REJECTION) if not r.sampling.temperature]
    outputs = fakes.run(engine_of(folder), greedy).tokens
    assert outputs == {r.request_id: plain("llama")[r.request_id] for r in greedy}


def test_self_shares_the_targets_weights() -> None:
    """The truncated model holds the target's own weights, not copies."""
    for family in zoo.configs():
        target = models(family)[0]
        twin = first_layers(target, 1)
        mine = {id(p) for p in target.parameters()}
        assert {id(p) for p in twin.parameters()} < mine
        assert len(list(target.parameters())) == len(mine), "the target kept all of its own"


@pytest.mark.parametrize("proposer", ["self", "medusa", "eagle"])
def test_the_law_under_the_rejection_rule(folder: Path, proposer: str) -> None:
    """1,500 seeds, the 16 likeliest tokens each: the law of the second token, which was drafted, over all firsts."""
    law = SamplingParams(temperature=3.0, top_k=16, max_tokens=3, ignore_eos=True)
    asked = SpeculationParams(proposer=proposer, verification=Verification.REJECTION, num_draft_tokens=1)
    prompt = tuple(zoo.prompts()[2])
    many = [
        Request(request_id=str(i), token_ids=prompt, sampling=replace(law, seed=i), speculation=asked)
        for i in range(1500)
    ]
    outputs = fakes.run(engine_of(folder, max_batch_size=64), many)
    rounds = [f.stats for f in outputs.finished.values() if f.stats.drafted]
    assert len(rounds) == 1500
    assert 15 < sum(s.accepted for s in rounds) < 1485, "some are kept and some are not"
    want = laws.of_later(zoo.reference("llama"), prompt, law, 1)
    laws.assert_drawn((tokens[1] for tokens in outputs.tokens.values()), want)
