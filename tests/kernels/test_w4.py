"""The matmul in 4 bits against the product with the dequantised matrix."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

pytest.importorskip("triton", reason="triton is not installed")

from pilotfish.engine.kernels import reference, w4
from pilotfish.engine.kernels.args import GROUP, TILE_OUTPUTS
from tests.interpreting import DEVICE


def problem(seed, num_rows, groups, outputs, has_bias):
    """Random words are random levels."""
    generator = torch.Generator().manual_seed(seed)
    words = torch.randint(-(2**15), 2**15, (groups, outputs, GROUP // 4), generator=generator, dtype=torch.int16)
    scale = torch.randn(groups, outputs, generator=generator).half() / 50
    x = torch.randn(num_rows, groups * GROUP, generator=generator).half()
    bias = torch.randn(outputs, generator=generator).half() if has_bias else None
    arrived = torch.zeros(-(-outputs // TILE_OUTPUTS), dtype=torch.int32)
    return [None if tensor is None else tensor.to(DEVICE) for tensor in (x, words, scale, bias, arrived)]


@settings(max_examples=4)
@given(
    seed=st.integers(0, 1000),
    num_rows=st.sampled_from([0, 1, 2, 5, 16, 17, 40, 64, 65, 70]),
    groups=st.sampled_from([1, 2, 9, 16]),
    outputs=st.sampled_from([8, 64, 72, 130]),
    has_bias=st.booleans(),
)
@example(seed=0, num_rows=17, groups=9, outputs=72, has_bias=True)  # the last split of the groups is a shorter one
def test_equals_reference(seed, num_rows, groups, outputs, has_bias):
    given_ = problem(seed, num_rows, groups, outputs, has_bias)
    got, want = w4.w4_matmul(*given_), reference.w4_matmul(*given_)
    assert got.shape == (num_rows, outputs)
    assert torch.allclose(got, want, rtol=2e-3, atol=2e-3 * float(want.float().std()) if want.numel() else 0)
    assert not given_[-1].any(), "counts are as they were, for the next pass"


def test_every_level_is_exact():
    """One input at a time, scales of 1: the matrix itself, its levels -8 to 7."""
    x, words, _, _, arrived = problem(3, 1, 2, 72, False)
    x = torch.eye(2 * GROUP, dtype=x.dtype, device=DEVICE)
    scale = torch.ones(2, 72, device=DEVICE)
    levels = reference.w4_levels(words)
    assert sorted(levels.unique().tolist()) == list(range(-8, 8))
    assert torch.equal(w4.w4_matmul(x, words, scale, None, arrived), levels.t().to(x.dtype))


def test_groups_that_are_split_are_added_in_order():
    """Few outputs and many groups: several programs share a row's sums, and whoever is last adds them up.

    Twice the same bits, and those of another number of rows for the same tile.
    """
    x, words, scale, _, arrived = problem(5, 9, 16, 64, False)
    first = w4.w4_matmul(x, words, scale, None, arrived)
    assert torch.equal(w4.w4_matmul(x, words, scale, None, arrived), first)
    zeros = torch.zeros(16, x.shape[1], dtype=x.dtype, device=DEVICE)
    zeros[:9] = x
    assert torch.equal(w4.w4_matmul(zeros, words, scale, None, arrived)[:9], first)
    assert torch.allclose(first, reference.w4_matmul(x, words, scale, None, arrived), rtol=2e-3, atol=2e-3)
