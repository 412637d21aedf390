"""Float weights lie in panels as in matmul.h, in one part or several."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.native import PackedMatrix, library
from engine.native.weights import panels_of
from tests.drawn import numbers

pytestmark = pytest.mark.skipif(library() is None, reason="no C compiler here")


def panels_by_torch(weight: Tensor, width: int) -> Tensor:
    """`[out, in]` -> `[out / width, in / G, width, G]`."""
    outputs, inputs = weight.shape
    group = 4 // weight.element_size()
    made = torch.zeros(-(-outputs // width) * width, inputs, dtype=weight.dtype)
    made[:outputs] = weight
    return made.view(-1, width, inputs // group, group).transpose(1, 2)


def parts_of(matrix: Tensor, cuts: list[int]) -> list[Tensor]:
    """The same matrix in parts, one of them of no row."""
    bounds = [0, *sorted(cut % (len(matrix) + 1) for cut in cuts), len(matrix)]
    return [matrix[first:last] for first, last in pairwise(bounds)]


@pytest.mark.parametrize("width", [16, 32, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@settings(max_examples=30, deadline=None)
@given(st.integers(1, 300), st.integers(1, 40), st.lists(st.integers(0, 300), max_size=2))
def test_panels(width: int, dtype: torch.dtype, outputs: int, sixteens: int, cuts: list[int]) -> None:
    weight = numbers(outputs, 16 * sixteens).to(dtype)
    assert torch.equal(panels_of(parts_of(weight, cuts), width), panels_by_torch(weight, width))


def test_parts_are_one_matrix() -> None:
    weight, rows = numbers(150, 64), numbers(3, 64)
    whole, parts = (PackedMatrix.of(made) for made in (weight, weight.split([5, 100, 45])))
    assert torch.equal(*(made.multiply(rows, None, torch.float32) for made in (whole, parts)))
