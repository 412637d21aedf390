"""Published codes in groups: the weights that the format names, a row's bits its own, joined and stacked like int8."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from pilotfish.engine.model.linear import grouped
from pilotfish.engine.model.linear.grouped import GroupedLinear, SideBySide, round_rows
from pilotfish.engine.native.weights import GroupedCodes
from tests.drawn import numbers
from tests.drawn_codes import FORMS, codes

INPUTS, GROUP = 96, 32


def element(drawn: GroupedCodes, row: int, column: int) -> float:
    """One weight by the format's words, in float64; `column` is of the codes."""
    if drawn.bits != 4:
        code = int(drawn.codes[row, column])
    else:
        both = int(drawn.codes[row, column // 2])
        code = both >> 4 if column % 2 else both & 15
    group, block = column // drawn.group, column * drawn.scale.shape[1] // drawn.in_features
    step = float(drawn.scale[row, block]) * (1 if drawn.steps is None else int(drawn.steps[row, group]))
    if drawn.zeros is not None and drawn.offset is None:
        return (code - int(drawn.zeros[row, group])) * step
    if drawn.offset is None:
        return (code - {4: 8, 5: 16, 6: 32, 8: 0}[drawn.bits]) * step
    times = 1 if drawn.zeros is None else int(drawn.zeros[row, group])
    return code * step + float(drawn.offset[row, block]) * times


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("bits", [4, 5, 6, 8])
def test_weights_and_products_are_those_of_the_format(form: str, bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In C, which unpacks once for many rows, and in torch, which has the same bits."""
    drawn = replace(codes(70, INPUTS, form, bits), bias=numbers(70))
    linear, x = GroupedLinear(drawn), numbers(2, 20, INPUTS)
    weight = linear.codes.dequantised().double()
    few = (0, 1, 35, 69)
    want = [[element(drawn, row, column) for column in range(INPUTS)] for row in few]
    assert torch.allclose(weight[few, :], torch.tensor(want).double(), rtol=1e-6)
    (rows, step), product = round_rows(x.view(40, INPUTS)), linear(x).view(40, 70)
    want = rows.double() * step @ weight.t() + numbers(70)
    assert torch.allclose(product.double(), want, rtol=1e-4, atol=1e-4 * float(want.std()))
    assert torch.equal(linear(x[0, 7:11]), product[7:11])
    monkeypatch.setattr(grouped, "multiplies", lambda _: False)
    assert torch.equal(GroupedLinear(drawn)(x).view(40, 70), product)


@pytest.mark.parametrize("in_c", [True, False])
def test_columns_in_another_order_read_their_inputs(in_c: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not in_c:
        monkeypatch.setattr(grouped, "multiplies", lambda _: False)
    order = torch.randperm(INPUTS, generator=torch.Generator().manual_seed(0))
    drawn = codes(70, INPUTS, "zeros")
    plain, moved = GroupedLinear(drawn), GroupedLinear(replace(drawn, order=order))
    assert torch.equal(moved.codes.dequantised()[:, order], plain.codes.dequantised())
    x = numbers(5, INPUTS)
    assert torch.equal(moved(x), plain(x[:, order]))


@pytest.mark.parametrize("form", FORMS)
def test_joined_is_side_by_side(form: str) -> None:
    drawn = [replace(codes(n, INPUTS, form, seed=n), bias=numbers(n)) for n in (64, 16, 40)]
    parts, alone = [GroupedLinear(each) for each in drawn], [GroupedLinear(each) for each in drawn]
    assert GroupedLinear.joins(parts)
    joined, x = GroupedLinear.joined(parts), numbers(1, 5, INPUTS)
    assert torch.equal(joined(x), torch.cat([part(x) for part in alone], -1))


def test_only_one_form_and_one_order_are_joined() -> None:
    plain, order = codes(20, INPUTS, "scale"), torch.arange(INPUTS).flip(0)
    others = [
        codes(20, INPUTS, "scale", bits=8),
        codes(20, INPUTS, "scale", bits=6),
        codes(20, INPUTS, "scale", group=16),
        codes(20, INPUTS, "scale", dtype=torch.bfloat16),
        codes(20, INPUTS, "zeros"),
        replace(plain, order=order),
    ]
    for other in others:
        assert not GroupedLinear.joins([GroupedLinear(plain), GroupedLinear(other)])
    same = [GroupedLinear(replace(plain, order=each)) for each in (order, order.clone())]
    assert GroupedLinear.joins(same)
    assert GroupedLinear.joined(same)(numbers(3, INPUTS)).shape == (3, 40)


def test_matrices_of_several_forms_lie_side_by_side() -> None:
    """Neighbours of one form are joined; rows are rounded once, and nothing else changes a bit."""
    order = torch.arange(INPUTS).flip(0)
    drawn = [codes(n, INPUTS, "scale", seed=n) for n in (64, 16)]
    drawn += [codes(40, INPUTS, "scale", bits=8), replace(codes(24, INPUTS, "zeros", group=16), order=order)]
    alone, x = [GroupedLinear(each) for each in drawn], numbers(1, 5, INPUTS)
    together = SideBySide.of([GroupedLinear(each) for each in drawn])
    assert isinstance(together, SideBySide)
    assert [part.out_features for part in together.parts] == [80, 40, 24]
    assert torch.equal(together(x), torch.cat([part(x) for part in alone], -1))
    assert together(x[:, :0]).shape == (1, 0, 144)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"bits": 3}, "codes: torch.uint8 with bits 3"),
        ({"bits": 8}, "codes: torch.uint8 with bits 8"),
        ({"scale": numbers(70, 3).double()}, "scale: torch.float64"),
        ({"scale": numbers(69, 3)}, r"scale: \[69, 3\]"),
        ({"scale": numbers(70, 12)}, "groups of 8 inputs"),
        ({"bits": 5, "codes": torch.zeros(70, INPUTS, dtype=torch.uint8), "scale": numbers(70, 6)}, "multiple of 32"),
        ({"scale": torch.full((70, 3), torch.inf)}, "scale: has NaN or infinite values"),
        ({"offset": numbers(70, 1)}, r"offset: \[70, 1\]"),
        ({"zeros": torch.zeros(70, 4, dtype=torch.uint8)}, r"zeros: \[70, 4\]"),
        ({"order": torch.zeros(INPUTS, dtype=torch.int64)}, "order: not a permutation of 96 inputs"),
    ],
)
def test_inconsistent_tensors_are_reported_by_name(change: dict[str, object], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        GroupedLinear(replace(codes(70, INPUTS, "scale"), **change))  # type: ignore[arg-type]
