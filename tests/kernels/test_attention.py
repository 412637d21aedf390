"""The attention kernel against plain torch over random batches, and the independence that its splits promise."""

from __future__ import annotations

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

pytest.importorskip("triton", reason="triton is not installed")

from engine.kernels import attention, reference
from engine.kernels.paging import Paging, split_of
from tests.interpreting import DEVICE

TOLERANCE = {torch.float32: 2e-5, torch.float16: 3e-3}
LOOKING = (Phase.explicit, Phase.reuse, Phase.generate)  # an interpreted kernel is too slow to shrink a failure with
SPLITS = {"split": 16, "per_level": 2}  # so that short sequences have many


def problem(
    seed: int, lens: list[tuple[int, int]], page: int, kv_heads: int, group: int, dim: int, dtype=torch.float32
):
    """Random queries over an arena whose unused rows are not a number; `lens` are (fed now, fed before)."""
    generator = torch.Generator().manual_seed(seed)
    pages = [-(-(now + before) // page) for now, before in lens]
    order = torch.randperm(sum(pages) + 2, generator=generator).tolist()
    tables = [order[sum(pages[:i]) : sum(pages[: i + 1])] for i in range(len(lens))]
    starts = [before for _, before in lens]
    paging = Paging.of([now for now, _ in lens], starts, tables, page, group, DEVICE)
    query = torch.randn(sum(now for now, _ in lens), kv_heads * group, dim, generator=generator).to(dtype)
    k, v = torch.randn(2, (sum(pages) + 2) * page, kv_heads, dim, generator=generator).to(dtype)
    used = torch.zeros(len(k), dtype=torch.bool)
    for table, (now, before) in zip(tables, lens, strict=True):
        for position in range(now + before):
            used[table[position // page] * page + position % page] = True
    k[~used], v[~used] = float("nan"), float("nan")
    return query.to(DEVICE), k.to(DEVICE), v.to(DEVICE), paging


LENS = st.lists(st.tuples(st.integers(0, 11), st.integers(0, 70)), min_size=1, max_size=3)


@settings(max_examples=60, phases=LOOKING)
@given(
    seed=st.integers(0, 1000),
    lens=LENS,
    page=st.sampled_from([16, 32]),
    group=st.sampled_from([1, 2, 3, 4, 7, 8]),
    dim=st.sampled_from([64, 80, 96, 128]),
    dtype=st.sampled_from([torch.float32, torch.float16]),
    window=st.one_of(st.none(), st.integers(1, 40)),
    softcap=st.sampled_from([None, 5.0]),
    spread=st.booleans(),
)
def test_equals_reference(seed, lens, page, group, dim, dtype, window, softcap, spread):
    query, k, v, paging = problem(seed, lens, page, 1 + seed % 2, group, dim, dtype)
    got = attention.attend(query, k, v, paging, dim**-0.5, window, softcap, spread=spread, **SPLITS)
    want = reference.attend(query, k, v, paging, dim**-0.5, window, softcap)
    assert torch.allclose(got, want, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("group", [1, 4])
def test_large_heads(group, dtype):
    query, k, v, paging = problem(7, [(2, 40), (1, 5)], 16, 1, group, 256, dtype)
    got = attention.attend(query, k, v, paging, 0.06, spread=True, **SPLITS)
    want = reference.attend(query, k, v, paging, 0.06)
    assert torch.allclose(got, want, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def test_idle_tiles_and_rows_are_left_alone():
    """A graph of a fixed size has more rows and tiles than a batch may need."""
    query, k, v, paging = problem(1, [(3, 20), (0, 9), (2, 0)], 16, 2, 2, 64)
    idle = torch.tensor([[-1, 0]] * 2, dtype=torch.int32, device=DEVICE)
    padded = Paging(torch.cat([idle, paging.tiles, idle]), paging.spans, paging.tables, 16, 500)
    query = torch.cat([query, torch.full_like(query[:2], float("nan"))])
    want = reference.attend(query, k, v, padded, 0.1)
    assert (want[5:] == 0).all()
    for spread in (False, True):
        got = attention.attend(query, k, v, padded, 0.1, spread=spread, **SPLITS)
        assert torch.allclose(got[:5], want[:5], atol=2e-5)


def alone(paging: Paging, i: int, row: int, group: int) -> Paging:
    """One row of sequence i, as a batch of its own."""
    _, _, start, table = paging.spans[i].tolist()
    return Paging.of([1], [start + row], [paging.tables[table].tolist()], paging.page_size, group, DEVICE)


@settings(max_examples=15, phases=LOOKING)
@given(st.integers(0, 1000), LENS, st.one_of(st.none(), st.integers(1, 40)), st.sampled_from([1, 4]))
def test_a_rows_bits_are_its_own(seed, lens, window, group):
    """Alone or in company, decoded or one of several, its splits walked by one program or spread: the same bits.

    The interpreter's matmul is the CPU's, whose order of sums hangs on a row's place. So scores are of small integers,
    and within a block of keys each column of the values has one entry: both matmuls are exact in any order.
    """
    query, k, v, paging = problem(seed, lens, 16, 1, group, 64)
    query, k = query.round(), k.nan_to_num().round()
    ones = (torch.arange(len(v)) % 16 == torch.arange(64)[:, None] % 16).T[:, None]
    v = v.nan_to_num() * ones.to(DEVICE)
    together = attention.attend(query, k, v, paging, 0.1, window, spread=False, **SPLITS)
    spread = attention.attend(query, k, v, paging, 0.1, window, spread=True, **SPLITS)
    assert torch.equal(spread, together)
    for i, (now, _) in enumerate(lens):
        first = int(paging.spans[i, 0])
        for row in {0, now // 2, now - 1} if now else ():
            mine = query[first + row : first + row + 1]
            got = attention.attend(mine, k, v, alone(paging, i, row, group), 0.1, window, spread=True, **SPLITS)
            assert torch.equal(got[0], together[first + row])


@given(st.integers(0, 2**22), st.sampled_from([(4, 2), (256, 16)]))
def test_splits_follow_one_another(position, schedule):
    """Each position is in one split, and splits are in the order of positions; counted out for small ones."""
    split, per_level = schedule
    mine = split_of(position, split, per_level)
    assert mine <= split_of(position + 1, split, per_level) <= mine + 1
    sizes = [4] * 2 + [8] * 2 + [16] * 2
    want = [i for i, size in enumerate(sizes) for _ in range(size)]
    assert [split_of(p, 4, 2) for p in range(sum(sizes))] == want
