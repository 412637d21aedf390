"""The target's pass over a plan: for all sequences together, or one by one where that fails, to find the one at fault.

A pass can be repeated: its cursors are put back, and rows that are written twice hold the same values.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from engine.errors import RankLost
from engine.kv.batch import Feed
from engine.model.runner import Runner
from engine.proposers import Proposal, Proposers
from engine.sampling.logprobs import record_prompt
from engine.sampling.verification import VerifyInput, VerifyOutput, verify_rows
from engine.scheduler import StepPlan, Work
from engine.stats import Stopwatch
from engine.types import Sequence

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Verified:
    """Result of a target pass: outcomes of the sequences whose newest token was fed, and the sequences at fault."""

    proposal: Proposal  # the drafts that were verified
    outcomes: list[VerifyOutput]
    faulty: tuple[Sequence, ...] = ()
    is_whole: bool = True  # one pass for all sequences; else its time is no measurement
    engine_fault: Exception | None = None  # set where every sequence failed alone: the engine may be at fault


class TargetPass:
    """Feeds the target and verifies its rows."""

    def __init__(self, target: Runner, proposers: Proposers, page_size: int | None = None) -> None:
        self._target, self._proposers, self._page_size = target, proposers, page_size

    def run(self, plan: StepPlan, proposal: Proposal, watch: Stopwatch) -> Verified:
        """Feed and verify all sequences of a plan. After an exception feed each alone, to find the one at fault."""
        try:
            outcomes = self._pass(plan, proposal, watch)
        except RankLost:
            raise  # each of them alone would raise it too
        except Exception as error:
            log.exception("a pass for %d sequences failed; each is tried alone", len(plan.works))
            return self._one_by_one(plan, error, watch)
        return Verified(proposal, outcomes)

    def _one_by_one(self, plan: StepPlan, error: Exception, watch: Stopwatch) -> Verified:
        """Feed each sequence alone, without drafts: one that fails again is at fault; the others lose nothing."""
        _take_back(plan)
        outcomes: list[VerifyOutput] = []
        faulty: list[Sequence] = []
        for work in plan.works:
            alone = StepPlan((replace(work, num_draft=0),))
            try:
                outcomes += self._pass(alone, Proposal.certain([()]), watch)
            except Exception:
                log.exception("request %s failed alone; it ends", work.sequence.request_id)
                _take_back(alone)
                faulty.append(work.sequence)
        plain = Proposal.certain([()] * len(plan.works))
        engine_fault = error if len(faulty) == len(plan.works) else None
        return Verified(plain, outcomes, tuple(faulty), is_whole=False, engine_fault=engine_fault)

    def self_test(self, sequence: Sequence) -> None:
        """Feed all tokens of a sequence that belongs to no caller; raises what the pass raises."""
        plan = StepPlan((Work.feeding(sequence, sequence.todo),))
        self._pass(plan, Proposal.certain([()]), Stopwatch(lambda: 0.0))

    def _pass(self, plan: StepPlan, proposal: Proposal, watch: Stopwatch) -> list[VerifyOutput]:
        with watch.phase("forward"):
            feeds = [self._feed(work, drafts) for work, drafts in zip(plan.works, proposal.tokens, strict=True)]
            logits = self._target.forward(feeds)
            for sequence, feed in zip(plan.sequences, feeds, strict=True):
                sequence.target.advance(feed.kv_len)
            self._proposers.observe(plan.sequences, feeds)
        with watch.phase("verify"):
            entries = zip(plan.works, proposal.tokens, proposal.draft_probs, strict=True)
            fed = [VerifyInput(work.sequence, drafts, probs) for work, drafts, probs in entries if work.reaches_end]
            return verify_rows(fed, _without_prompt_rows(plan, feeds, logits))

    def _feed(self, work: Work, drafts: tuple[int, ...]) -> Feed:
        """I2: the planned part of what the target has not been fed, and the drafts."""
        start, tokens = work.span.start, [*work.sequence.tokens[work.span.start : work.span.stop], *drafts]
        num_logits = len(drafts) + 1 if work.reaches_end else 0
        if work.sequence.wants_prompt_logprobs:
            num_logits = len(tokens)
        cursor = work.sequence.target
        state = cursor.span(start, start + len(tokens), work.length, self._page_size)
        adapter = 0 if work.sequence.adapter is None else work.sequence.adapter.number
        return Feed(tokens, start, cursor.page_table, num_logits, cursor.table, state, adapter)


def _take_back(plan: StepPlan) -> None:
    """Put the cursors back to where the plan began. Rows beyond are stale (I4); the draft's cursor drops its drafts."""
    for work in plan.works:
        work.sequence.target.kv_len = work.span.start
        work.sequence.rollback_drafts(work.length)


def _without_prompt_rows(plan: StepPlan, feeds: list[Feed], logits: Tensor) -> Tensor:
    """The rows that decide a token. The other rows are of prompts with `prompt_logprobs`, which are recorded here."""
    if not any(work.sequence.wants_prompt_logprobs for work in plan.works):
        return logits
    deciding: list[int] = []
    first = 0
    for work, feed in zip(plan.works, feeds, strict=True):
        num_prompt_rows = 0
        if work.sequence.wants_prompt_logprobs:
            num_prompt_rows = len(work.span) - work.reaches_end
            record_prompt(work.sequence, work.span.start, logits[first : first + num_prompt_rows])
        deciding += range(first + num_prompt_rows, first + feed.num_logits)
        first += feed.num_logits
    return logits[torch.tensor(deciding, dtype=torch.int64, device=logits.device)]
