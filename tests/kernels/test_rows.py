"""The small fused kernels against plain torch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton", reason="triton is not installed")

from pilotfish.engine.kernels import is_interpreted, reference, rows
from pilotfish.engine.kernels.reference import round_heads
from pilotfish.engine.kv.arena import SCALE_BYTES, floats_of
from tests.interpreting import DEVICE

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3}
DTYPE = st.sampled_from([torch.float32, torch.float16])


def close(got, want):
    return torch.allclose(got, want, atol=TOLERANCE[want.dtype], rtol=TOLERANCE[want.dtype])


@settings(max_examples=8)
@given(
    seed=st.integers(0, 1000),
    num_rows=st.integers(0, 4),
    heads=st.tuples(st.integers(0, 2), st.integers(1, 3)),  # a layer that reads the keys of another has none
    dims=st.sampled_from([(64, 64), (80, 80), (96, 24), (20, 10)]),
    normed=st.booleans(),
    dtype=DTYPE,
)
def test_rotate_and_write(seed, num_rows, heads, dims, normed, dtype):
    generator = torch.Generator().manual_seed(seed)
    (kv_heads, group), (dim, rotary) = heads, dims
    width = (max(kv_heads, 1) * group + kv_heads * 2) * dim
    projected = torch.randn(num_rows, width + 8, generator=generator).to(DEVICE, dtype)[:, :width]  # strided rows
    angles = torch.randn(num_rows, rotary // 2, generator=generator).repeat(1, 2).to(DEVICE)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    kv_rows = torch.randperm(9, generator=generator)[:num_rows].to(DEVICE)
    arenas = torch.randn(2, 9, kv_heads, dim, generator=generator).to(DEVICE, dtype)
    norms = tuple(torch.randn(2, dim, generator=generator).to(DEVICE)) if normed else None
    (k, v), (want_k, want_v) = arenas.clone(), arenas.clone()
    got = rows.rotate_and_write(projected, cos, sin, kv_rows, k, v, norms, 1e-5)
    want = reference.rotate_and_write(projected, cos, sin, kv_rows, want_k, want_v, norms, 1e-5)
    assert close(got, want)
    assert close(k, want_k)
    assert torch.equal(v, want_v)
    untouched = [i for i in range(9) if i not in kv_rows.tolist()]
    assert torch.equal(k[untouched], arenas[0][untouched])
    codes = torch.zeros(2, 9, kv_heads, SCALE_BYTES + dim, dtype=torch.int8, device=DEVICE)
    query = rows.rotate_and_write(projected, cos, sin, kv_rows, *codes, norms, 1e-5, scaled=SCALE_BYTES)
    assert torch.equal(query, got)
    assert all(are_codes_of(mine[kv_rows], heads[kv_rows]) for mine, heads in zip(codes, (k, v), strict=True))
    assert not codes[:, untouched].any()


def are_codes_of(got, heads):
    """Whether `got` is `heads` rounded to int8: by the interpreter bit by bit, by a card but for the side of a tie."""
    want = round_heads(heads)
    exact = heads.float() / got[..., :SCALE_BYTES].contiguous().view(torch.float32)
    nearest = (got[..., SCALE_BYTES:] - exact).abs() <= 0.5 + 1e-4
    same_scale = torch.equal(got[..., :SCALE_BYTES], want[..., :SCALE_BYTES])
    return same_scale and bool(nearest.all()) and (torch.equal(got, want) or not is_interpreted())


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_a_value_that_is_no_number_stays_none_in_int8():
    projected = torch.randn(4, 3 * 20, device=DEVICE)
    for i, number in enumerate((0.0, float("nan"), float("inf"))):
        projected[i, 40 if number else slice(40, 60)] = number
    codes, angles = torch.zeros(2, 4, 1, 24, dtype=torch.int8, device=DEVICE), torch.zeros(4, 20, device=DEVICE)
    rows.rotate_and_write(projected, angles, angles, torch.arange(4, device=DEVICE), *codes, scaled=SCALE_BYTES)
    want = round_heads(projected[:, None, 40:])
    assert torch.equal(codes[1][..., SCALE_BYTES:], want[..., SCALE_BYTES:])
    assert torch.equal(floats_of(codes[1], torch.float32).isnan(), floats_of(want, torch.float32).isnan())


def is_rounded(got, x):
    """Whether `got` has the bits of `x` rounded in plain torch: the same scales, the same 8-bit floats.

    Triton's interpreter rounds a number halfway between two away from zero, where a card takes the even one; it loses
    the carry of one that is rounded up to a power of two, which leaves half of it; it cuts the smallest numbers,
    of fewer bits, instead of rounding them; and it makes up to 2**-6 of float32's own smallest, which are 0 here. Such
    numbers may differ, there alone.
    """
    want = reference.round_rows(x)
    mine, other = got.rows.float(), want.rows.float()
    exact = x.reshape(-1, x.shape[-1]).float() / want.scale  # but for numpy's exp, which hangs on a number's place
    halfway = ((mine + other) / 2 - exact).abs() <= 1e-5 * exact.abs()
    no_carry = (2 * mine == other) & (other.frexp().mantissa.abs() == 0.5)
    cut = (exact.abs() < 2**-6) & ((mine - other).abs() <= 2**-9)
    lost = (exact.abs() < torch.finfo(torch.float32).tiny) & (mine.abs() <= 2**-6)
    excused = (halfway | no_carry | cut | lost) & is_interpreted()
    same_kind = (got.shape, got.dtype) == (want.shape, want.dtype)
    return (
        same_kind
        and torch.allclose(got.scale, want.scale, rtol=1e-6, atol=0)
        and not ((mine != other) & ~excused).any()
    )


@settings(max_examples=8)
@given(st.integers(0, 1000), st.integers(0, 3), st.sampled_from([8, 96, 130]), st.sampled_from("nab"), DTYPE)
def test_add_norm(seed, num_rows, size, kind, dtype):
    """Of a row alone, of a sum, of a sum whose one part goes through a norm first."""
    generator = torch.Generator().manual_seed(seed)
    x, residual = torch.randn(2, 1, num_rows, size, generator=generator).to(DEVICE, dtype)
    scale, other = torch.randn(2, size, generator=generator).to(DEVICE)
    args = x, None if kind == "n" else residual, scale, 1e-5, (other, 1e-2) if kind == "b" else None
    got, got_sum = rows.add_norm(*args)
    want, want_sum = reference.add_norm(*args)
    assert close(got, want)
    assert close(got_sum, want_sum) if kind == "b" else torch.equal(got_sum, want_sum)
    rounded, rounded_sum = rows.add_norm_round(*args)
    assert torch.equal(rounded_sum, got_sum)
    assert is_rounded(rounded, got), "the rows that the same kernel gives unrounded, then rounded"


@settings(max_examples=8)
@given(st.integers(0, 1000), st.integers(0, 3), st.sampled_from([8, 130]), st.sampled_from([1e-6, 1.0, 1e4]))
def test_round_rows(seed, num_rows, size, scale):
    x = torch.randn(1, num_rows, size + 2, generator=torch.Generator().manual_seed(seed)).to(DEVICE) * scale
    x[:, :1, 3:] = 0
    x = x.bfloat16()[..., :size]  # strided rows
    assert is_rounded(rows.round_rows(x), x)
    zeros = rows.round_rows(torch.zeros(1, 2, size, dtype=torch.bfloat16, device=DEVICE))
    assert not zeros.rows.float().any()
    assert zeros.scale.isfinite().all()


@settings(max_examples=8)
@given(
    st.integers(0, 1000), st.integers(0, 3), st.sampled_from([8, 1030]), st.sampled_from(["silu", "gelu_tanh"]), DTYPE
)
def test_gate(seed, num_rows, size, activation, dtype):
    both = (4 * torch.randn(1, num_rows, 2 * size, generator=torch.Generator().manual_seed(seed))).to(DEVICE, dtype)
    got = rows.gate(both, activation)
    assert close(got, reference.gate(both, activation))
    assert is_rounded(rows.gate_round(both, activation), got)
