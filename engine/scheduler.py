"""Who runs, who holds which pages, and who feeds which tokens next. Knows no model, no clock, no tensor.

Sequences that run are kept in the order of their admission. The oldest are served first; when pages run out
the newest gives its own up and waits at the front, to be recomputed later with the same tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace

from engine.kv import BlockPool
from engine.types import Sequence


@dataclass(frozen=True, slots=True)
class Work:
    """One sequence's part in a step: the target is fed its tokens at `span`, then up to `num_draft` drafts."""

    sequence: Sequence
    span: range  # positions kv_len .. stop
    length: int  # tokens of the sequence when this was planned
    num_draft: int = 0

    @classmethod
    def feeding(cls, sequence: Sequence, num_tokens: int) -> Work:
        """Feed the next `num_tokens` that the target has not seen."""
        start = sequence.target.kv_len
        return cls(sequence, range(start, start + num_tokens), len(sequence.tokens))

    @property
    def reaches_end(self) -> bool:
        """Whether the newest token is fed, so that a next one comes out."""
        return self.span.stop == self.length


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What the next step does, one entry per sequence that takes part."""

    works: tuple[Work, ...] = ()
    num_preempted: int = 0

    @property
    def sequences(self) -> list[Sequence]:
        """Who takes part."""
        return [work.sequence for work in self.works]

    @property
    def num_draft_each(self) -> list[int]:
        """K of each."""
        return [work.num_draft for work in self.works]


class Scheduler:
    """Waiting and running sequences, and the pages of both models."""

    def __init__(
        self,
        target_pool: BlockPool,
        draft_pool: BlockPool | None,
        max_batch_size: int,
        max_batch_tokens: int,
        draft_kv_users: frozenset[str] = frozenset(),  # names of the proposers that need draft pages
    ) -> None:
        self.target_pool, self.draft_pool, self._draft_kv_users = target_pool, draft_pool, draft_kv_users
        self._max_batch_size, self._max_batch_tokens = max_batch_size, max_batch_tokens
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []

    @property
    def has_room(self) -> bool:
        """Whether one more sequence would start with the next step, those that wait already counted."""
        promised = sum(self.target_pool.pages_for(len(sequence.tokens)) for sequence in self.waiting)
        return len(self.running) + len(self.waiting) < self._max_batch_size and self.target_pool.num_free > promised

    def add(self, sequence: Sequence) -> None:
        """Wait for a place, first come, first served."""
        self.waiting.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence, wherever it stands, and free its pages now."""
        (self.running if sequence in self.running else self.waiting).remove(sequence)
        self._release(sequence)

    def admit(self) -> None:
        """Let waiting sequences run while there are places, and pages for all that they have to feed."""
        while self.waiting and len(self.running) < self._max_batch_size:
            sequence = self.waiting[0]
            wanted = self.target_pool.pages_for(len(sequence.tokens)) + self._num_growing()
            if wanted > self.target_pool.num_free:
                return  # in order: a short one does not overtake, or a long one might wait for ever
            self.target_pool.reserve(sequence.target, len(sequence.tokens))
            self.running.append(self.waiting.popleft())

    def _num_growing(self) -> int:
        """Running sequences that will ask for another page: one is kept for each, or admission would preempt them."""
        return sum(self.target_pool.pages_for(s.max_len) > len(s.target.page_table) for s in self.running)

    def plan(self) -> StepPlan:
        """Every running sequence feeds its newest token; prompts share what is left of the budget; drafts the rest.

        A prompt token is worth one token of work done, a draft its chance of being accepted: prompts go first.
        """
        before = len(self.waiting)
        self._renew_outgrown()
        steady = [Work.feeding(s, 1) for s in self._with_pages() if s.todo == 1]
        budget = self._max_batch_tokens - len(steady)
        chunks = list(self._chunks(budget))
        budget -= sum(len(work.span) for work in chunks)
        return StepPlan((*self._with_drafts(steady, budget), *chunks), len(self.waiting) - before)

    def _renew_outgrown(self) -> None:
        """Give up K/V made with another rotary table than a sequence's length now asks for: all of it is fed again."""
        for sequence in self.running:
            for pool, cursor in ((self.target_pool, sequence.target), (self.draft_pool, sequence.draft)):
                if pool is not None and cursor.is_outgrown(len(sequence.tokens)):
                    pool.release(cursor)
                    cursor.table = cursor.table_for(len(sequence.tokens))

    def _with_pages(self) -> list[Sequence]:
        """Reserve what each running sequence will feed, oldest first; the newest make room where it must be."""
        position = 0
        while position < len(self.running):
            sequence = self.running[position]
            if self.target_pool.reserve(sequence.target, len(sequence.tokens)):
                position += 1
            else:
                self._preempt(self.running[-1])
        return self.running

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._release(sequence)
        self.waiting.appendleft(sequence)

    def _chunks(self, budget: int) -> Iterator[Work]:
        """Prompts, and what preemption made anew: equal shares, and what short ones leave goes to the longer."""
        hungry = sorted((s for s in self.running if s.todo > 1), key=lambda s: s.todo)
        for i, sequence in enumerate(hungry):
            size = min(sequence.todo, -(-budget // (len(hungry) - i)))
            if size:
                budget -= size
                yield Work.feeding(sequence, size)

    def _with_drafts(self, steady: list[Work], budget: int) -> Iterator[Work]:
        """Add as many drafts as the sequence wants, the budget leaves and free pages hold; nobody is preempted."""
        for work in steady:
            num_draft = min(self._num_draft_wanted(work.sequence), budget)
            if num_draft and self._reserve_drafts(work.sequence, num_draft):
                budget -= num_draft
                yield replace(work, num_draft=num_draft)
            else:
                yield work

    @staticmethod
    def _num_draft_wanted(sequence: Sequence) -> int:
        """K for this step; a draft that could not be emitted before `max_len` is never wanted.

        Nor one beyond a change of rotary table: every row of a verification is of one table.
        """
        length = len(sequence.tokens)
        before_border = min(cursor.room_before_border(length) for cursor in (sequence.target, sequence.draft))
        return max(0, min(sequence.speculation.num_draft_tokens, sequence.max_len - length - 1, before_border))

    def _reserve_drafts(self, sequence: Sequence, num_draft: int) -> bool:
        length = len(sequence.tokens) + num_draft
        if not self.target_pool.reserve(sequence.target, length):
            return False
        if self.draft_pool is None or sequence.speculation.proposer not in self._draft_kv_users:
            return True
        fits = self.draft_pool.reserve(sequence.draft, length)
        assert fits, "both pools are of one size, and a sequence never needs more draft pages than target pages"
        return True

    def _release(self, sequence: Sequence) -> None:
        self.target_pool.release(sequence.target)
        if self.draft_pool is not None:
            self.draft_pool.release(sequence.draft)

    def check_invariants(self) -> None:
        """I1, and I5 for both models."""
        for sequence in self.running:
            for cursor in (sequence.target, sequence.draft):
                assert cursor.kv_len <= len(sequence.tokens) - 1, "I1: the newest token has been fed"
        for sequence in self.waiting:
            assert not sequence.target.page_table, "a waiting sequence holds pages"
        everyone = [*self.running, *self.waiting]
        self.target_pool.check_invariants(s.target for s in everyone)
        if self.draft_pool is not None:
            self.draft_pool.check_invariants(s.draft for s in everyone)
