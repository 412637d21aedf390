"""4 bits: close to the floats, right to the last integer, a row's bits its own; loaded, saved and joined like int8."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.config import EngineConfig
from engine.errors import ModelError
from engine.model.linear import int4
from engine.model.linear.int4 import GROUP, LEVELS, Int4Linear, PortableInt4, levels_of, round_weight
from engine.model.linear.int8 import Int8Linear, has_int8, round_rows
from engine.model.quantize import load_quantised, quantise, save_quantised, weight_bytes
from engine.model.runner import load_model
from engine.native import library
from engine.startup.build import load
from models import embedded_target
from tests import zoo
from tests.drawn import numbers

CPU = torch.device("cpu")


def represented(levels: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """`[out, in]` floats."""
    return (levels_of(levels).float().unflatten(1, (-1, GROUP)) * scale[..., None]).flatten(1)


def off_by(levels: tuple[int, ...]) -> float:
    """The mean square of what rounding normal numbers to `levels` loses; each group has its best scale."""
    groups, at = numbers(20_000, GROUP), torch.tensor(levels, dtype=torch.float32)
    scaled = groups / groups.abs().amax(1, keepdim=True) * at[-1]
    chosen = at[torch.bucketize(scaled, (at[1:] + at[:-1]) / 2)]
    scale = (groups * chosen).sum(1, keepdim=True) / chosen.square().sum(1, keepdim=True)
    return float((groups - chosen * scale).square().mean())


def test_no_level_is_better_a_step_away() -> None:
    upper = LEVELS[8:]
    assert tuple(-level for level in reversed(upper)) == LEVELS[:8]
    least = off_by(LEVELS)
    assert least**0.5 < 0.091
    for i, step in itertools.product(range(7), (-1, 1)):
        moved = (*upper[:i], upper[i] + step, *upper[i + 1 :])
        assert off_by((*(-level for level in reversed(moved)), *moved)) > least * 0.999, moved


def test_rounding_keeps_what_it_can() -> None:
    weight = numbers(70, 4 * GROUP) * torch.logspace(-3, 3, 70)[:, None]
    levels, scale = round_weight(weight)
    assert (levels.shape, levels.dtype, scale.shape) == ((70, 2 * GROUP), torch.uint8, (70, 4))
    off = (represented(levels, scale) - weight).square().mean(1).sqrt() / weight.square().mean(1).sqrt()
    assert 0.05 < float(off.max()) < 0.11, "four bits of a normal number"
    exact = torch.tensor(LEVELS, dtype=torch.float32).repeat(GROUP // 16)[None] * 0.375  # a bfloat16
    assert torch.allclose(represented(*round_weight(exact)), exact)


def test_a_group_of_zeros_stays_zero() -> None:
    levels, scale = round_weight(torch.zeros(3, GROUP))
    assert not represented(levels, scale).abs().max() > 1e-20


@pytest.mark.skipif(library() is None, reason="no C compiler here")
@settings(max_examples=40, deadline=None)
@given(st.integers(1, 20), st.integers(1, 5), st.integers(1, 200), st.booleans(), st.integers(0, 10**6))
def test_c_computes_what_torch_does(rows: int, groups: int, outputs: int, bias: bool, seed: int) -> None:
    weight, x = numbers(outputs, groups * GROUP, seed=seed), numbers(rows, groups * GROUP, seed=seed + 1)
    linear = Int4Linear.of(weight, numbers(outputs) if bias else None)
    levels, scale = linear.weight_int8, linear.scale
    assert levels is not None
    got = linear(x)
    want = PortableInt4(levels, scale, linear.bias).multiply(*round_rows(x), torch.float32)
    assert torch.allclose(got, want, rtol=1e-4, atol=1e-4)


def without_c(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(int4, "multiplies", lambda _: False)


@pytest.mark.parametrize("way", ["c", "torch"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_is_the_same_alone_and_among_others(
    way: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    if way == "torch":
        without_c(monkeypatch)
    linear, x = Int4Linear.of(numbers(150, 3 * GROUP), numbers(150)), (numbers(1, 11, 3 * GROUP) * 3).to(dtype)
    together = linear(x)
    assert together.dtype == dtype
    for first, last in [(i, i + 1) for i in range(11)] + [(2, 5), (1, 8), (0, 10)]:
        assert torch.equal(linear(x[:, first:last]), together[:, first:last])


def test_joined_is_side_by_side() -> None:
    parts = [Int4Linear.of(numbers(n, 2 * GROUP, seed=n), numbers(n)) for n in (64, 16, 40)]
    joined, x = Int4Linear.joined(parts), numbers(1, 5, 2 * GROUP)
    assert isinstance(joined, Int4Linear)
    assert torch.equal(joined(x), torch.cat([part(x) for part in parts], -1))


def test_a_model_keeps_its_head_in_int8() -> None:
    model = load_quantised(embedded_target(), None, torch.float32, "int4")
    kinds = {name.rpartition(".")[2]: type(m) for name, m in model.named_modules() if isinstance(m, Int8Linear)}
    assert kinds.pop("lm_head") is Int8Linear
    assert set(kinds.values()) == {Int4Linear}
    assert has_int8(model)


def test_matrices_that_are_of_no_whole_groups_are_in_int8() -> None:
    model = zoo.ours(zoo.reference("llama"))
    quantise(model, "int4")
    assert {type(m) for m in model.modules() if isinstance(m, Int8Linear)} == {Int8Linear}, "32 inputs"


def test_saved_weights_are_the_same_bits(tmp_path: Path) -> None:
    save_quantised(embedded_target(), None, tmp_path / "out", "int4")
    at_load = load(EngineConfig(target="x"), embedded_target(), None, "int4", CPU)
    found = load(EngineConfig(target="x"), str(tmp_path / "out"), None, "native", CPU)
    ids = torch.arange(3, 40)[None]
    for model in (at_load, found):
        model.set_attn_implementation("eager")
    assert torch.equal(at_load(input_ids=ids).logits, found(input_ids=ids).logits)
    with pytest.raises(ModelError, match="has int4 weights already"):
        save_quantised(str(tmp_path / "out"), None, tmp_path / "again")


def test_bytes_are_counted_as_they_are() -> None:
    plain = load_model(embedded_target(), None, torch.float32, CPU)
    linear = Int4Linear.of(numbers(128, 2 * GROUP), None)
    assert linear.weight_int8 is not None
    assert linear.weight_int8.nbytes + linear.scale.nbytes == 128 * 2 * GROUP * 17 // 32
    int4, int8, native = (weight_bytes(plain, torch.float32, weights) for weights in ("int4", "int8", "native"))
    assert int4 < int8 < native
