"""Weights are rounded in C to the bits that torch gives, on any number of threads, and lie in panels as in matmul.h."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.model.linear import int4, int8
from engine.native import PackedMatrix, library, multiplies, round4, round8, rounds
from engine.native.weights import GROUP, panels_of, panels_of_levels
from tests.drawn import int8s, numbers

pytestmark = [pytest.mark.slow, pytest.mark.skipif(library() is None, reason="no C compiler here")]
FLOATS = [torch.float32, torch.bfloat16]


@pytest.fixture(params=[1, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(1)


def weights(outputs: int, inputs: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Rows of very unlike sizes, zeros and ties among them."""
    made = numbers(outputs, inputs, seed=seed) * torch.logspace(-20, 20, outputs)[:, None]
    made[0], made[outputs // 2, ::2] = 0, made[outputs // 2, 0] / 2
    return made.to(dtype)


@pytest.mark.parametrize("dtype", FLOATS)
@settings(max_examples=60, deadline=None)
@given(st.integers(1, 40), st.integers(1, 1100), st.integers(0, 10**6))
def test_int8_is_what_torch_rounds_to(dtype: torch.dtype, outputs: int, inputs: int, seed: int) -> None:
    weight = weights(outputs, inputs, dtype, seed)
    got, scale = round8(weight)
    want, steps = int8._round(weight.float())
    assert got.dtype == torch.int8
    assert torch.equal(got, want.to(torch.int8))
    assert torch.equal(scale, steps[:, 0])


@pytest.mark.parametrize("dtype", FLOATS)
@settings(max_examples=60, deadline=None)
@given(st.integers(1, 40), st.integers(1, 12), st.integers(0, 10**6))
def test_int4_is_what_torch_rounds_to(dtype: torch.dtype, outputs: int, groups: int, seed: int) -> None:
    weight = weights(outputs, groups * GROUP, dtype, seed)
    for got, want in zip(round4(weight, int4.LEVELS), int4._round(weight.float()), strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("dtype", [*FLOATS, torch.float16, torch.float64])
@pytest.mark.parametrize("rounding", [int8, int4])
def test_any_type_and_any_layout_give_the_same_bits(rounding, dtype: torch.dtype, threads: int) -> None:
    weight = (numbers(600, 3 * GROUP) * 0.1).to(dtype)
    want = rounding.round_weight(weight.float())
    across = weight.t().contiguous().t()  # as GPT-2 keeps it
    wider = torch.cat([weight, weight], 1)[:, : 3 * GROUP]  # rows that lie apart
    assert (rounds(wider), rounds(across)) == (dtype in FLOATS, False)
    for same in (weight, across, wider):
        for got, bits in zip(rounding.round_weight(same), want, strict=True):
            assert torch.equal(got, bits)


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("rounding", [int8, int4])
def test_a_scale_says_what_is_not_finite(rounding, wrong: float) -> None:
    weight = numbers(5, 2 * GROUP)
    weight[3, 70] = wrong
    _, scale = rounding.round_weight(weight)
    assert scale[:3].isfinite().all()
    assert scale[4].isfinite().all()
    assert not scale[3].isfinite().all()


def panels_by_torch(weight: Tensor, width: int) -> Tensor:
    """`[out, in]` -> `[out / width, in / G, width, G]`."""
    outputs, inputs = weight.shape
    group = 4 // weight.element_size()
    made = torch.zeros(-(-outputs // width) * width, inputs, dtype=weight.dtype)
    made[:outputs] = weight
    return made.view(-1, width, inputs // group, group).transpose(1, 2)


def panels_of_levels_by_torch(packed: Tensor, scale: Tensor, width: int) -> Tensor:
    """Bytes `[out / width, words, width, 4]`: of every two groups the scales, and then eight words each."""
    outputs, groups = scale.shape
    pairs = -(-groups // 2)
    panels = torch.zeros(-(-outputs // width), 17 * pairs, width, 4, dtype=torch.uint8)
    for to, levels, scales in zip(panels, packed.split(width), scale.split(width), strict=True):
        both = torch.stack([levels & 15, levels >> 4], -1).view(-1, groups, 8, 2, 4)  # output, group, step, half, byte
        joined = both[..., 0, :] | both[..., 1, :] << 4
        pair = to.view(pairs, 17, width, 4)[:, :, : len(levels)]
        for group, words in enumerate(joined.permute(1, 2, 0, 3)):
            first = 1 + 8 * (group % 2)
            pair[group // 2, first : first + 8] = words
            pair[group // 2, 0].view(torch.bfloat16)[:, group % 2] = scales[:, group]
    return panels[:, : 8 * groups + pairs].flatten(2)


def parts_of(matrix: Tensor, cuts: list[int]) -> list[Tensor]:
    """The same matrix in parts, one of them of no row."""
    bounds = [0, *sorted(cut % (len(matrix) + 1) for cut in cuts), len(matrix)]
    return [matrix[first:last] for first, last in pairwise(bounds)]


@pytest.mark.parametrize("width", [16, 32, 64])
@pytest.mark.parametrize("dtype", [*FLOATS, torch.int8])
@settings(max_examples=30, deadline=None)
@given(st.integers(1, 300), st.integers(1, 40), st.lists(st.integers(0, 300), max_size=2), st.integers(0, 10**6))
def test_panels(width: int, dtype: torch.dtype, outputs: int, sixteens: int, cuts: list[int], seed: int) -> None:
    inputs = 16 * sixteens
    weight = int8s(outputs, inputs, seed=seed) if dtype == torch.int8 else numbers(outputs, inputs).to(dtype)
    panels, offset = panels_of(parts_of(weight, cuts), width)
    assert torch.equal(panels, panels_by_torch(weight, width))
    if dtype == torch.int8:
        assert offset is not None
        assert torch.equal(offset[:outputs], 128 * weight.sum(1, dtype=torch.int32))
        assert not offset[outputs:].any()


@pytest.mark.parametrize("width", [16, 32, 64])
@settings(max_examples=30, deadline=None)
@given(st.integers(1, 300), st.integers(1, 6), st.lists(st.integers(0, 300), max_size=2), st.integers(0, 10**6))
def test_panels_of_levels(width: int, outputs: int, groups: int, cuts: list[int], seed: int) -> None:
    packed, scale = int4.round_weight(numbers(outputs, groups * GROUP, seed=seed))
    panels, offset = panels_of_levels(parts_of(packed, cuts), scale, int4.LEVELS, width)
    assert torch.equal(panels, panels_of_levels_by_torch(packed, scale, width))
    sums = int4.levels_of(packed).unflatten(1, (-1, GROUP)).sum(-1)
    want = 128 * (sums.double() * scale.double()).sum(1)
    assert torch.allclose(offset[:outputs].double(), want, rtol=1e-7, atol=1e-12)
    assert not offset[outputs:].any()


@pytest.mark.skipif(not multiplies(torch.int8), reason="our C does not multiply here")
def test_parts_are_one_matrix() -> None:
    weight, scale, rows = int8s(150, 64), numbers(150).abs(), torch.full((3, 64), 200, dtype=torch.uint8)
    whole, parts = (PackedMatrix.of(made, scale) for made in (weight, weight.split([5, 100, 45])))
    step = torch.ones(3, 1)
    assert torch.equal(*(made.multiply(rows, step, torch.float32) for made in (whole, parts)))
