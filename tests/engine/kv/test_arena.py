"""Pages and cursors."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from pilotfish.engine.kernels.reference import round_heads
from pilotfish.engine.kv.arena import KVArena, KVLayout, LayerKV, floats_of, width_of
from pilotfish.engine.kv.pages import PagePool
from pilotfish.engine.types import KVCursor
from tests import fakes


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


def test_rollback_is_of_all_that_drafted() -> None:
    """Also of a drafter that another one was asked after, in the same step or in a later one."""
    sequence = fakes.sequence(range(20))
    for name in ("model", "eagle"):
        sequence.turn_to(name)
        sequence.draft.advance(15)
    sequence.rollback(10)
    assert [cursor.kv_len for cursor in sequence.drafts.values()] == [9, 9]


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
TestPool.settings = settings(max_examples=25, stateful_step_count=30)


def test_a_lost_page_is_noticed() -> None:
    pool, cursor = PagePool(4, 4), KVCursor()
    pool.reserve(cursor, 8)
    cursor.page_table.pop()
    with pytest.raises(AssertionError, match="holder count"):
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_rounded_vector_is_near_and_knows_nothing_of_others(dtype: torch.dtype) -> None:
    x = (torch.randn(6, 3, 20, generator=torch.Generator().manual_seed(1)) * 7).to(dtype)
    stored = round_heads(x)
    assert (stored.dtype, stored.shape, width_of(stored)) == (torch.int8, (6, 3, 24), 20)
    peak = x.float().abs().amax(-1, keepdim=True)
    assert ((floats_of(stored, torch.float32) - x.float()).abs() <= 0.501 * peak / 127).all()
    assert torch.equal(stored[..., 4:].abs().amax(-1), torch.full((6, 3), 127, dtype=torch.int8))
    assert torch.equal(round_heads(x[4:5, 1:2]), stored[4:5, 1:2])


def test_what_is_no_number_stays_none_and_zeros_stay_zero() -> None:
    x = torch.randn(5, 2, 16)
    x[0, 0], x[1, 1, 3], x[2, 0, 15], x[3, 1] = 0, float("nan"), float("inf"), 1e-38
    got = floats_of(round_heads(x), torch.float32)
    assert not got[0, 0].any()
    assert got[[1, 2], [1, 0]].isnan().all()
    assert got.isnan().sum() == 2 * 16
    assert torch.allclose(got[3, 1], x[3, 1], atol=1e-30)


def test_a_rounded_arena() -> None:
    """A vector takes a byte for each number and four for its scale; latent values share their key's."""
    layers = (LayerKV(3, 8, 4), LayerKV(1, 24, 16, is_latent=True), LayerKV(3, 8, 4, source=0), None)
    layout = KVLayout(layers, torch.bfloat16).stored_as("int8")
    assert layout.bytes_per_token == 3 * (12 + 8) + 28
    arena = KVArena(layout, num_pages=2, page_size=5, device=torch.device("cpu"))
    rows = torch.tensor([7, 2])
    for layer, shape in enumerate(layers[:2]):
        key = torch.randn(2, shape.heads, shape.key_dim)
        value = key[..., : shape.value_dim] if shape.is_latent else torch.randn(2, shape.heads, shape.value_dim)
        arena.write(layer, rows, key, value)
        assert torch.equal(arena.k[layer][rows], round_heads(key))
        whole = floats_of(round_heads(key if shape.is_latent else value), torch.float32)
        assert torch.equal(floats_of(arena.v[layer][rows], torch.float32), whole[..., : shape.value_dim])
    assert arena.k[2] is arena.k[0]
    assert layout.stored_as("auto") == layout
