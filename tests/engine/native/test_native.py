"""The C kernel against the formula, and a row against itself in other company."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from pilotfish.engine.attention import native, reference, sdpa
from pilotfish.engine.attention.reference import AttentionSpec
from pilotfish.engine.kernels.reference import round_heads
from pilotfish.engine.kv.arena import floats_of
from pilotfish.engine.kv.batch import Feed, RaggedBatch
from pilotfish.engine.machine.threads import exactly
from pilotfish.engine.native import Rows, library
from pilotfish.engine.native.rows import GELU_TANH, SILU

needs_kernel = pytest.mark.skipif(library() is None, reason="no C kernels here")
CPU = torch.device("cpu")
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}
# (fed now, fed before): prompts longer than a block and than a tile, verification, decoding
LENS = st.lists(st.tuples(st.integers(1, 80), st.integers(0, 150)), min_size=1, max_size=4)
LATENT = (1, 4, 576, 512)  # the values are the beginning of the keys
# K/V heads, query heads to each, the width of keys, and that of values where it is another
SHAPES = st.sampled_from(
    [(1, 1, 64), (2, 4, 64), (4, 8, 64), (2, 3, 16), (3, 1, 48), (1, 5, 80), (2, 2, 96), (1, 2, 256), (2, 1, 192, 128),
     (3, 1, 32, 64), LATENT]
)  # fmt: skip
SPECS = st.fixed_dictionaries(
    {
        "window": st.sampled_from([None, 1, 7, 100]),
        "chunk": st.sampled_from([None, 1, 50, 64]),
        "softcap": st.sampled_from([None, 4.0]),
        "sinks": st.sampled_from([False, True]),
    }
)


class Problem:
    """Random queries over an arena in which whatever no sequence wrote is NaN; with `int8` the arena is rounded."""

    def __init__(
        self, lens: list[tuple[int, int]], page: int, shape: tuple[int, ...], dtype: torch.dtype, *, int8: bool = False
    ) -> None:
        kv_heads, group, dim, value_dim = (*shape, shape[2])[:4]
        generator = torch.Generator().manual_seed(sum(map(sum, lens)) + page)
        pages = [-(-(now + before) // page) for now, before in lens]
        order = torch.randperm(sum(pages) + 2, generator=generator).tolist()
        self.feeds = [
            Feed([0] * now, before, [order.pop() for _ in range(n)])
            for (now, before), n in zip(lens, pages, strict=True)
        ]
        self.page = page
        self.batch = RaggedBatch.of(self.feeds, page, CPU)
        tokens = len(self.batch.positions)
        self.query = torch.randn(tokens, kv_heads * group, dim, generator=generator).to(dtype)
        self.sinks = torch.randn(kv_heads * group, generator=generator)
        count = (sum(pages) + 2) * page
        self.k, self.v = (torch.full((count, kv_heads, width), float("nan"), dtype=dtype) for width in (dim, value_dim))
        for i in range(len(lens)):
            rows = reference.arena_rows(self.batch, i, CPU)
            for arena in (self.k, self.v):
                arena[rows] = torch.randn(len(rows), *arena.shape[1:], generator=generator).to(dtype)
        if int8:
            self.k, self.v = round_heads(self.k), round_heads(self.v)
        if shape == LATENT:
            self.v = self.k[..., : self.v.shape[2]]

    def spec(self, *, sinks: bool = False, **options: object) -> AttentionSpec:
        """The meaning of an attention with these options."""
        return AttentionSpec(0.2, sinks=self.sinks if sinks else None, **options)

    def numbers(self) -> Iterator[Tensor]:
        """Keys and values as floats, where the formula may read what nobody wrote."""
        return (floats_of(arena, torch.float32).nan_to_num() for arena in (self.k, self.v))

    def solve(self, **options: object) -> Tensor:
        return native.attend(self.query, self.k, self.v, self.batch, self.spec(**options))

    def solve_one(self, i: int, tokens: slice, **options: object) -> Tensor:
        """Some tokens of sequence i, in a pass of their own."""
        feed, start = self.feeds[i], self.batch.cu_seqlens[i]
        here = range(*tokens.indices(len(feed.tokens)))
        alone = RaggedBatch.of([Feed([0] * len(here), feed.start + here.start, feed.page_table)], self.page, CPU)
        query = self.query[start + here.start : start + here.stop]
        return native.attend(query, self.k, self.v, alone, self.spec(**options))


@needs_kernel
@settings(max_examples=60)
@given(LENS, st.sampled_from([1, 16, 32, 500]), SHAPES, st.sampled_from(list(TOLERANCE)), SPECS, st.booleans())
def test_it_is_the_formula(lens, page, shape, dtype, options, int8) -> None:
    p = Problem(lens, page, shape, dtype, int8=int8)
    got = p.solve(**options)
    want = reference.attend(p.query.float(), *p.numbers(), p.batch, p.spec(**options))
    assert got.dtype == dtype
    assert torch.allclose(got.float(), want, atol=TOLERANCE[dtype])


@needs_kernel
@settings(max_examples=40)
@given(LENS, SHAPES, st.sampled_from(list(TOLERANCE)), SPECS, st.booleans(), st.data())
def test_a_row_is_the_same_bits_in_any_company(lens, shape, dtype, options, int8, data) -> None:
    """In a batch, alone, with fewer of its own neighbours, on any number of threads."""
    p = Problem(lens, 16, shape, dtype, int8=int8)
    together = p.solve(**options)
    i = data.draw(st.integers(0, len(lens) - 1))
    first = data.draw(st.integers(0, lens[i][0] - 1))
    stop = data.draw(st.integers(first + 1, lens[i][0]))
    start = p.batch.cu_seqlens[i]
    assert torch.equal(p.solve_one(i, slice(first, stop), **options), together[start + first : start + stop])
    with exactly(2):
        assert torch.equal(p.solve(**options), together)


@needs_kernel
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_a_sick_row_is_sick_alone_and_says_so(dtype: torch.dtype) -> None:
    p = Problem([(3, 20), (2, 70)], 16, (2, 2, 64), dtype)
    healthy = p.solve()
    p.query[1] = float("nan")
    got = p.solve()
    assert got[1].isnan().all()
    assert torch.equal(got[[0, 2, 3, 4]], healthy[[0, 2, 3, 4]])


@needs_kernel
def test_a_query_cut_out_of_a_wider_matrix() -> None:
    """As fused projections hand it over: tokens lie further apart than their heads are wide."""
    p = Problem([(4, 9)], 16, (2, 2, 64), torch.float32)
    wide = torch.cat([p.query.flatten(1), torch.zeros(4, 100)], 1)
    want, p.query = p.solve(), wide[:, : 4 * 64].unflatten(1, (4, 64))
    assert torch.equal(p.solve(), want)
    p.query = p.query.transpose(0, 1).contiguous().transpose(0, 1)
    assert torch.equal(p.solve(), want)


def test_what_it_cannot_do_goes_to_sdpa() -> None:
    for shape, dtype in (((2, 2, 20), torch.float32), ((2, 2, 64), torch.float16)):
        p = Problem([(4, 9)], 16, shape, dtype)
        assert torch.equal(p.solve(), sdpa.attend(p.query, p.k, p.v, p.batch, AttentionSpec(0.2)))


# What lies between matmuls


DTYPES = st.sampled_from(list(TOLERANCE))
SIZES = st.tuples(st.integers(1, 9), st.sampled_from([16, 48, 256, 1040]))


def numbers(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Of many sizes, with zeros and ties."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator) * 10 ** torch.randint(-3, 4, (*shape[:-1], 1), generator=generator)
    return torch.where(torch.rand(shape, generator=generator) < 0.1, torch.zeros(()), x).to(dtype)


@needs_kernel
@settings(max_examples=40)
@given(SIZES, DTYPES, st.sampled_from([(SILU, F.silu), (GELU_TANH, partial(F.gelu, approximate="tanh"))]))
def test_gates_and_norms_are_the_formula(size, dtype, activation) -> None:
    x, n = numbers((size[0], 2 * size[1]), dtype), size[1]
    ours, torchs = activation
    want = (torchs(x[:, :n].double()) * x[:, n:].double()).float()  # in float32 1 + tanh(x) is coarse below 0
    near = {"rtol": 1e-5, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 1e-2, "atol": 1e-6}
    assert torch.allclose(Rows().gate(x, ours).float(), want, **near)
    steps, scale = Rows().gate_round(x, ours)
    assert (steps.float() * scale - want).abs().le(0.51 * scale + 1e-6).all()
    x, weight = x[:, :n].contiguous(), numbers((n,), torch.float32, 1)
    want = x.float() * (x.float().pow(2).sum(-1, keepdim=True) + 1e-5).rsqrt() * weight
    assert torch.allclose(Rows().norm(x, weight, 1e-5).float(), want, **near)


@needs_kernel
@settings(max_examples=60)
@given(st.sampled_from([(4, 2, 32), (3, 1, 64), (8, 8, 96)]), st.integers(1, 5), DTYPES, st.booleans(), st.booleans())
def test_rotation_on_the_way_into_the_arena(shape, tokens, dtype, is_normed, is_sick) -> None:
    heads, kv_heads, dim = shape
    qkv = numbers((tokens, (heads + 2 * kv_heads) * dim), dtype)
    angles = torch.rand(tokens, dim // 2).repeat(1, 2) * 6
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    query, key, value = qkv.clone().unflatten(1, (-1, dim)).float().split([heads, kv_heads, kv_heads], 1)
    norms = [(numbers((dim,), torch.float32, seed), 0.5) for seed in (1, 2)] if is_normed else (None, None)
    if is_normed:
        query, key = (
            (x * (x.pow(2).sum(-1, keepdim=True) + eps).rsqrt() * weight).to(dtype).float()
            for x, (weight, eps) in zip((query, key), norms, strict=True)
        )
    k, v = (torch.zeros(tokens + 3, kv_heads, dim, dtype=dtype) for _ in "kv")
    places = torch.randperm(tokens + 3)[:tokens]

    def turned(x: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        return x * cos[:, None].float() + torch.cat([-b, a], -1) * sin[:, None].float()

    if is_sick:
        qkv[0, heads * dim], qkv[0, -1] = float("nan"), float("inf")
    again, rounded_k, rounded_v = qkv.clone(), round_heads(k), round_heads(v)
    got = Rows().rotate(qkv, cos, sin, places, k, v, norms)
    assert torch.equal(Rows().rotate(again, cos, sin, places, rounded_k, rounded_v, norms), got)
    for in_int8, in_floats in ((rounded_k, k), (rounded_v, v)):
        assert torch.equal(in_int8, round_heads(in_floats)), "the same bits as torch gives"
    if is_sick:
        return
    near = {"rtol": 1e-5, "atol": 1e-3} if dtype == torch.float32 else {"rtol": 1e-2, "atol": 0.3}
    assert torch.allclose(got.float(), turned(query), **near)
    assert torch.allclose(k[places].float(), turned(key), **near)
    assert torch.equal(v[places].float(), value)
    untouched = sorted(set(range(tokens + 3)) - set(places.tolist()))
    assert not k[untouched].any()
    assert not v[untouched].any()


@needs_kernel
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_no_row_sees_another_and_what_is_no_number_stays_none(dtype) -> None:
    x, weight = numbers((200, 1024), dtype), torch.ones(1024)
    others, sick = [i for i in range(200) if i not in (7, 9)], x.clone()
    sick[7, 5] = float("nan")
    sick[9, 6] = float("inf")
    for run in (Rows().round, Rows().gate_round, Rows().gate, lambda x: Rows().norm(x, weight, 1e-6)):
        whole, alone, beside = run(x), run(x[3:4]), run(sick)
        whole, alone, beside = (out if isinstance(out, tuple) else (out,) for out in (whole, alone, beside))
        for w, a, b in zip(whole, alone, beside, strict=True):
            assert torch.equal(w[3:4], a)
            assert torch.equal(w[others], b[others])
        assert not beside[-1][7].float().isfinite().all()
        assert not beside[-1][9].float().isfinite().all()
