"""Whoever drafts (suffix, self, medusa, eagle, auto), the tokens are those of plain decoding."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import pytest
import torch

from engine.config import EngineConfig
from engine.engine import Engine
from engine.params import SamplingParams, SpeculationParams
from engine.proposers.early_exit import first_layers
from engine.startup.build import assemble
from engine.types import Request
from tests import fakes, heads, zoo
from tests.covering import covering

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


@pytest.mark.parametrize(("family", "own_output"), covering(zoo.configs(), [False, True], every=8))
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


def test_self_shares_the_targets_weights() -> None:
    """The truncated model holds the target's own weights, not copies."""
    for family in zoo.configs():
        target = models(family)[0]
        twin = first_layers(target, 1)
        mine = {id(p) for p in target.parameters()}
        assert {id(p) for p in twin.parameters()} < mine
        assert len(list(target.parameters())) == len(mine), "the target kept all of its own"
