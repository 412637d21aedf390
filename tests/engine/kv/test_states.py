"""Slots and logs of states: whatever is drafted, taken back, preempted or shared, each pass begins with its state.

The state of a sequence is here the tuple of the tokens that it has consumed, so that a wrong one is seen at once.
"""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pilotfish.engine.kv.pages import PagePool
from pilotfish.engine.kv.states import StatePool
from pilotfish.engine.types import EMPTY_STATE, KVCursor, StateSpan

PAGE, LOG = 4, 3


class Memory:
    """An arena of states that are tuples, with logs of tokens."""

    def __init__(self, num_slots: int) -> None:
        self.state: list[tuple[int, ...]] = [()] * num_slots
        self.log: list[list[int]] = [[0] * LOG for _ in range(num_slots)]

    def run(self, span: StateSpan, start: int, tokens: list[int]) -> tuple[int, ...]:
        """Do what a pass does; return the state before its first token."""
        rows = self.log[span.read][: start - span.base] + tokens
        base = self.state[span.read]
        assert len(base) == span.base
        before = base + tuple(rows[: start - span.base])
        writes = [] if span.snapshot is None else [span.snapshot]
        writes += [(span.write, span.settled)] if span.settled > span.base else []
        for slot, position in writes:
            assert slot != EMPTY_STATE
            self.state[slot] = base + tuple(rows[: position - span.base])
        unsettled = range(span.settled if span.settled > span.base else start, start + len(tokens))
        for position in unsettled:
            self.log[span.write][position - span.settled] = rows[position - span.base]
        return before


class Sequence:
    def __init__(self, prompt: list[int]) -> None:
        self.tokens, self.cursor = prompt, KVCursor()


