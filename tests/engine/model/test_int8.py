"""Integers add exactly: the same bits from both kernels, for a row alone and among others, and close to floats."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from engine.model.linear import int8
from engine.model.linear.activations import RowWise
from engine.model.linear.int8 import Int8Linear, OneDNN, PortableInt8, kernel, round_rows, round_weight
from tests.drawn import int8s, numbers

has_onednn = pytest.mark.skipif(kernel().name != "onednn", reason="no usable oneDNN operators here")


def unsigned(rows: torch.Tensor) -> torch.Tensor:
    """As kernels take them."""
    return (rows.int() + int8.OFFSET).to(torch.uint8)


@has_onednn
@settings(max_examples=60)
@given(st.integers(1, 64), st.integers(1, 300), st.integers(1, 300), st.integers(0, 10**6))
def test_both_kernels_give_the_same_bits(rows: int, width: int, outputs: int, seed: int) -> None:
    weight, x = int8s(outputs, width, seed=seed), unsigned(int8s(rows, width, seed=seed + 1))
    scale = numbers(outputs, seed=seed).abs() + 1e-3
    fast, plain = OneDNN(), PortableInt8()
    assert torch.equal(fast.multiply(x, fast.pack(weight), scale), plain.multiply(x, plain.pack(weight), scale))


@has_onednn
@pytest.mark.parametrize("shape", [(64, 5632), (5632, 64), (2048, 2048)])
def test_large_sums_are_exact(shape: tuple[int, int]) -> None:
    """All extremes: sums beyond what float32 holds exactly, and far beyond 16 bits."""
    weight, x = torch.full(shape, 127, dtype=torch.int8), torch.full((3, shape[1]), 127, dtype=torch.int8)
    x[1], x[2, ::2] = -127, -127
    scale, fast, x = torch.ones(shape[0]), OneDNN(), unsigned(x)
    assert torch.equal(fast.multiply(x, fast.pack(weight), scale), PortableInt8().multiply(x, weight, scale))


@settings(max_examples=40)
@given(st.integers(1, 64), st.integers(1, 200), st.integers(1, 200), st.booleans(), st.integers(0, 10**6))
def test_a_row_is_the_same_alone_and_among_others(m: int, width: int, outputs: int, bias: bool, seed: int) -> None:
    linear = Int8Linear.of(numbers(outputs, width), numbers(outputs, seed=1) if bias else None)
    for dtype in (torch.float32, torch.bfloat16):
        x = (numbers(1, m, width, seed=seed) * 3).to(dtype)
        together = linear(x)
        assert together.dtype == dtype
        for i in {0, m // 2, m - 1}:
            assert torch.equal(linear(x[:, i : i + 1])[0, 0], together[0, i])
            assert torch.equal(linear(x[:, i:])[0, 0], together[0, i])


def test_near_the_float_matmul() -> None:
    plain, x = nn.Linear(256, 96), numbers(5, 256)
    got, want = Int8Linear.of(plain.weight, plain.bias)(x), plain(x).detach()
    assert float((got - want).abs().max()) < 0.05 * float(want.std())


def test_rounding() -> None:
    x = torch.tensor([[0.0, 0, 0], [1, -2, 0.5], [1e-20, 0, -1e-20], [3e38, -3e38, 0]])
    rounded, scale = round_rows(x)
    rounded = rounded.int() - int8.OFFSET
    assert rounded.tolist() == [[0, 0, 0], [64, -127, 32], [127, 0, -127], [127, -127, 0]]
    assert torch.allclose(rounded * scale, x, rtol=1e-2)
    assert torch.equal(rounded, round_weight(x)[0].int())


def test_no_rows_and_more_dimensions() -> None:
    linear = Int8Linear.of(numbers(7, 16), None)
    assert linear(numbers(1, 0, 16)).shape == (1, 0, 7)
    assert linear(numbers(2, 3, 16)).shape == (2, 3, 7)
    assert linear(numbers(16)).shape == (7,)


def test_joined_is_bitwise_the_parts() -> None:
    parts = [Int8Linear.of(numbers(n, 40, seed=n), numbers(n, seed=1)) for n in (24, 8, 8)]
    x = numbers(1, 5, 40)
    joined = Int8Linear.joined(parts)
    assert torch.equal(joined(x), torch.cat([part(x) for part in parts], -1))
    assert joined.weight_int8 is None, "packed: the plain weights are not kept beside"


def test_without_the_operators_plain_torch_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    class Missing:
        def __init__(self) -> None:
            raise AttributeError("no operator")

    class Overflowing(PortableInt8):
        def multiply(self, rows: torch.Tensor, packed: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
            return super().multiply(rows, packed, scale).clamp(max=32767)

    for broken in (Missing, Overflowing):
        kernel.cache_clear()
        monkeypatch.setattr(int8, "OneDNN", broken)
        assert kernel().name == "portable"
    kernel.cache_clear()


@pytest.mark.parametrize("activation", [nn.SiLU(), nn.GELU(), nn.GELU("tanh"), nn.Sigmoid()])
@pytest.mark.parametrize("width", [40, 64, 3333, 40000])
def test_an_activation_does_not_see_the_place(activation: nn.Module, width: int) -> None:
    row_wise = RowWise(activation)
    x = (numbers(1, 11, 2 * width) * 4)[..., :width]  # strided, as a share of a joined matmul
    torch.set_num_threads(3)
    try:
        together = row_wise(x)
    finally:
        torch.set_num_threads(1)
    assert torch.allclose(together, activation(x), atol=1e-5)
    for i in (0, 4, 10):
        assert torch.equal(row_wise(x[:, i : i + 1].clone())[0, 0], together[0, i])
