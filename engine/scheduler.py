"""Who runs, who holds which pages, and who feeds which tokens next. Knows no model, no clock, no tensor.

Sequences that run are kept in the order of their admission. The oldest are served first; when pages run out
the newest gives its own up and waits at the front, to be recomputed later with the same tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, replace

from engine.control.controller import Control, FixedK, levelled
from engine.control.prefill_budget import PrefillBudget
from engine.control.speedup import Speedup
from engine.kv.pages import PagePool
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
    on_device: tuple[Work, ...] = ()  # of those who decode in a round on the device
    num_preempted: int = 0
    prefix_lookups: int = 0  # tokens of the prompts admitted for it
    prefix_hits: int = 0

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
        target_pool: PagePool,
        draft_pool: PagePool | None,
        max_batch_size: int,
        max_batch_tokens: int,
        draft_kv_users: frozenset[str] = frozenset(),  # names of the proposers that need draft pages
        draft_kv_sharers: frozenset[str] = frozenset(),  # and of those whose pages the prefix cache may keep
        control: Control | None = None,  # default: as many drafts as each may have
        round_control: Control | None = None,  # the same of rounds on the device, which cost otherwise
        prefill: PrefillBudget | None = None,  # default: a step may take as long as it does
    ) -> None:
        self.control: Control = control or FixedK()
        self.round_control: Control = round_control or FixedK()
        self.target_pool, self.draft_pool = target_pool, draft_pool
        self._draft_kv_users, self._draft_kv_sharers = draft_kv_users, draft_kv_sharers
        self._max_batch_size, self._max_batch_tokens = max_batch_size, max_batch_tokens
        self.prefill = prefill or PrefillBudget()
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self._siblings: dict[Sequence, tuple[Sequence, ...]] = {}  # by the one that feeds their prompt for them
        self._prefix_lookups = self._prefix_hits = 0  # tokens, since the last plan

    @property
    def sequences(self) -> list[Sequence]:
        """All that are not over."""
        return [*self.running, *self.waiting, *(s for siblings in self._siblings.values() for s in siblings)]

    @property
    def num_waiting(self) -> int:
        """Those that do not run."""
        return len(self.sequences) - len(self.running)

    @property
    def has_room(self) -> bool:
        """Whether one more sequence would start with the next step, those that wait already counted."""
        return len(self.running) + len(self.waiting) < self._max_batch_size and self.num_spare > 0

    @property
    def num_spare(self) -> int:
        """Pages that are free and not promised to those who wait."""
        promised = sum(self.target_pool.pages_for(len(sequence.tokens)) for sequence in self.waiting)
        return self.target_pool.num_free - promised

    @property
    def gain(self) -> float:
        """Tokens per second of the last steps over what plain decoding would have made, as far as known."""
        return Speedup.ratio_of(self.control.gain, self.round_control.gain)

    def control_of(self, sequence: Sequence) -> Control:
        """Who chooses how many drafts it gets."""
        return self.round_control if sequence.on_device else self.control

    def add(self, first: Sequence, *siblings: Sequence) -> None:
        """Wait for a place, first come, first served. `siblings` have the same prompt and wait until it is fed."""
        self.waiting.append(first)
        if siblings:
            self._siblings[first] = siblings

    def remove(self, sequence: Sequence, *, trust: bool = True) -> None:
        """Forget a sequence, wherever it stands, and free its pages now; unless trusted, nobody begins with them."""
        for control in (self.control, self.round_control):
            control.forget(sequence)
        if not trust:
            self.target_pool.forget(sequence.target)
        for first, siblings in self._siblings.items():
            if sequence in siblings:
                self._siblings[first] = tuple(s for s in siblings if s is not sequence)
                return
        (self.running if sequence in self.running else self.waiting).remove(sequence)
        self._release(sequence)

    def admit(self) -> None:
        """Let waiting sequences run while there are places, and pages for all that they have to feed."""
        for sequence in self.running:
            self._share(sequence)
        self._let_siblings_wait()
        while self.waiting and len(self.running) < self._max_batch_size:
            sequence = self.waiting[0]
            found = self._find(sequence)
            fresh = self.target_pool.pages_for(len(sequence.tokens)) - len(found)
            if fresh + self.target_pool.num_kept(found) + self._num_growing() > self.target_pool.num_free:
                return  # in order: a short one does not overtake, or a long one might wait for ever
            self._adopt(sequence, found)
            self.target_pool.reserve(sequence.target, len(sequence.tokens))
            self._adopt_draft(sequence)  # now, so that control knows what drafting would cost
            self.running.append(self.waiting.popleft())

    def _let_siblings_wait(self) -> None:
        """Siblings of a fed prompt, or of one that is over, go to the front: they need little more than a place."""
        for first in list(self._siblings):
            if first.num_generated or first not in (*self.running, *self.waiting):
                self.waiting.extendleft(reversed(self._siblings.pop(first)))

    def _find(self, sequence: Sequence) -> list[int]:
        """Pages of the prefix cache to begin with; none where every prompt position has to be seen."""
        if sequence.wants_prompt_logprobs:
            return []
        sequence.target.table = sequence.target.table_for(len(sequence.tokens))
        return self.target_pool.find(sequence.tokens, _target_salt(sequence))

    def _adopt(self, sequence: Sequence, pages: list[int]) -> None:
        self.target_pool.adopt(sequence.target, pages)
        if self.target_pool.prefix_cache and not sequence.num_generated:  # what preemption made anew is no hit
            sequence.num_cached = sequence.target.kv_len
            self._prefix_lookups += sequence.prompt_len
            self._prefix_hits += sequence.num_cached

    def _adopt_draft(self, sequence: Sequence) -> None:
        """Begin with what the draft model has read of the same text for others."""
        if self.draft_pool is None or sequence.draft.page_table or not sequence.speculation.num_draft_tokens:
            return
        if sequence.speculation.proposer in self._draft_kv_sharers:
            self.draft_pool.adopt(sequence.draft, self.draft_pool.find(sequence.tokens, _draft_salt(sequence)))

    def _share(self, sequence: Sequence) -> None:
        """Tell the prefix caches what this sequence has fed."""
        self.target_pool.share(sequence.target, sequence.tokens, _target_salt(sequence))
        if self.draft_pool is not None and sequence.speculation.proposer in self._draft_kv_sharers:
            self.draft_pool.share(sequence.draft, sequence.tokens, _draft_salt(sequence))

    def _num_growing(self) -> int:
        """Running sequences that will ask for another page: one is kept for each, or admission would preempt them."""
        return sum(self.target_pool.pages_for(s.max_len) > len(s.target.page_table) for s in self.running)

    def plan(self) -> StepPlan:
        """Every running sequence feeds its newest token; prompts share what is left of the budget; drafts the rest.

        A prompt token is worth one token of work done, a draft its chance of being accepted: prompts go first.
        """
        before = len(self.waiting)
        self._renew_outgrown()
        both = [Work.feeding(s, 1) for s in self._with_pages() if s.todo == 1]
        steady = [work for work in both if not work.sequence.on_device]
        budget = self._max_batch_tokens - len(steady)
        fitting = self.prefill.tokens(len(both), alone=len(self.running) == 1)
        chunks = list(self._chunks(int(min(budget, fitting))))
        prompt_rows = sum(len(work.span) for work in chunks)
        self.prefill.spend(prompt_rows)
        lookups, hits, self._prefix_lookups, self._prefix_hits = self._prefix_lookups, self._prefix_hits, 0, 0
        works = (*self._with_drafts(steady, budget - prompt_rows, prompt_rows), *chunks)
        on_device = tuple(self._for_round([work for work in both if work.sequence.on_device]))
        return StepPlan(works, on_device, len(self.waiting) - before, lookups, hits)

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
            if self.target_pool.reserve(sequence.target, _reach(sequence, 0)):
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

    def _with_drafts(self, steady: list[Work], budget: int, prompt_rows: int) -> Iterator[Work]:
        """Add as many drafts as control chooses within the budget and free pages hold; nobody is preempted."""
        sequences = [work.sequence for work in steady]
        chosen = self.control.choose(sequences, [self._most_drafts(s) for s in sequences], budget, prompt_rows)
        return self._with_room(steady, chosen)

    def _for_round(self, works: list[Work]) -> Iterator[Work]:
        """The same for a round on the device: a pass of its own, with a budget of its own."""
        sequences = [work.sequence for work in works]
        limits = [self._most_drafts(s) for s in sequences]
        chosen = self.round_control.choose(sequences, limits, self._max_batch_tokens - len(works), 0) if works else []
        return self._with_room(works, levelled(sequences, limits, chosen))

    def _with_room(self, works: list[Work], chosen: list[int]) -> Iterator[Work]:
        """As many drafts as were chosen, or none where pages are missing."""
        for work, num_draft in zip(works, chosen, strict=True):
            if num_draft and self._reserve_drafts(work.sequence, num_draft):
                yield replace(work, num_draft=num_draft)
            else:
                yield work

    @staticmethod
    def _most_drafts(sequence: Sequence) -> int:
        """Most K for this step: a draft that could not be emitted before `max_len` is never wanted.

        Nor one beyond a change of rotary table: every row of a verification is of one table.
        """
        length = len(sequence.tokens)
        before_border = min(cursor.room_before_border(length) for cursor in (sequence.target, sequence.draft))
        return max(0, min(sequence.speculation.num_draft_tokens, sequence.max_len - length - 1, before_border))

    def _reserve_drafts(self, sequence: Sequence, num_draft: int) -> bool:
        length = _reach(sequence, num_draft)
        if not self.target_pool.reserve(sequence.target, length):
            return False
        if self.draft_pool is None or sequence.speculation.proposer not in self._draft_kv_users:
            return True
        self._adopt_draft(sequence)
        # May fail although the pools are of one size: target pages that several share are fewer than their draft's.
        return self.draft_pool.reserve(sequence.draft, length)

    def _release(self, sequence: Sequence) -> None:
        self._share(sequence)
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
        everyone = self.sequences
        self.target_pool.check_invariants(s.target for s in everyone)
        if self.draft_pool is not None:
            self.draft_pool.check_invariants(s.draft for s in everyone)


def _reach(sequence: Sequence, num_draft: int) -> int:
    """Positions that a pass with so many drafts may write and that may count, whatever is in flight turns out to be."""
    return min(sequence.max_len, len(sequence.tokens) + sequence.in_flight + num_draft)


def _target_salt(sequence: Sequence) -> Hashable:
    """What must be equal for K/V to be the same, besides tokens: the tenant's salt and the rotary table."""
    return sequence.request.cache_salt, sequence.target.table


def _draft_salt(sequence: Sequence) -> Hashable:
    """Proposers have an arena each and share the pages of all: one's K/V means nothing to another."""
    return sequence.request.cache_salt, sequence.draft.table, sequence.speculation.proposer