class States(RuleBasedStateMachine):
    """Three sequences on pages and slots for two; their texts begin alike, so that the prefix cache is used."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(24, PAGE, prefix_cache=True, states=StatePool(9, LOG, snapshots=True))
        self.memory = Memory(9)
        self.sequences = [Sequence([1, 2, 3, 4, 5, 6, 7, 8, 9, 10 + i]) for i in range(3)]

    def _admit(self, one: Sequence) -> bool:
        if one.cursor.page_table:
            return self.pool.reserve(one.cursor, len(one.tokens) + LOG)
        if not self.pool.has_slots:
            return False
        self.pool.adopt(one.cursor, self.pool.find(one.tokens, None))
        return self.pool.reserve(one.cursor, len(one.tokens) + LOG)

    def _feed(self, one: Sequence, tokens: list[int], fails: bool) -> None:
        cursor, start = one.cursor, one.cursor.kv_len
        span = cursor.span(start, start + len(tokens), len(one.tokens), PAGE)
        before = self.memory.run(span, start, tokens)
        assert before == tuple(one.tokens[:start]), "a pass began with the wrong state"
        if not fails:
            cursor.advance(start + len(tokens))

    @rule(who=st.integers(0, 2), size=st.integers(1, 9), fails=st.booleans())
    def chunk(self, who: int, size: int, fails: bool) -> None:
        """Feed a part of what is known; a pass that fails is repeated later."""
        one = self.sequences[who]
        if self._admit(one):
            start = one.cursor.kv_len
            self._feed(one, one.tokens[start : start + size], fails)
            if one.cursor.kv_len == len(one.tokens):
                one.tokens = [*one.tokens, 30]
            one.cursor.rollback(len(one.tokens))
            self.pool.share(one.cursor, one.tokens, None)

    @rule(who=st.integers(0, 2), drafts=st.lists(st.integers(20, 22), max_size=LOG), kept=st.integers(0, LOG))
    def verify(self, who: int, drafts: list[int], kept: int) -> None:
        """Feed the newest token and drafts; some are kept, and one more token comes."""
        one = self.sequences[who]
        if not self._admit(one) or one.cursor.kv_len != len(one.tokens) - 1 or len(one.tokens) > 60:
            return
        self._feed(one, [one.tokens[-1], *drafts], fails=False)
        one.tokens = [*one.tokens, *drafts[:kept], 30]
        one.cursor.rollback(len(one.tokens))
        self.pool.share(one.cursor, one.tokens, None)

    @rule(who=st.integers(0, 2), taken_back=st.integers(1, 3))
    def fail_after_the_pass(self, who: int, taken_back: int) -> None:
        """The pass succeeds, and what comes after it fails: its cursor is put back and the pass is repeated."""
        one = self.sequences[who]
        if self._admit(one) and one.cursor.kv_len < len(one.tokens):
            start = one.cursor.kv_len
            self._feed(one, one.tokens[start : start + taken_back], fails=False)
            one.cursor.kv_len = start
            self._feed(one, one.tokens[start : start + 1], fails=False)
            if one.cursor.kv_len == len(one.tokens):
                one.tokens = [*one.tokens, 30]
            one.cursor.rollback(len(one.tokens))

    @rule(who=st.integers(0, 2))
    def preempt(self, who: int) -> None:
        self.pool.release(self.sequences[who].cursor)

    @rule(who=st.integers(0, 2))
    @precondition(lambda self: any(s.cursor.page_table for s in self.sequences))
    def distrust(self, who: int) -> None:
        """What a faulty sequence wrote is forgotten."""
        one = self.sequences[who]
        self.pool.forget(one.cursor)
        self.pool.release(one.cursor)

    @rule(who=st.integers(0, 2))
    def begin_anew(self, who: int) -> None:
        self.pool.release(self.sequences[who].cursor)
        self.sequences[who] = Sequence([1, 2, 3, 4, 5, 6, 7, 8, 9, 10 + who])

    @invariant()
    def slots_are_conserved(self) -> None:
        self.pool.check_invariants(s.cursor for s in self.sequences)
        assert self.memory.state[EMPTY_STATE] == ()


def test_what_a_failed_pass_wrote_is_kept_for_nobody():
    """Seen by the machine above in one of many runs: the older slot stood at the end of a page, and was written to."""
    machine = States()
    machine.chunk(who=1, size=3, fails=False)
    machine.fail_after_the_pass(who=1, taken_back=1)
    machine.fail_after_the_pass(who=1, taken_back=1)
    machine.chunk(who=1, size=1, fails=True)
    machine.fail_after_the_pass(who=0, taken_back=1)


TestStates = States.TestCase
TestStates.settings = settings(max_examples=60, stateful_step_count=30)


class Drafting(RuleBasedStateMachine):
    """A draft model's cursor: single tokens that may all be taken back, in the slots of one sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(24, PAGE, states=StatePool(3, LOG, snapshots=False))
        self.memory, self.tokens, self.cursor = Memory(3), [1, 2, 3], KVCursor()
        assert self.pool.reserve(self.cursor, 90)

    @rule(drafts=st.integers(1, LOG + 1), kept=st.integers(0, LOG + 1))
    def draft(self, drafts: int, kept: int) -> None:
        """Catch up, then feed drafts one by one; a part of them is kept, and one more token comes."""
        if len(self.tokens) > 70:
            return
        made: list[int] = []
        for i in range(drafts):
            start = self.cursor.kv_len
            fed = [*self.tokens[start:], *made[max(0, start - len(self.tokens)) :]]
            span = self.cursor.span(start, start + len(fed), len(self.tokens))
            assert self.memory.run(span, start, fed) == (*self.tokens, *made)[:start]
            self.cursor.advance(start + len(fed))
            made.append(40 + i)
        self.tokens = [*self.tokens, *made[:kept], 30]
        self.cursor.rollback(len(self.tokens))

    @invariant()
    def slots_are_conserved(self) -> None:
        self.pool.check_invariants([self.cursor])


TestDrafting = Drafting.TestCase
TestDrafting.settings = settings(max_examples=20, stateful_step_count=30)


def test_too_few_slots_admit_nobody() -> None:
    pool = PagePool(9, PAGE, states=StatePool(4, LOG, snapshots=False))
    first, second = KVCursor(), KVCursor()
    assert pool.has_slots
    assert pool.reserve(first, 5)
    assert not pool.has_slots
    assert not pool.reserve(second, 5)
    assert second == KVCursor(), "a failed reservation changed something"
    pool.release(first)
    assert pool.reserve(second, 5)


def test_cached_pages_count_as_far_as_their_state_is_kept() -> None:
    pool = PagePool(9, PAGE, prefix_cache=True, states=StatePool(9, LOG, snapshots=True))
    tokens, cursor = list(range(14)), KVCursor()
    assert pool.reserve(cursor, 14)
    cursor.span(0, 10, 14, PAGE)
    cursor.advance(10)
    pool.share(cursor, tokens, None)
    assert len(pool.find(tokens, None)) == 2, "the state at position 8 was written on the way"
    assert len(pool.find(tokens[:8], None)) == 0, "and that at position 4 was not"


def test_a_lost_slot_is_noticed() -> None:
    pool, cursor = PagePool(4, PAGE, states=StatePool(4, LOG, snapshots=False)), KVCursor()
    pool.reserve(cursor, 8)
    cursor.states.pop()
    with pytest.raises(AssertionError, match="slots are missing"):
        pool.check_invariants([cursor])
