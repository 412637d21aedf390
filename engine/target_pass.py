"""The target's pass over a plan: all sequences together or, if that fails, one at a time to find the one at fault.

A pass can be repeated: its cursors are put back, and rows that are written twice hold the same values.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence as Seq
from dataclasses import replace

import torch
from torch import Tensor

from pilotfish.engine.errors import RankLost
from pilotfish.engine.kv.batch import Feed
from pilotfish.engine.model.runner import Runner
from pilotfish.engine.proposers import Proposers
from pilotfish.engine.sampling.logprobs import record_prompt
from pilotfish.engine.sampling.verification import verify_rows
from pilotfish.engine.stats import Stopwatch
from pilotfish.engine.step import Step, Work
from pilotfish.engine.types import Sequence

log = logging.getLogger(__name__)


class TargetPass:
    """Feeds the target and verifies its rows."""

    def __init__(self, target: Runner, proposers: Proposers, page_size: int | None = None) -> None:
        self._target, self._proposers, self._page_size = target, proposers, page_size

    def run(self, step: Step, watch: Stopwatch) -> Step:
        """Feed and verify all sequences of a step. After an exception feed each alone, to find the one at fault."""
        try:
            return replace(step, works=tuple(self._pass(step.works, watch)))
        except RankLost:
            raise  # each of them alone would raise it too
        except Exception as error:
            log.exception("a pass over %d sequences failed; retrying each alone", len(step.works))
            return self._each_alone(step, error, watch)

    def _each_alone(self, step: Step, error: Exception, watch: Stopwatch) -> Step:
        """Feed each sequence alone, without drafts: one that fails again is at fault; the others lose nothing."""
        _take_back(step.works)
        passed, faulty = list[Work](), list[Sequence]()
        for work in step.works:
            alone = [replace(work, num_draft=0, drafts=(), draft_probs=None)]
            try:
                passed += self._pass(alone, watch)
            except Exception:
                log.exception("request %s failed when fed alone; it ends with an error", work.sequence.request_id)
                _take_back(alone)
                faulty.append(work.sequence)
        return replace(step, works=tuple(passed), faulty=tuple(faulty), error=error)

    def self_test(self, sequence: Sequence) -> None:
        """Feed all tokens of a sequence that belongs to no caller; raises what the pass raises."""
        self._pass([Work.feeding(sequence, sequence.todo)], Stopwatch(lambda: 0.0))

    def _pass(self, works: Seq[Work], watch: Stopwatch) -> list[Work]:
        with watch.phase("forward"):
            feeds = [self._feed(work) for work in works]
            logits = self._target.forward(feeds)
            for work, feed in zip(works, feeds, strict=True):
                work.sequence.target.advance(feed.kv_len)
            self._proposers.observe(works, feeds)
        with watch.phase("verify"):
            logits = _without_prompt_rows(works, feeds, logits)
            return verify_rows(works, logits)

    def _feed(self, work: Work) -> Feed:
        """I2: the planned part of what the target has not been fed, and the drafts."""
        start, sequence = work.span.start, work.sequence
        tokens = [*sequence.tokens[start : work.span.stop], *work.drafts]
        num_logits = len(tokens) if sequence.wants_prompt_logprobs else work.num_rows
        state = sequence.target.span(start, start + len(tokens), work.length, self._page_size)
        adapter = 0 if sequence.adapter is None else sequence.adapter.number
        return Feed(tokens, start, sequence.target.page_table, num_logits, sequence.target.table, state, adapter)


def _take_back(works: Seq[Work]) -> None:
    """Put the cursors back to where the plan began. Rows beyond are stale (I4); the draft's cursor drops its drafts."""
    for work in works:
        work.sequence.target.kv_len = work.span.start
        work.sequence.rollback_drafts(work.length)


def _without_prompt_rows(works: Seq[Work], feeds: list[Feed], logits: Tensor) -> Tensor:
    """The rows that decide a token. The other rows are of prompts with `prompt_logprobs`, which are recorded here."""
    if not any(work.sequence.wants_prompt_logprobs for work in works):
        return logits
    deciding: list[int] = []
    first = 0
    for work, feed in zip(works, feeds, strict=True):
        num_prompt_rows = 0
        if work.sequence.wants_prompt_logprobs:
            num_prompt_rows = len(work.span) - work.reaches_end
            record_prompt(work.sequence, work.span.start, logits[first : first + num_prompt_rows])
        deciding += range(first + num_prompt_rows, first + feed.num_logits)
        first += feed.num_logits
    return logits[torch.tensor(deciding, dtype=torch.int64, device=logits.device)]
