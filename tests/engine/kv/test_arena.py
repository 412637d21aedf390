"""Pages and cursors."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from engine.kv.arena import KVArena, KVLayout
from engine.kv.pages import PagePool
from engine.types import KVCursor


@given(st.integers(0, 200), st.lists(st.tuples(st.integers(0, 8), st.integers(0, 9)), max_size=30))
def test_rollback_is_arithmetic(prompt: int, rounds: list[tuple[int, int]]) -> None:
    """I3 over random rounds: after each, exactly the newest token is left to feed."""
    num_tokens, cursor = prompt + 1, KVCursor()
    for num_draft, accepted in rounds:
        accepted = min(accepted, num_draft)
        cursor.advance(num_tokens + num_draft)
        num_tokens += accepted + 1
        cursor.rollback(num_tokens)
        assert cursor.kv_len == num_tokens - 1


def test_rollback_never_moves_forward() -> None:
    cursor = KVCursor(kv_len=3)
    cursor.rollback(10)
    assert cursor.kv_len == 3


class Pool(RuleBasedStateMachine):
    """Reserve and release at random: no page is ever lost, shared or handed out twice."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(num_pages=7, page_size=4)
        self.cursors = [KVCursor() for _ in range(4)]

    @rule(who=st.integers(0, 3), num_tokens=st.integers(0, 40))
    def reserve(self, who: int, num_tokens: int) -> None:
        cursor, free = self.cursors[who], self.pool.num_free
        before = list(cursor.page_table)
        fits = self.pool.pages_for(num_tokens) - len(before) <= free
        assert self.pool.reserve(cursor, num_tokens) is fits
        assert cursor.page_table[: len(before)] == before, "a reserved page moved"
        if fits:
            assert len(cursor.page_table) * 4 >= num_tokens
        else:
            assert cursor.page_table == before, "a failed reservation changed something"

    @rule(who=st.integers(0, 3))
    def release(self, who: int) -> None:
        self.pool.release(self.cursors[who])
        assert self.cursors[who] == KVCursor()

    @invariant()
    def pages_are_conserved(self) -> None:
        self.pool.check_invariants(self.cursors)


TestPool = Pool.TestCase


def test_a_lost_page_is_noticed() -> None:
    pool, cursor = PagePool(4, 4), KVCursor()
    pool.reserve(cursor, 8)
    cursor.page_table.pop()
    with pytest.raises(AssertionError, match="holders"):
        pool.check_invariants([cursor])


def test_arena_writes_in_place() -> None:
    layout = KVLayout.uniform(2, 3, 4, torch.float32)
    arena = KVArena(layout, num_pages=2, page_size=5, device=torch.device("cpu"))
    address = arena.k[1].data_ptr()
    key, value = torch.randn(2, 3, 4), torch.randn(2, 3, 4)
    arena.write(1, torch.tensor([7, 2]), key, value)
    assert arena.k[1].data_ptr() == address
    assert torch.equal(arena.k[1][[7, 2]], key)
    assert torch.equal(arena.v[1][[7, 2]], value)
    assert arena.k[0].count_nonzero() == 0
    assert layout.bytes_per_token == 2 * 2 * 3 * 4 * 4
