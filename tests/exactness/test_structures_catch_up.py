"""A structure's state that lags behind its output's tokens takes them in parts, and nothing else changes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import count
from typing import Any

import pytest

from pilotfish.engine.engine import Engine
from pilotfish.engine.errors import GrammarFault
from pilotfish.engine.params import SamplingParams
from pilotfish.engine.turns import MASK_SECONDS
from pilotfish.engine.types import GRAMMAR_TOKENS, FinishReason, ReceivedOutput, Resume
from tests import fakes
from tests.exactness.test_defects import Alternating, engine, request, structured

LENGTH, EMITTED = 60, 40
SAMPLING = SamplingParams(max_tokens=90, temperature=1.0, seed=3)
TOKEN_SECONDS = 0.002


class Costly(Alternating):
    """A structure that takes its time for each token."""

    def start(self) -> Costly:
        return Costly(self.length)

    def advance(self, tokens: Any) -> int:
        end = time.thread_time() + TOKEN_SECONDS * len(tokens)
        while time.thread_time() < end:
            pass
        return super().advance(tokens)


def llm() -> Engine:
    return engine(eos=frozenset({0}), max_model_len=200)


def structured_tokens() -> list[int]:
    return fakes.run(llm(), [structured("r", "none", SAMPLING, Alternating(LENGTH))]).tokens["r"]


def lags(running: Engine) -> list[int]:
    return [sequence.grammar_lag for sequence in running.scheduler.sequences]


def test_the_tokens_of_an_earlier_engine_delay_nobody() -> None:
    """In each step states take what fits into its time, in turn; whoever has no structure decodes beside them."""
    want, running, outputs = structured_tokens(), llm(), fakes.Outputs()
    emitted = (ReceivedOutput(token_ids=tuple(want[:EMITTED])),)
    names = [f"r{i}" for i in range(6)]
    for name in names:
        running.add(request(name, SAMPLING, grammar=Costly(LENGTH), resume=Resume(outputs=emitted)))
    running.add(request("other", SamplingParams(max_tokens=150, ignore_eos=True)))
    outputs.take(running.step().events)
    steps = 0
    while any(before := lags(running)):
        alone = len(outputs.tokens["other"])
        outputs.take(running.step().events)
        steps += 1
        taken = sum(before) - sum(lags(running))
        assert 0 < taken <= MASK_SECONDS / TOKEN_SECONDS + GRAMMAR_TOKENS
        assert len(outputs.tokens["other"]) > alone
        running.check_invariants()
    assert steps > 3
    while running.has_work:
        outputs.take(running.step().events)
    assert [outputs.tokens[name] for name in names] == [want[EMITTED:]] * 6


class Fragile(Alternating):
    """Its call number `fails` that concerns drafts fails, and this state with it; states that begin later do not."""

    def __init__(self, calls: Iterator[int], fails: int) -> None:
        super().__init__(LENGTH)
        self.calls, self.fails, self.is_broken = calls, fails, False

    def start(self) -> Fragile:
        return Fragile(self.calls, self.fails)

    def advance(self, tokens: Any) -> int:
        self.is_broken = self.is_broken or (bool(tokens) and next(self.calls) == self.fails)
        if self.is_broken:
            raise GrammarFault("the state has failed")
        return super().advance(tokens)

    def fill(self, mask: Any) -> None:
        if self.is_broken:
            raise GrammarFault("the state has failed")
        super().fill(mask)


@pytest.mark.parametrize("fails", range(0, 24, 4))
def test_a_fault_in_drafts_or_in_the_commit_costs_no_token(fails: int) -> None:
    """Wherever it happens, the output goes on as without drafts: a new state takes its tokens."""
    outputs = fakes.run(llm(), [structured("r", "model", SAMPLING, Fragile(count(), fails))])
    assert outputs.tokens["r"] == structured_tokens()
    assert outputs.finished["r"].reason is FinishReason.STOP
