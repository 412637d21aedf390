"""Rows and weights as integers: close to the floats, a row's bits its own, the same bits from C and torch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from pilotfish.engine.machine.threads import exactly
from pilotfish.engine.model.decoder.decoder import DecoderModel
from pilotfish.engine.model.decoder.families.table import architecture_for
from pilotfish.engine.model.decoder.weights import WeightReader
from pilotfish.engine.model.linear import grouped
from pilotfish.engine.model.linear.activations import RowWise
from pilotfish.engine.model.linear.grouped import GroupedLinear, round_rows
from pilotfish.engine.model.linear.rounding import _in_torch, round_weight
from pilotfish.engine.native.weights import GroupedCodes
from tests import zoo
from tests.drawn import numbers

BITS = pytest.mark.parametrize("bits", [4, 5, 6, 8])


def rounded(outputs: int, inputs: int, bits: int, bias: bool = False) -> GroupedLinear:
    return GroupedLinear(round_weight(numbers(outputs, inputs), bits, numbers(outputs) if bias else None))


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 9), st.integers(1, 70), st.sampled_from([0.0, 1.0, 30.0, 3000.0]), st.integers(0, 10**6))
def test_rows_of_c_have_the_bits_of_torch(count: int, sixteens: int, outlier: float, seed: int) -> None:
    x = numbers(count, 16 * sixteens, seed=seed) * torch.logspace(-20, 20, count)[:, None]
    x[:, 3] *= outlier
    x[0], x[-1, 4:7] = 0, torch.tensor([0.5, 1.5, 127.0])  # ties, in a row whose step may be 1
    for dtype in (torch.float32, torch.bfloat16):
        part = torch.cat([x, x], -1).to(dtype)[:, : 16 * sixteens]  # rows that lie apart
        got = round_rows(part)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(grouped, "rows_for", lambda *_: None)
            want = round_rows(part)
        assert all(map(torch.equal, got, want))
        assert got[0].dtype == torch.int16
        assert int(got[0].int().abs().max()) <= 32512


def test_a_large_number_takes_nothing_from_the_others() -> None:
    x = numbers(5, 512)
    alone, step = round_rows(x)
    assert float((alone * step - x).abs().max()) <= 0.5001 * float(step.max())
    x[:, 7] = 200.0
    beside, step = round_rows(x)
    off = (beside * step - x).abs()
    assert float(off.max()) <= 0.5001 * float(step.max())
    assert float(off.max()) < 0.02, "one scale by the largest number would be off by 0.8"


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
@pytest.mark.parametrize("width", [48, 50])
def test_the_step_is_nan_for_invalid_rows(wrong: float, width: int) -> None:
    x = numbers(3, width)
    x[1, 5] = wrong
    assert round_rows(x)[1].isfinite().flatten().tolist() == [True, False, True]


@BITS
@settings(max_examples=12, deadline=None)
@given(st.integers(1, 30), st.integers(1, 20), st.integers(0, 10**6))
def test_weights_of_c_have_the_bits_of_torch(bits: int, outputs: int, sixteens: int, seed: int) -> None:
    weight = numbers(outputs, 16 * sixteens, seed=seed) * torch.logspace(-6, 2, outputs)[:, None]
    weight[0], weight[outputs // 2, :16], weight[-1] = 0, 0.5, weight[-1].abs()
    for dtype in (torch.float32, torch.bfloat16):
        wider = torch.cat([weight, weight], 1).to(dtype)[:, : 16 * sixteens]  # rows that lie apart
        got, want = round_weight(wider, bits), _in_torch(wider, bits, None)
        for name in ("codes", "scale", "offset", "steps", "zeros"):
            one, other = getattr(got, name), getattr(want, name)
            assert (one is None and other is None) or torch.equal(one, other), name


@BITS
def test_rounding_keeps_what_it_can(bits: int) -> None:
    weight = numbers(70, 256) * torch.logspace(-3, 1, 70)[:, None]
    found = round_weight(weight, bits)
    found.check()
    off = (found.dequantised() - weight).square().mean(1).sqrt() / weight.square().mean(1).sqrt()
    assert float(off.max()) < {4: 0.09, 5: 0.045, 6: 0.023, 8: 0.01}[bits]


@BITS
@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -float("inf")])
def test_a_scale_is_not_finite_for_invalid_groups(bits: int, wrong: float) -> None:
    weight = numbers(5, 128)
    weight[3, 70] = wrong
    scale = round_weight(weight, bits).scale
    assert scale[:3].isfinite().all()
    assert scale[4].isfinite().all()
    assert not scale[3].isfinite().all()


@pytest.mark.parametrize("way", ["c", "torch"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@BITS
def test_a_row_is_the_same_alone_and_among_others(
    bits: int, way: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    if way == "torch":
        monkeypatch.setattr(grouped, "multiplies", lambda _: False)
    linear, x = rounded(150, 192, bits, bias=True), (numbers(1, 11, 192) * 3).to(dtype)
    x[0, 3, 5] = 90
    together = linear(x)
    assert together.dtype == dtype
    for first, last in [(i, i + 1) for i in range(11)] + [(2, 5), (1, 8), (0, 10)]:
        assert torch.equal(linear(x[:, first:last]), together[:, first:last])


@pytest.mark.parametrize("inputs", [16, 40])
def test_no_rows_and_more_dimensions(inputs: int) -> None:
    linear = rounded(7, inputs, 8)
    assert linear(numbers(1, 0, inputs)).shape == (1, 0, 7)
    assert linear(numbers(2, 3, inputs)).shape == (2, 3, 7)
    assert linear(numbers(inputs)).shape == (7,)


def test_a_model_in_four_bits_keeps_its_head_and_shared_keys_and_values_in_eight() -> None:
    model, codes = zoo.reference("llama"), dict[str, GroupedCodes]()
    architecture = architecture_for(model.config)
    DecoderModel(architecture, model.config, WeightReader(model.state_dict(), torch.float32, "int4", codes=codes))
    bits = {name.split(".")[-2]: each.bits for name, each in codes.items()}
    assert {bits.pop(name) for name in ("lm_head", "k_proj", "v_proj")} == {8}
    assert bits == dict.fromkeys(("embed_tokens", "q_proj", "o_proj", "gate_proj", "up_proj", "down_proj"), 4)


@pytest.mark.parametrize("activation", [nn.SiLU(), nn.GELU(), nn.GELU("tanh"), nn.Sigmoid()])
@pytest.mark.parametrize("width", [40, 3333, 40000])
def test_an_activation_does_not_see_the_place(activation: nn.Module, width: int) -> None:
    row_wise = RowWise(activation)
    x = (numbers(1, 11, 2 * width) * 4)[..., :width]  # strided, as a share of a joined matmul
    with exactly(3):
        together = row_wise(x)
    assert torch.allclose(together, activation(x), atol=1e-5)
    for i in (0, 4, 10):
        assert torch.equal(row_wise(x[:, i : i + 1].clone())[0, 0], together[0, i])
