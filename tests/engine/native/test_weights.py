"""Matrices of floats in panels: right, and every row the same bits alone, in any batch and on any number of threads."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pilotfish.engine.machine.threads import exactly
from pilotfish.engine.native import PackedMatrix, library, multiplies
from pilotfish.engine.native.weights import panels_of
from tests.drawn import numbers

pytestmark = pytest.mark.skipif(library() is None, reason="no C compiler here")
FLOATS = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


def panels_by_torch(weight: Tensor, width: int) -> Tensor:
    """`[out, in]` -> `[out / width, in / G, width, G]`."""
    outputs, inputs = weight.shape
    group = 4 // weight.element_size()
    made = torch.zeros(-(-outputs // width) * width, inputs, dtype=weight.dtype)
    made[:outputs] = weight
    return made.view(-1, width, inputs // group, group).transpose(1, 2)


def parts_of(matrix: Tensor, cuts: list[int]) -> list[Tensor]:
    """The same matrix in parts, some of them of no row."""
    bounds = [0, *sorted(cut % (len(matrix) + 1) for cut in cuts), len(matrix)]
    return [matrix[first:last] for first, last in pairwise(bounds)]


@pytest.mark.parametrize("width", [16, 32, 64])
@FLOATS
@settings(max_examples=15)
@given(st.integers(1, 300), st.integers(1, 40), st.lists(st.integers(0, 300), max_size=2))
def test_panels(width: int, dtype: torch.dtype, outputs: int, sixteens: int, cuts: list[int]) -> None:
    weight = numbers(outputs, 16 * sixteens).to(dtype)
    assert torch.equal(panels_of(parts_of(weight, cuts), width), panels_by_torch(weight, width))


@FLOATS
@settings(max_examples=25)
@given(st.integers(1, 40), st.integers(1, 12), st.integers(1, 300), st.booleans(), st.integers(0, 10**6))
def test_floats_are_close(dtype: torch.dtype, rows: int, sixteens: int, outputs: int, bias: bool, seed: int) -> None:
    weight, x = (numbers(n, 16 * sixteens, seed=seed + n).to(dtype) for n in (outputs, rows))
    added = numbers(outputs, seed=1) if bias else None
    got = PackedMatrix.of(weight, added).multiply(x, None, torch.float32)
    want = (x.double() @ weight.double().t() + (0 if added is None else added)).float()
    assert torch.allclose(got, want, rtol=1e-4, atol=1e-3)


def parts_are_the_whole(
    packed: PackedMatrix, x: Tensor, step: Tensor | None = None, counts: Iterable[int] = range(2, 20)
) -> None:
    """Rows alone and in batches of several sizes, on one thread, have the bits that they have all together on three."""
    with exactly(3):
        together = packed.multiply(x, step, torch.float32)
    for first, count in [(i, 1) for i in range(len(x))] + [(3, n) for n in counts]:
        part = slice(first, first + count)
        with exactly(1):
            alone = packed.multiply(
                x[part].contiguous(), step if step is None else step[part].contiguous(), torch.float32
            )
        assert torch.equal(alone, together[part])


@FLOATS
def test_a_row_is_the_same_alone_and_among_others(dtype: torch.dtype) -> None:
    parts_are_the_whole(PackedMatrix.of(numbers(200, 96).to(dtype)), numbers(23, 96).to(dtype))


def test_bfloat16_comes_out_rounded_once() -> None:
    packed, x = PackedMatrix.of(numbers(80, 64)), numbers(5, 64)
    assert torch.equal(packed.multiply(x, None, torch.bfloat16), packed.multiply(x, None, torch.float32).bfloat16())


def test_a_copy_shares_the_panels() -> None:
    packed = PackedMatrix.of(numbers(64, 16))
    assert copy.deepcopy(packed) is packed
    assert packed.nbytes == 64 * 16 * 4


def test_types_that_are_not_known_are_left_to_torch() -> None:
    assert not multiplies(torch.float16)
    with pytest.raises(AssertionError, match="15 inputs; expected a multiple of 16"):
        PackedMatrix.of(numbers(4, 15))
