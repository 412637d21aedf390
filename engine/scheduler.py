"""Schedules sequences: which run, which pages they hold, and which tokens they feed next. Uses no tensors.

Running sequences are kept in the order of their admission. The oldest are served first. When pages run out, the newest
sequence of the caller with the largest share gives up its pages and waits at the front of the queue; its tokens are
recomputed later. It also gives up its place when a caller with a smaller share waits for one.
"""

from __future__ import annotations

import logging
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from types import MappingProxyType

from pilotfish.engine.control.controller import Control, Speedup, levelled
from pilotfish.engine.control.prefill_budget import PrefillBudget
from pilotfish.engine.kv.pages import PagePool
from pilotfish.engine.params import MAX_PREDICTED_DRAFTS
from pilotfish.engine.step import Step, Work
from pilotfish.engine.turns import TURN, Shares, equal_parts, in_step, in_turn, most_masked
from pilotfish.engine.types import KVCursor, Sequence

log = logging.getLogger(__name__)

_MOST_FOLLOWED = 1024  # tokens per step, over all outputs whose predictions are not followed up yet


class Scheduler:
    """Waiting and running sequences, and the pages of the target and of each proposer with K/V."""

    def __init__(
        self,
        target_pool: PagePool,
        max_batch_size: int,
        max_batch_tokens: int,
        draft_pools: Mapping[str, PagePool] = MappingProxyType({}),  # by proposer with K/V: pages of its arena
        draft_kv_sharers: frozenset[str] = frozenset(),  # those whose pages the prefix cache may keep
        control: Control | None = None,  # default: the maximum number of drafts
        round_control: Control | None = None,  # for rounds on the device, whose costs differ
        prefill: PrefillBudget | None = None,  # default: no time limit of a step
        max_drafts: int | None = None,  # of a step; default: limited by the batch only
        # Finds the looked-up drafts of a sequence, at most the given number; None if its proposer makes them.
        find_drafts: Callable[[Sequence, int], tuple[int, ...] | None] = lambda *_: None,
    ) -> None:
        self.control: Control = control or Control()
        self.round_control: Control = round_control or Control()
        self.target_pool, self.draft_pools, self._draft_kv_sharers = target_pool, draft_pools, draft_kv_sharers
        self._max_batch_size, self._max_batch_tokens = max_batch_size, max_batch_tokens
        self._max_drafts = max_batch_tokens if max_drafts is None else max_drafts
        self.prefill, self._find_drafts = prefill or PrefillBudget(), find_drafts
        self.prefill.times = self.control.times
        pools = [target_pool, *draft_pools.values()]
        self._most_logged = [pool.most_drafts for pool in pools if pool.most_drafts is not None]
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self._siblings: dict[Sequence, tuple[Sequence, ...]] = {}  # by the sequence that feeds their prompt
        self.shares = Shares()
        self._counts = Counter[str]()  # counters for the next plan

    @property
    def sequences(self) -> list[Sequence]:
        """All live sequences."""
        return [*self.running, *self.waiting, *(s for siblings in self._siblings.values() for s in siblings)]

    @property
    def num_waiting(self) -> int:
        """Sequences that are not running."""
        return len(self.sequences) - len(self.running)

    @property
    def has_room(self) -> bool:
        """Whether another sequence would start with the next step, after those that already wait."""
        has_place = len(self.running) + len(self.waiting) < self._max_batch_size and self.target_pool.has_slots
        return has_place and self.num_spare > 0

    @property
    def num_spare(self) -> int:
        """Free pages that no waiting sequence will take."""
        promised = sum(self.target_pool.pages_for(len(sequence.tokens)) for sequence in self.waiting)
        return self.target_pool.num_free - promised

    @property
    def gain(self) -> float:
        """Estimated tokens per second in recent steps relative to plain decoding."""
        return Speedup.ratio_of(self.control.gain, self.round_control.gain)

    @property
    def decode_seconds(self) -> tuple[float, ...]:
        """Seconds of a step without drafts with 1, 2, 4, ... decoding sequences; empty if none was measured."""
        both = (self.control.times, self.round_control.times)
        return max(both, key=lambda times: times.target.count).by_batch_size(self._max_batch_size)

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Context without callers: sequences are not charged to shares, and prefix caches are not used."""
        assert not self.sequences, "not idle"
        pools = [self.target_pool, *self.draft_pools.values()]
        shares, caches = self.shares, [pool.prefix_cache for pool in pools]
        self.shares = Shares()
        try:
            for pool in pools:
                pool.prefix_cache = False
            yield
        finally:
            self.shares = shares
            for pool, had in zip(pools, caches, strict=True):
                pool.prefix_cache = had

    def add(self, first: Sequence, *siblings: Sequence) -> None:
        """Queue a sequence, in order of arrival per caller. `siblings` have the same prompt and wait for it."""
        caller = first.request.caller
        if not any(s.request.caller == caller for s in self.waiting):  # one caller may have thousands waiting
            present = {s.request.caller for s in self.sequences} - {caller}
            self.shares.join(caller, self._heads().keys(), present)
        self.waiting.append(first)
        if siblings:
            self._siblings[first] = siblings

    def remove(self, sequence: Sequence, *, trust: bool = True) -> None:
        """Remove a sequence and free its pages; without `trust` also remove them from the prefix cache."""
        for control in (self.control, self.round_control):
            control.end(sequence)
        if not trust:
            self.target_pool.forget(sequence.target)
        for first, siblings in self._siblings.items():
            if sequence in siblings:
                self._siblings[first] = tuple(s for s in siblings if s is not sequence)
                return
        if sequence in self.running:
            self._stop(sequence)
        else:
            self.waiting.remove(sequence)

    def admit(self) -> None:
        """Start waiting sequences while there are places, and pages for all tokens to be fed."""
        for sequence in self.running:
            self._share(sequence)
        self._queue_siblings()
        while self.waiting:
            heads = self._heads()
            sequence = heads[min(heads, key=self.shares.rank)]
            found = self._room_for(sequence)
            if found is None:
                found = self._displace(sequence)
            if found is None:
                return  # in order: if short sequences overtook, a long one could starve
            self._adopt(sequence, found)
            self.target_pool.reserve(sequence.target, len(sequence.tokens))
            for name in sequence.drafters:  # before planning, so that control includes its cost
                self._adopt_draft(sequence, name)
            self.waiting.remove(sequence)
            self.running.append(sequence)
            self.shares.place(sequence.request.caller, 1)
            sequence.num_started = len(sequence.tokens)

    def _heads(self) -> dict[str, Sequence]:
        """The first waiting sequence of each caller, in queue order."""
        heads = dict[str, Sequence]()
        for sequence in self.waiting:
            heads.setdefault(sequence.request.caller, sequence)
        return heads

    def _room_for(self, sequence: Sequence) -> list[int] | None:
        """The cached pages of a sequence's beginning, if there is a place and pages for the rest; else None."""
        if len(self.running) == self._max_batch_size or not self.target_pool.has_slots:
            return None
        found = self._find(sequence)
        fresh = self.target_pool.pages_for(len(sequence.tokens)) - len(found)
        # A page is kept free for each running sequence that will need one; otherwise admission would cause preemptions.
        growing = sum(self.target_pool.pages_for(s.max_len) > len(s.target.page_table) for s in self.running)
        needed = fresh + self.target_pool.num_kept(found) + growing
        return found if needed <= self.target_pool.num_free else None

    def _displace(self, sequence: Sequence) -> list[int] | None:
        """Preempt sequences of callers with larger shares until there is room for this one; returns as `_room_for`."""
        caller, shares = sequence.request.caller, self.shares
        while self.running and shares.may_displace(caller, shares.largest):
            yielding = self._yielding(shares.largest, most_left=shares.places(caller))
            if yielding is None:
                return None
            self._preempt(yielding)
            found = self._room_for(sequence)
            if found is not None:
                return found
        return None

    def _yielding(self, caller: str, most_left: int) -> Sequence | None:
        """The newest sequence of a caller whose progress since its start exceeds the tokens to be recomputed.

        So its sequences are preempted in turn. If none qualifies, one is preempted if more than `most_left` remain.
        """
        mine = [s for s in reversed(self.running) if s.request.caller == caller]
        rested = (s for s in mine if len(s.tokens) - s.num_started >= max(TURN, s.num_started // 8))
        return next(rested, mine[0] if len(mine) - 1 > most_left else None)

    def _queue_siblings(self) -> None:
        """Move siblings of a fed (or ended) sequence to the front of the queue: their prompt is now cached."""
        for first in list(self._siblings):
            if first.num_generated or first not in (*self.running, *self.waiting):
                self.waiting.extendleft(reversed(self._siblings.pop(first)))

    def _find(self, sequence: Sequence) -> list[int]:
        """The initial pages from the prefix cache; none if log-probabilities need every prompt position."""
        if sequence.wants_prompt_logprobs:
            return []
        sequence.target.table = sequence.target.table_for(len(sequence.tokens))
        return self.target_pool.find(sequence.tokens, _target_salt(sequence))

    def _adopt(self, sequence: Sequence, pages: list[int]) -> None:
        self.target_pool.adopt(sequence.target, pages)
        sequence.num_charged = max(sequence.num_charged, sequence.target.kv_len)
        if self.target_pool.prefix_cache and not sequence.num_generated:  # recomputation is not a hit
            sequence.num_cached = sequence.target.kv_len
            self._counts.update(prefix_lookups=sequence.prompt_len, prefix_hits=sequence.num_cached)

    def _adopt_draft(self, sequence: Sequence, name: str) -> None:
        """Start with a draft model's cached K/V of the same text."""
        if name in self._draft_kv_sharers and sequence.speculation.num_draft_tokens:
            pool, cursor = self.draft_pools[name], sequence.draft_of(name)
            if not cursor.page_table:
                pool.adopt(cursor, pool.find(sequence.tokens, _draft_salt(sequence, cursor)))

    def _share(self, sequence: Sequence) -> None:
        """Enter this sequence's pages into the prefix caches."""
        self.target_pool.share(sequence.target, sequence.tokens, _target_salt(sequence))
        for name, cursor in sequence.drafts.items():
            if name in self._draft_kv_sharers:
                self.draft_pools[name].share(cursor, sequence.tokens, _draft_salt(sequence, cursor))

    def plan(self) -> Step:
        """Running sequences feed their newest token; prompts share the remaining budget, drafts get the rest.

        Prompts precede drafts: a prompt token always counts, a draft only with its probability of acceptance.
        """
        self._renew_outgrown()
        _align_predictions(self.running)
        self._reserve_pages()
        running, is_short = in_step(self.running, self.shares, self.prefill, self._max_batch_tokens)
        both = [s for s in running if s.todo == 1 and not s.grammar_lag]
        steady = [Work.feeding(s, 1) for s in in_turn([s for s in both if not s.on_device])]
        budget = self._max_batch_tokens - len(steady)
        fitting = self.prefill.tokens([len(s.tokens) for s in both], alone=len(running) == 1, short=is_short)
        chunks = list(_chunks(running, int(min(budget, fitting))))
        prompt_rows = sum(len(work.span) for work in chunks)
        self.prefill.spend(prompt_rows)
        # If sequences are left out, their rows would be more useful than drafts.
        spare = budget - prompt_rows if len(running) == len(self.running) else 0
        works = (*self._with_drafts(steady, spare, prompt_rows), *chunks)
        on_device = tuple(self._for_round([Work.feeding(s, 1) for s in both if s.on_device]))
        counts, self._counts = self._counts, Counter()
        for work in (*works, *on_device):  # callers are charged for new tokens, not for recomputed ones
            sequence, stop = work.sequence, work.span.stop
            self.shares.charge(sequence.request.caller, max(0, stop - sequence.num_charged))
            sequence.num_charged = max(sequence.num_charged, stop)
        return Step(works, on_device, counts)

    def _renew_outgrown(self) -> None:
        """Release K/V computed with another rotary table than the length now requires; all is recomputed."""
        for sequence in self.running:
            for pool, cursor in ((self.target_pool, sequence.target), *self._drafts_of(sequence)):
                if cursor.is_outgrown(len(sequence.tokens)):
                    pool.release(cursor)
                    cursor.table = cursor.table_for(len(sequence.tokens))

    def _drafts_of(self, sequence: Sequence) -> Iterator[tuple[PagePool, KVCursor]]:
        """The cursors of a sequence's draft models and heads, with their page pools."""
        return ((self.draft_pools[name], cursor) for name, cursor in sequence.drafts.items())

    def _reserve_pages(self) -> None:
        """Reserve pages for the tokens of each running sequence, oldest first.

        If pages are missing, preempt the newest sequence of the caller with the largest share.
        """
        for sequence in list(self.running):
            while sequence in self.running and not self.target_pool.reserve(sequence.target, _reach(sequence, 0)):
                self._preempt(next(s for s in reversed(self.running) if s.request.caller == self.shares.largest))

    def _preempt(self, sequence: Sequence) -> None:
        self._stop(sequence)
        self.waiting.appendleft(sequence)
        self._counts["preempted"] += 1

    def _stop(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._release(sequence)
        self.shares.place(sequence.request.caller, -1)

    def _with_drafts(self, steady: list[Work], budget: int, prompt_rows: int) -> Iterator[Work]:
        """Add the drafts chosen by control, within the budget and free pages; drafts preempt no sequence."""
        sequences = [work.sequence for work in steady]
        share = self._max_drafts // max(1, len(sequences))  # a prediction may use more than K
        limits = [
            min(self._most_drafts(s), most, max(share, s.speculation.num_draft_tokens))
            for s, most in zip(sequences, most_masked(sequences), strict=True)
        ]
        chosen = self.control.choose(sequences, limits, budget, prompt_rows)
        return self._with_room(steady, chosen)

    def _for_round(self, works: list[Work]) -> Iterator[Work]:
        """The same for a round on the device, a separate pass with its own budget."""
        sequences = [work.sequence for work in works]
        limits = [self._most_drafts(s) for s in sequences]
        chosen = self.round_control.choose(sequences, limits, self._max_batch_tokens - len(works), 0) if works else []
        return self._with_room(works, levelled(sequences, limits, chosen))

    def _with_room(self, works: list[Work], chosen: list[int]) -> Iterator[Work]:
        """Set the drafts of each work, as chosen or found by its proposer; none if pages are missing."""
        for work, num_draft in zip(works, chosen, strict=True):
            sequence = work.sequence
            found = self._find_drafts(sequence, num_draft) if num_draft and not sequence.on_device else None
            most = num_draft if found is None else len(found)
            fits = most > 0 and self._reserve_drafts(sequence, most)
            yield replace(work, num_draft=most, drafts=found or ()) if fits else work

    def _most_drafts(self, sequence: Sequence) -> int:
        """Maximum K in this step: drafts beyond `max_len` could not be emitted.

        Also limited by a change of rotary table, because all rows of one verification use the same table, and by the
        size of the state log.
        """
        if sequence.fault is not None:  # the same drafts would fail again
            return 0
        length = len(sequence.tokens)
        before_border = min(cursor.room_before_border(length) for cursor in (sequence.target, sequence.draft))
        most = min(sequence.most_drafts, sequence.max_len - length - 1, before_border, *self._most_logged)
        return max(0, most)

    def _reserve_drafts(self, sequence: Sequence, num_draft: int) -> bool:
        length = _reach(sequence, num_draft)
        if not self.target_pool.reserve(sequence.target, length):
            return False
        name = sequence.drafter
        if name not in self.draft_pools:
            return True
        self._adopt_draft(sequence, name)
        sequence.turn_to(name)
        # May fail although the pools have equal sizes, because target pages can be shared but draft pages cannot.
        return self.draft_pools[name].reserve(sequence.draft, length)

    def _release(self, sequence: Sequence) -> None:
        self._share(sequence)
        self.target_pool.release(sequence.target)
        for pool, cursor in self._drafts_of(sequence):
            pool.release(cursor)

    def check_invariants(self) -> None:
        """Check I1, and I5 for the target and all proposers."""
        for sequence in self.running:
            for cursor in (sequence.target, *sequence.drafts.values()):
                assert cursor.kv_len <= len(sequence.tokens) - 1, "I1: the newest token has been fed"
        for sequence in self.waiting:
            assert not sequence.target.page_table, "a waiting sequence holds pages"
        everyone = self.sequences
        self.target_pool.check_invariants(s.target for s in everyone)
        for name, pool in self.draft_pools.items():
            pool.check_invariants(s.drafts[name] for s in everyone if name in s.drafts)


def _chunks(running: list[Sequence], budget: int) -> Iterator[Work]:
    """Chunks of prompts and recomputed tokens, divided equally among callers and their sequences, shortest first."""
    by_caller: dict[str, list[Sequence]] = defaultdict(list)
    for sequence in sorted((s for s in running if s.is_behind), key=lambda s: s.todo):
        by_caller[sequence.request.caller].append(sequence)
    groups = sorted(by_caller.values(), key=_todo)
    for group, part in zip(groups, equal_parts([_todo(group) for group in groups], budget), strict=True):
        for sequence, size in zip(group, equal_parts([s.todo for s in group], part), strict=True):
            if size:
                yield Work.feeding(sequence, size)


def _todo(sequences: Iterable[Sequence]) -> int:
    return sum(sequence.todo for sequence in sequences)


def _align_predictions(sequences: list[Sequence]) -> None:
    """Align each output with its prediction; a resumed one takes several steps."""
    predicted = [(s, s.alignment) for s in sequences if s.alignment is not None]
    for sequence, alignment in predicted:
        most = max(MAX_PREDICTED_DRAFTS + 1, _MOST_FOLLOWED // len(predicted))
        try:
            is_current = alignment.follow(sequence.tokens, sequence.prompt_len, most)
            sequence.predicted = alignment.drafts(sequence.most_predicted) if is_current else ()
        except Exception:
            log.exception("request %s: its prediction is no longer used", sequence.request_id)
            sequence.alignment, sequence.predicted = None, ()


def _reach(sequence: Sequence, num_draft: int) -> int:
    """Positions that a pass with `num_draft` drafts may write, including the results of rounds in flight."""
    return min(sequence.max_len, len(sequence.tokens) + sequence.in_flight + num_draft)


def _target_salt(sequence: Sequence) -> Hashable:
    """The salt of the target's K/V: the tenant's salt, the rotary table, and the adapter's name and weights."""
    salt, adapter = (sequence.request.cache_salt, sequence.target.table), sequence.adapter
    return salt if adapter is None else (*salt, (adapter.name, adapter.fingerprint))


def _draft_salt(sequence: Sequence, cursor: KVCursor) -> Hashable:
    """The salt of a draft model's K/V, without adapters, which draft models do not have."""
    return sequence.request.cache_salt, cursor.table
