"""The small fused kernels against plain torch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton", reason="triton is not installed")

from engine.kernels import reference, rows
from tests.interpreting import DEVICE

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3}
DTYPE = st.sampled_from([torch.float32, torch.float16])


def close(got, want):
    return torch.allclose(got, want, atol=TOLERANCE[want.dtype], rtol=TOLERANCE[want.dtype])


@settings(max_examples=30)
@given(
    seed=st.integers(0, 1000),
    num_rows=st.integers(0, 4),
    heads=st.tuples(st.integers(1, 2), st.integers(1, 3)),
    dims=st.sampled_from([(64, 64), (80, 80), (96, 24), (20, 10)]),
    normed=st.booleans(),
    dtype=DTYPE,
)
def test_rotate_and_write(seed, num_rows, heads, dims, normed, dtype):
    generator = torch.Generator().manual_seed(seed)
    (kv_heads, group), (dim, rotary) = heads, dims
    width = kv_heads * (group + 2) * dim
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


@settings(max_examples=30)
@given(st.integers(0, 1000), st.integers(0, 3), st.sampled_from([8, 96, 130]), st.booleans(), DTYPE)
def test_add_norm(seed, num_rows, size, adds, dtype):
    generator = torch.Generator().manual_seed(seed)
    x, residual = torch.randn(2, 1, num_rows, size, generator=generator).to(DEVICE, dtype)
    scale = torch.randn(size, generator=generator).to(DEVICE)
    got, got_sum = rows.add_norm(x, residual if adds else None, scale, 1e-5)
    want, want_sum = reference.add_norm(x, residual if adds else None, scale, 1e-5)
    assert close(got, want)
    assert torch.equal(got_sum, want_sum)


@settings(max_examples=30)
@given(
    st.integers(0, 1000), st.integers(0, 3), st.sampled_from([8, 1030]), st.sampled_from(["silu", "gelu_tanh"]), DTYPE
)
def test_gate(seed, num_rows, size, activation, dtype):
    both = (4 * torch.randn(1, num_rows, 2 * size, generator=torch.Generator().manual_seed(seed))).to(DEVICE, dtype)
    assert close(rows.gate(both, activation), reference.gate(both, activation))
