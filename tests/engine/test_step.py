"""What a step does once: each text is searched once, and each list of numbers goes to the device once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from itertools import count
from typing import Any

import pytest
import torch

from pilotfish.engine.config import EngineConfig
from pilotfish.engine.engine import Engine
from pilotfish.engine.params import SpeculationMode, SpeculationParams, Verification
from pilotfish.engine.proposers.ngram import NGramProposer
from pilotfish.engine.proposers.suffix import SuffixProposer
from pilotfish.engine.request.prediction import TextAlignment
from pilotfish.engine.startup.build import assemble
from pilotfish.engine.types import Request
from tests import fakes, zoo

TEXT = (5, 6, 7, 8, 9, 10) * 4


@lru_cache
def models() -> tuple[torch.nn.Module, torch.nn.Module]:
    return zoo.ours(zoo.reference("llama")), zoo.near(zoo.reference("llama"))


def engine_of(**config: object) -> Engine:
    """A real target with a draft model, under adaptive control."""
    settings = EngineConfig(target="llama", draft="near", max_batch_size=8, prefix_cache=False, **config)
    return assemble(settings, *models())


def asked(name: str, proposer: str, mode: SpeculationMode, **sampling: Any) -> Request:
    wish = SpeculationParams(mode=mode, num_draft_tokens=4, proposer=proposer)
    return fakes.request((*TEXT, len(name)), name=name, wish=wish, max_tokens=24, **sampling)


def counted(monkeypatch: pytest.MonkeyPatch, kind: type, method: str, key: Callable[..., Any]) -> Counter[Any]:
    """How often a method is called, by what `key` says of its arguments."""
    calls, called = Counter[Any](), getattr(kind, method)

    def counting(*given: Any) -> Any:
        calls[key(*given)] += 1
        return called(*given)

    monkeypatch.setattr(kind, method, counting)
    return calls


@pytest.mark.parametrize("mode", [SpeculationMode.FIXED, SpeculationMode.AUTO])
def test_each_text_is_searched_once_in_a_step(mode: SpeculationMode, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a sequence by each lookup that may draft for it: what planning found is what is verified."""
    engine = engine_of()
    searches = {
        kind: counted(monkeypatch, kind, "look_up", lambda _, sequence, k: (sequence.request_id, len(sequence.tokens)))
        for kind in (NGramProposer, SuffixProposer)
    }
    requests = [asked(name, name, mode, logit_bias={5: 60.0}) for name in ("ngram", "suffix", "auto")]
    found = fakes.run(engine, requests)
    for kind, calls in searches.items():
        assert len(calls) > 4, kind
        assert set(calls.values()) == {1}, kind
    assert mode is SpeculationMode.AUTO or found.finished["ngram"].stats.accepted > 12


def test_a_prediction_is_read_once_in_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, steps = engine_of(), 0
    monkeypatch.setattr(engine, "_clock", count().__next__)  # by measured times, drafts may not pay
    plain = asked("r", "none", SpeculationMode.OFF)
    output = fakes.run(engine, [plain]).tokens["r"]
    reads = counted(monkeypatch, TextAlignment, "drafts", lambda _, k: steps)
    engine.add(replace(plain, speculation=SpeculationParams(), prediction=tuple(output)))
    said = fakes.Outputs()
    while engine.has_work:
        steps += 1
        said.take(engine.step().events)
    assert said.tokens["r"] == output
    assert said.finished["r"].stats.accepted > 16
    assert set(reads.values()) == {1}


@pytest.mark.parametrize("rule", list(Verification))
def test_no_list_is_sent_twice_in_a_step(rule: Verification, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ids, drafts, positions, pages: a tensor is made of them once. Only top-p and min-p are sent for each draft."""
    engine, drafted = engine_of(verification=str(rule), attention="reference"), 0
    for name in ("a", "bc"):
        engine.add(asked(name, "model", SpeculationMode.FIXED, temperature=0.7, top_k=20, seed=100 + len(name)))
    make, lists = torch.tensor, Counter[tuple[Any, ...]]()

    def counting(numbers: Any, *args: Any, **options: Any) -> torch.Tensor:
        made = make(numbers, *args, **options)
        if made.numel() > 3 and not made.is_floating_point():
            lists[tuple(made.flatten().tolist())] += 1
        return made

    monkeypatch.setattr(torch, "tensor", counting)
    for _ in range(8):
        lists.clear()
        drafted += engine.step().stats.drafted
        assert set(lists.values()) == {1}, [one for one, count in lists.items() if count > 1]
    assert drafted > 16
