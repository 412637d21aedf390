"""The coupled rule: sampled tokens are a pure function of model, prompt, parameters and seed."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from functools import lru_cache

import pytest
import torch

from pilotfish.engine.config import EngineConfig
from pilotfish.engine.engine import Engine
from pilotfish.engine.params import SamplingParams, SpeculationParams
from pilotfish.engine.proposers import Proposer
from pilotfish.engine.startup.build import assemble
from pilotfish.engine.stats import Forward
from pilotfish.engine.step import Work
from pilotfish.engine.types import Request, Sequence
from tests import fakes, zoo
from tests.covering import some
from tests.scripted import ScriptedProposer

LAWS = (
    SamplingParams(temperature=0.8, top_p=0.9, seed=11, max_tokens=14),
    SamplingParams(temperature=0.8, top_k=20, seed=12, max_tokens=14),
    SamplingParams(temperature=1.3, top_p=0.95, top_k=40, seed=13, max_tokens=14),
    SamplingParams(temperature=1.3, min_p=0.02, seed=2**64 - 1, max_tokens=14),
    SamplingParams(temperature=1.3, seed=0, max_tokens=14),
)


def request(i: int, num_draft: int | None = None) -> Request:
    """Sixteen different requests: prompts of unequal lengths under the laws above."""
    prompt, asked = zoo.prompts(16)[i], SpeculationParams(num_draft_tokens=num_draft)
    return Request(request_id=str(i), token_ids=tuple(prompt), sampling=LAWS[i % len(LAWS)], speculation=asked)


@lru_cache
def models() -> tuple[torch.nn.Module, torch.nn.Module]:
    return zoo.ours(zoo.reference("llama")), zoo.near(zoo.reference("llama"))


def engine_of(proposer: str, num_draft: int, extra: dict[str, Proposer] | None = None) -> Engine:
    """Without a prefix cache, which would know the prompts from the second K on."""
    usual = {"target": "llama", "draft": "near", "max_batch_size": 16, "prefix_cache": False}
    config = EngineConfig(**usual, num_draft_tokens=num_draft).model_copy(update={"proposer": proposer})  # maybe ours
    scripted = {
        "right": ScriptedProposer(lambda s, k: _future(s)[:k]),
        "wrong": ScriptedProposer(lambda s, k: [(t + 1) % zoo.VOCAB for t in _future(s)[:k]]),
    }
    return assemble(config, *models(), extra_proposers={**scripted, **(extra or {})})


def _future(sequence: Sequence) -> list[int]:
    plain = alone()[LAWS.index(sequence.request.sampling), sequence.request.token_ids]
    return plain[sequence.num_generated :]


@lru_cache
def alone() -> dict[tuple[int, tuple[int, ...]], list[int]]:
    """Each request by itself, one token at a time."""
    found = {}
    engine = assemble(EngineConfig(target="llama", proposer="none", prefix_cache=False), models()[0])
    for i in range(16):
        one = request(i)
        outputs = fakes.run(engine, [one])
        found[LAWS.index(one.sampling), one.token_ids] = outputs.tokens[str(i)]
    return found


def plain(i: int) -> list[int]:
    return alone()[LAWS.index(request(i).sampling), request(i).token_ids]


@pytest.mark.parametrize("proposer", some(["model", "right"], ["model"]))
def test_same_tokens_alone_and_in_company(proposer: str) -> None:
    engine = engine_of(proposer, 8)
    for num_draft in (1, 8):
        company = fakes.run(engine, [request(i, num_draft) for i in range(16)])
        assert [company.tokens[str(i)] for i in range(16)] == [plain(i) for i in range(16)], f"K={num_draft}"
    for i in range(len(LAWS)):
        assert fakes.run(engine, [request(i, 4)]).tokens[str(i)] == plain(i)


def test_right_drafts_are_all_kept_and_wrong_ones_none() -> None:
    for proposer, rate in (("right", 1.0), ("wrong", 0.0)):
        outputs = fakes.run(engine_of(proposer, 4), [request(i) for i in range(16)])
        assert {f.stats.acceptance_rate for f in outputs.finished.values() if f.stats.drafted} == {rate}


@pytest.mark.slow
def test_shared_noise_makes_a_draft_better() -> None:
    """A near draft that guesses with the target's noise is kept far more often than one with noise of its own."""
    coupled = engine_of("model", 4)

    class OtherNoise(Proposer):
        uses_draft_kv = shares_draft_kv = True

        def propose(self, works: Seq[Work], forwards: list[Forward]) -> list[Work]:
            for work in works:
                work.sequence.seed += 1
            try:
                return apart.proposers.by_name["model"].propose(works, forwards)
            finally:
                for work in works:
                    work.sequence.seed -= 1

    apart = engine_of("other", 4, {"other": OtherNoise()})
    assert _acceptance(coupled) > _acceptance(apart) + 0.1


def _acceptance(engine: Engine) -> float:
    requests = [
        Request(
            request_id=str(i), token_ids=(i + 3, 5), sampling=SamplingParams(temperature=1.0, seed=i, max_tokens=60)
        )
        for i in range(16)
    ]
    stats = [f.stats for f in fakes.run(engine, requests).finished.values()]
    return sum(s.accepted for s in stats) / sum(s.drafted for s in stats)


def test_different_seeds_differ() -> None:
    engine = engine_of("model", 4)
    same = [
        Request(request_id=str(i), token_ids=(5, 6, 7), sampling=SamplingParams(temperature=1.0, seed=i, max_tokens=14))
        for i in range(16)
    ]
    assert len({tuple(tokens) for tokens in fakes.run(engine, same).tokens.values()}) == 16
