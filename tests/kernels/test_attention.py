"""The attention kernel against plain torch over random batches, and the independence that its splits promise."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

pytest.importorskip("triton", reason="triton is not installed")

from triton.runtime.interpreter import GridExecutor

from pilotfish.engine.attention import choose, paged, sdpa
from pilotfish.engine.attention import reference as by_formula
from pilotfish.engine.attention.reference import AttentionSpec
from pilotfish.engine.kernels import attention, paging, plan, reference
from pilotfish.engine.kernels.paging import (
    Paging,
    Tuning,
    default_for,
    key_of,
    plan_sizes,
    scratch_bytes,
    split_of,
    tile_of,
)
from pilotfish.engine.kernels.reference import round_heads
from pilotfish.engine.kv.arena import SCALE_BYTES
from pilotfish.engine.kv.batch import Feed, RaggedBatch
from tests.covering import covering
from tests.interpreting import DEVICE
from tests.no_gpu.counting import Counting

TOLERANCE = {torch.float32: 2e-5, torch.float16: 3e-3}
LOOKING = (Phase.explicit, Phase.reuse, Phase.generate)  # an interpreted kernel is too slow to shrink a failure with
SPLITS = {"split": 16, "per_level": 2}  # so that short sequences have many


def problem(
    seed: int,
    lens: list[tuple[int, int]],
    page: int,
    kv_heads: int,
    group: int,
    dim: int,
    dtype=torch.float32,
    *,
    fixed: bool = False,
    value_dim: int | None = None,
    latent: bool = False,
):
    """Random queries over an arena whose unused rows are not a number; `lens` are (fed now, fed before).

    `latent` values are the beginning of their keys.
    """
    generator = torch.Generator().manual_seed(seed)
    pages = [-(-(now + before) // page) for now, before in lens]
    order = torch.randperm(sum(pages) + 2, generator=generator).tolist()
    tables = [order[sum(pages[:i]) : sum(pages[: i + 1])] for i in range(len(lens))]
    starts = [before for _, before in lens]
    paging = Paging.of([now for now, _ in lens], starts, tables, page, group, DEVICE, fixed=fixed)
    query = torch.randn(sum(now for now, _ in lens), kv_heads * group, dim, generator=generator).to(dtype)
    k, v = torch.randn(2, (sum(pages) + 2) * page, kv_heads, dim, generator=generator).to(dtype)
    v = v[..., :value_dim].contiguous()
    used = torch.zeros(len(k), dtype=torch.bool)
    for table, (now, before) in zip(tables, lens, strict=True):
        for position in range(now + before):
            used[table[position // page] * page + position % page] = True
    k[~used], v[~used] = float("nan"), float("nan")
    k = k.to(DEVICE)
    return query.to(DEVICE), k, k[..., :value_dim] if latent else v.to(DEVICE), paging


LENS = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 60)), min_size=1, max_size=2)


@settings(max_examples=4, phases=LOOKING)
@given(
    seed=st.integers(0, 1000),
    lens=LENS,
    page=st.sampled_from([16, 32]),
    group=st.sampled_from([1, 2, 3, 4, 7, 8]),
    dim=st.sampled_from([20, 64, 80, 96, 128, 192]),
    value_dim=st.sampled_from([None, 20, 16]),
    dtype=st.sampled_from([torch.float32, torch.float16]),
    window=st.one_of(st.none(), st.integers(1, 40)),
    chunk=st.sampled_from([None, 10, 32]),
    softcap=st.sampled_from([None, 5.0]),
    has_sinks=st.booleans(),
    spread=st.booleans(),
)
def test_equals_reference(seed, lens, page, group, dim, value_dim, dtype, window, chunk, softcap, has_sinks, spread):
    query, k, v, paging = problem(seed, lens, page, 1 + seed % 2, group, dim, dtype, value_dim=value_dim)
    asked = {"chunk": chunk, "sinks": 2 * torch.randn(query.shape[1], device=DEVICE) if has_sinks else None}
    got = attention.attend(query, k, v, paging, dim**-0.5, window, softcap, spread=spread, **asked, **SPLITS)
    want = reference.attend(query, k, v, paging, dim**-0.5, window, softcap, **asked)
    assert got.shape == (*query.shape[:2], v.shape[2])
    assert torch.allclose(got, want, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize(
    ("group", "dim", "value_dim", "dtype", "spread"),
    [
        (12, 256, None, torch.float16, True),
        (71, 64, None, torch.float32, False),  # as Falcon
        (3, 24, 16, torch.float32, False),
        (16, 576, 512, torch.float16, False),  # as DeepSeek-V3
    ],
)
def test_large_heads_large_groups_and_values_within_keys(group, dim, value_dim, dtype, spread):
    """`value_dim`: as latent attention keeps them, with one K/V head; the value is the beginning of the key."""
    shape = {"value_dim": value_dim, "latent": value_dim is not None, "fixed": value_dim is not None}
    query, k, v, paging = problem(dim + group, [(2, 20), (1, 5)], 16, 1, group, dim, dtype, **shape)
    got = attention.attend(query, k, v, paging, dim**-0.5, spread=spread, **SPLITS)
    want = reference.attend(query, k, v, paging, dim**-0.5)
    assert torch.allclose(got, want, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


ROUNDED = [
    ([(1, 260), (1, 5)], 4, 64, None, torch.float16, AttentionSpec(0.1)),
    ([(40, 25), (1, 9)], 2, 80, 64, torch.float16, AttentionSpec(0.1, window=30, softcap=5.0)),  # a prompt
    ([(2, 20), (1, 5)], 3, 20, None, torch.float32, AttentionSpec(0.2, chunk=10)),
    ([(2, 20), (1, 5)], 16, 576, 512, torch.float16, AttentionSpec(0.05)),  # latents: one scale for key and value
    ([(2, 20), (1, 5)], 3, 18, None, torch.float32, AttentionSpec(0.2)),  # no whole words: torch attends
]


@pytest.mark.parametrize(("case", "fixed"), covering(range(len(ROUNDED)), [False, True], every=2))
def test_codes_mean_what_they_mean_on_a_cpu(case, fixed, monkeypatch):
    """In int8, each vector with its scale: products of codes and scales, and nobody's scale but its own."""
    lens, group, dim, value_dim, dtype, spec = ROUNDED[case]
    latent = value_dim == 512
    kv_heads = 1 if latent else 2
    query, k, v, paging = problem(dim, lens, 16, kv_heads, group, dim, dtype, value_dim=value_dim)
    k, v = (round_heads(x * torch.linspace(0.1, 3, len(x), device=DEVICE)[:, None, None]) for x in (k, v))
    v = k[..., : SCALE_BYTES + value_dim] if latent else v
    feeds = [Feed([0] * now, before, paging.tables[i].tolist()) for i, (now, before) in enumerate(lens)]
    batch, spec = RaggedBatch.of(feeds, 16, DEVICE), replace(spec, sinks=query[0, :, 0])  # not dense
    want = by_formula.attend(query, k, v, batch, spec)
    plain = Counter[str]()
    for name in ("attend", "attend_fixed"):
        monkeypatch.setattr(sdpa, name, partial(seen, plain, getattr(sdpa, name)))
    got = paged.attend(query, k, v, batch, spec, fixed=fixed)
    assert torch.allclose(got, want, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    assert plain.total() == (dim % 4 > 0)


def seen(calls: Counter[str], attend, *args):
    calls[attend.__module__] += 1
    return attend(*args)


@pytest.mark.skipif(torch.cuda.is_available(), reason="it counts launches of the interpreter")
@pytest.mark.parametrize("fixed", [False, True])
def test_attention_over_codes_takes_as_many_launches_for_any_batch(fixed, monkeypatch):
    """A sequence more is no launch more, of our kernels and of torch: it was six more for each layer."""
    launches, counted = Counter[str](), list[tuple[Counter[str], list[str]]]()
    monkeypatch.setattr(GridExecutor, "__call__", lambda self, *_, **__: launches.update([self.fn.__name__]))
    for size in (1, 12):
        launches.clear()
        batch = RaggedBatch.of([Feed([0], 20, [2 * i, 2 * i + 1]) for i in range(size)], 16, DEVICE)
        k, v = round_heads(torch.randn(2, 32 * size, 2, 64))
        with Counting() as counting:
            paged.attend(torch.randn(size, 4, 64), k, v, batch, AttentionSpec(0.1), fixed=fixed)
        counted.append((Counter(launches), counting.names))
    assert counted[0] == counted[1]
    assert counted[0][0] == {"_plan_kernel": 1, "_attend_kernel": 1}


def test_prompts_take_large_tiles_beside_decoding():
    """A sequence that feeds many rows after a prefix, beside some that feed few."""
    query, k, v, paging = problem(3, [(2, 30), (33, 25), (1, 9)], 16, 1, 8, 80)
    rows = tile_of(8, prompt=True).rows
    assert paging.prompts.tolist() == [[1, r] for r in reversed(range(0, 33, rows))]
    assert len(paging.tiles) == 2
    want = reference.attend(query, k, v, paging, 0.1, 30)
    got = attention.attend(query, k, v, paging, 0.1, 30, spread=False, split=32, per_level=2)
    assert torch.allclose(got, want, atol=2e-5, rtol=2e-5)


def test_idle_tiles_and_rows_are_left_alone():
    """A graph of a fixed size has more rows and tiles than a batch may need."""
    query, k, v, paging = problem(1, [(3, 20), (0, 9), (2, 0)], 16, 2, 2, 64)
    idle = torch.tensor([[-1, 0]] * 2, dtype=torch.int32, device=DEVICE)
    padded = Paging(torch.cat([idle, paging.tiles, idle]), paging.spans, paging.tables, 16, 500)
    query = torch.cat([query, torch.full_like(query[:2], float("nan"))])
    want = reference.attend(query, k, v, padded, 0.1)
    assert (want[5:] == 0).all()
    got = attention.attend(query, k, v, padded, 0.1, spread=True, **SPLITS)
    assert torch.allclose(got[:5], want[:5], atol=2e-5)


def alone(paging: Paging, i: int, row: int, group: int) -> Paging:
    """One row of sequence i, as a batch of its own."""
    _, _, start, table = paging.spans[i].tolist()
    return Paging.of([1], [start + row], [paging.tables[table].tolist()], paging.page_size, group, DEVICE)


def exact_problem(seed: int, lens: list[tuple[int, int]], group: int):
    """A problem whose matmuls are exact in any order, as `test_a_rows_bits_are_its_own` says; no tiles of prompts."""
    query, k, v, paging = problem(seed, lens, 16, 1, group, 64, fixed=True)
    ones = (torch.arange(len(v)) % 16 == torch.arange(64)[:, None] % 16).T[:, None]
    return query.round(), k.nan_to_num().round(), v.nan_to_num() * ones.to(DEVICE), paging


@pytest.mark.slow
@settings(max_examples=2, phases=LOOKING)
@given(
    st.integers(0, 1000), LENS, st.one_of(st.none(), st.integers(1, 40)), st.sampled_from([None, 10, 40]),
    st.booleans(), st.sampled_from([1, 4]),
)  # fmt: skip
def test_a_rows_bits_are_its_own(seed, lens, window, chunk, has_sinks, group):
    """Alone or in company, decoded or one of several, its splits walked by one program or spread: the same bits.

    The interpreter's matmul is the CPU's, whose order of sums hangs on a row's place. So scores are of small integers,
    and within a block of keys each column of the values has one entry: both matmuls are exact in any order.
    """
    query, k, v, paging = exact_problem(seed, lens, group)
    asked = {"chunk": chunk, "sinks": torch.randn(group, device=DEVICE) if has_sinks else None, **SPLITS}
    together = attention.attend(query, k, v, paging, 0.1, window, spread=False, **asked)
    spread = attention.attend(query, k, v, paging, 0.1, window, spread=True, **asked)
    assert torch.equal(spread, together)
    for i, (now, _) in enumerate(lens):
        first = int(paging.spans[i, 0])
        for row in {0, now // 2, now - 1} if now else ():
            mine = query[first + row : first + row + 1]
            got = attention.attend(mine, k, v, alone(paging, i, row, group), 0.1, window, spread=True, **asked)
            assert torch.equal(got[0], together[first + row])


def test_a_row_of_a_prompt_has_its_own_bits_where_tiles_are_fixed():
    """40 rows at once, as `--reproducible` lays them out: the bits of each alone."""
    query, k, v, paging = exact_problem(2, [(35, 9)], 2)
    together = attention.attend(query, k, v, paging, 0.1, spread=False, **SPLITS)
    for row in (7, 34):
        got = attention.attend(query[row : row + 1], k, v, alone(paging, 0, row, 2), 0.1, spread=False, **SPLITS)
        assert torch.equal(got[0], together[row])


def test_only_what_is_fixed_keeps_prompts_in_tiles_of_decoding():
    cuda = torch.device("cuda")
    assert choose("fixed", cuda) is paged.attend_fixed
    assert choose("auto", cuda) is choose("triton", cuda) is paged.attend
    feeds = [Feed([1] * 40, 0, [0, 1, 2]), Feed([1] * 5, 4, [3])]
    for fixed, num_tiles, num_prompts in ((False, 1, 2), (True, 6, 0)):
        laid_out = paged.paging_of(RaggedBatch.of(feeds, 16, DEVICE), 4, fixed=fixed)
        assert (len(laid_out.tiles), len(laid_out.prompts)) == (num_tiles, num_prompts)


LONG_BESIDE_SHORT = [(2, 700), *[(1, 10)] * 11, (3, 0)]


def walks(paging: Paging, query: torch.Tensor, k: torch.Tensor, **options) -> list[tuple[int, int]]:
    """Of each program that has work its turn's parts, and all parts of its tile."""
    (found,) = plan.plans_of(query, k, paging, **options)
    items = [item for item in found.items.tolist() if item[1]]
    return [(len(range(turn, parts, turns)), parts) for *_, turn, turns, parts, _, _ in items]


def test_a_long_sequence_beside_short_ones_is_shared_out():
    """No program walks more than two of its nine splits, and there are hardly more programs than tiles."""
    query, k, _, paging = exact_problem(4, LONG_BESIDE_SHORT, 4)
    found = walks(paging, query, k, tuning=Tuning(16, 4, 3, programs=16), **SPLITS)
    assert max(parts for _, parts in found) == split_of(701, **SPLITS) + 1 == 9
    assert all(walked <= 2 for walked, parts in found)
    assert len(found) <= len(paging.tiles) + 16
    assert {walked for walked, parts in found if parts == 1} == {1}


@pytest.mark.slow
def test_what_does_not_fit_into_scratch_is_walked_by_one_program(monkeypatch):
    query, k, v, laid_out = exact_problem(6, [(1, 120), (2, 120), (1, 100)], 2)
    want = attention.attend(query, k, v, laid_out, 0.1, spread=False, **SPLITS)
    parts = split_of(121, **SPLITS) + 1
    monkeypatch.setattr(paging, "SCRATCH", 2 * 2 * parts * (64 + 2) * 4)
    shared = [parts for walked, parts in walks(laid_out, query, k, spread=True, **SPLITS) if walked < parts]
    assert 0 < len(shared) < 3 * parts
    assert torch.equal(attention.attend(query, k, v, laid_out, 0.1, spread=True, **SPLITS), want)


@pytest.mark.parametrize("prompt", [False, True])
def test_tiles_hold_every_head_and_stay_small(prompt):
    """Above 64 query heads to a K/V head, and rows times heads above 64, a program would spill its registers."""
    for group in range(1, 129):
        tile = tile_of(group, prompt=prompt)
        assert 16 <= tile.size <= (128 if prompt else 64)
        assert tile.rows >= 1
        beside = -(-group // tile.heads)
        assert beside == -(-group // 64)
        assert group <= beside * tile.heads < group + beside


def test_scratch_is_bounded_whatever_the_context():
    """Of 32 sequences that verify 16 drafts at 131072 positions it was 720 MB."""
    cell = (128 + 2) * 4
    assert scratch_bytes(1, 32, 128, 131072) == 32 * 81 * cell
    assert scratch_bytes(32 * 17, 32, 128, 131072) == 128 << 20
    assert scratch_bytes(512, 32, 128, 256) == 0
    for num_tiles, context, items in ((1, 8192, 24), (32, 131072, 98), (400, 131072, 466)):
        bounds = plan_sizes(num_tiles, tile_of(4), 8 * num_tiles, 32, 8, 128, split_of(context - 1) + 1, 528)
        assert bounds.items == items
        assert bounds.cells * cell <= scratch_bytes(8 * num_tiles, 32, 128, context)


def test_recorded_tunings_are_tunings():
    """`tuning.json` is written by a sweep; what it has not seen has defaults."""
    assert key_of("9.0", torch.bfloat16, 4, 128, False) == "9.0/bfloat16/4/128/decode"
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        assert default_for(dtype, 4, 128, False).num_stages == 3
    recorded = json.loads((Path(plan.__file__).parent / "tuning.json").read_text("utf-8"))
    for key, fields in recorded.items():
        assert re.fullmatch(r"\d+\.\d+/(bfloat16|float16|float32)/\d+/\d+/(decode|prompt)", key)
        tuning = Tuning(**fields)
        assert tuning.block_n in (16, 32, 64, 128)
        assert tuning.num_warps in (1, 2, 4, 8, 16)


@given(st.integers(0, 2**22), st.sampled_from([(4, 2), (256, 16)]))
def test_splits_follow_one_another(position, schedule):
    """Each position is in one split, and splits are in the order of positions; counted out for small ones."""
    split, per_level = schedule
    mine = split_of(position, split, per_level)
    assert mine <= split_of(position + 1, split, per_level) <= mine + 1
    sizes = [4] * 2 + [8] * 2 + [16] * 2
    want = [i for i, size in enumerate(sizes) for _ in range(size)]
    assert [split_of(p, 4, 2) for p in range(sum(sizes))] == want
