"""Codes in groups in our C: the bits that plain torch gives, and every row's bits its own."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pilotfish.engine.model.linear.grouped import PortableGrouped
from pilotfish.engine.native import PackedMatrix, library
from pilotfish.engine.native.weights import GroupedCodes
from tests.drawn import int16s, numbers
from tests.drawn_codes import FORMS, codes
from tests.engine.native.test_weights import parts_are_the_whole

pytestmark = pytest.mark.skipif(library() is None, reason="no C compiler here")
FLOATS = [torch.float16, torch.bfloat16, torch.float32]
HIGH = st.sampled_from(["no", "some", "all"])  # where rows have numbers beyond 8 bits
BITS = pytest.mark.parametrize("bits", [4, 5, 6, 8])


def packed(drawn: GroupedCodes) -> PackedMatrix:
    return PackedMatrix.of_groups(drawn)


def check(drawn: GroupedCodes, x: torch.Tensor, step: torch.Tensor | None = None) -> None:
    """The bits of C are those of torch."""
    step = torch.ones(len(x), 1) if step is None else step
    got = packed(drawn).multiply(x, step, torch.float32)
    assert torch.equal(got, PortableGrouped(drawn).multiply(x, step, torch.float32))


@pytest.mark.parametrize("form", FORMS)
@BITS
@settings(max_examples=8, deadline=None)
@given(
    st.integers(1, 20), st.sampled_from([16, 32, 48, 64, 128]), st.integers(1, 9), st.integers(1, 150),
    st.sampled_from(FLOATS), HIGH, st.integers(0, 10**6),
)  # fmt: skip
def test_c_gives_the_bits_of_torch(
    form: str, bits: int, rows: int, group: int, groups: int, outputs: int, dtype: torch.dtype, high: str, seed: int
) -> None:
    group *= 2 if bits == 5 else 1  # of 5 bits 32 inputs lie together
    drawn = codes(outputs, group * groups, form, bits, group, dtype, seed)
    check(drawn, int16s(rows, group * groups, high, seed), numbers(rows, 1, seed=seed).abs())


@BITS
def test_sums_of_a_whole_row_of_extremes_are_exact(bits: int) -> None:
    """Far beyond 16 bits, and beyond what float32 holds: one group, and rows as large as rounding makes them."""
    inputs = 5632
    drawn = codes(70, inputs, "zeros", bits, group=inputs)
    x = torch.full((4, inputs), 127, dtype=torch.int16)
    x[1], x[2, ::2] = -127, -127
    x[3], x[3, ::700] = -44, 32512  # as `round_rows` makes them of a row with a few large numbers
    check(drawn, x)


@pytest.mark.parametrize("form", FORMS)
@BITS
def test_sums_of_a_group_of_the_largest_rows_are_exact(form: str, bits: int) -> None:
    """All of them at the limits of 16 bits, and low bytes of -128, whose high bytes are one more."""
    drawn = codes(70, 512, form, bits, group=128)
    x = torch.full((5, 512), 32512, dtype=torch.int16)
    x[1], x[2, ::2], x[3], x[4] = -32512, -32512, -128, 32384
    x[3, ::4], x[3, 1::4], x[4, ::2] = 128, 127, -32384
    check(drawn, x)


@BITS
def test_one_high_byte_anywhere(bits: int) -> None:
    drawn = codes(70, 64, "scale", bits)
    for place in range(0, 64, 3):
        x = int16s(3, 64, "no")
        x[1, place], x[2, place] = 1000, -30000
        check(drawn, x)


@pytest.mark.parametrize("form", FORMS)
@BITS
def test_a_row_is_the_same_alone_and_among_others(form: str, bits: int) -> None:
    x = int16s(23, 96)
    x[::3] %= 128  # rows without high bytes among others
    parts_are_the_whole(packed(codes(200, 96, form, bits)), x, numbers(23, 1).abs())


@pytest.mark.parametrize(
    ("form", "bits", "group", "file"),
    [
        ("scale", 8, 32, 8.5),
        ("scale", 4, 32, 4.5),
        ("scale", 5, 32, 5.5),
        ("zeros", 4, 128, 4.15625),
        ("two levels and offset", 4, 32, 4.5),
        ("two levels and offset", 5, 32, 5.5),
        ("two levels", 6, 16, 6.5625),
    ],
    ids=["q8_0", "q4_0", "q5_0", "int4", "q4_K", "q5_K", "q6_K"],
)
def test_panels_take_the_bits_of_the_file(form: str, bits: int, group: int, file: float) -> None:
    matrix = packed(codes(64, 256, form, bits, group))
    assert file <= matrix.nbytes * 8 / (64 * 256) < 1.03 * file
