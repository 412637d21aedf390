"""A mixture's experts by our kernels against plain torch, and the places that they are given."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton", reason="triton is not installed")

from pilotfish.engine.kernels import experts, reference
from pilotfish.engine.kernels.args import FusedWeights
from pilotfish.engine.model.linear.experts import FusedExperts
from pilotfish.engine.native.experts import ExpertGate
from tests.interpreting import DEVICE
from tests.kernels.test_attention import LOOKING

TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3}
GATES = (
    ExpertGate(),
    ExpertGate(linear=1.6, cubic=0.07, limit=2.0),
    ExpertGate(squared=True, ungated=True),
    ExpertGate(linear=1.702, limit=1.5, plus=1.0, interleaved=True),
)


def stacks_of(
    gate: ExpertGate,
    seed: int = 0,
    num: int = 5,
    sizes: tuple[int, int, int] = (48, 40, 72),
    dtype: torch.dtype = torch.float32,
    *,
    transposed: bool = False,
    has_bias: bool = False,
) -> FusedWeights:
    """Random matrices of these many inputs, numbers between, and outputs."""
    generator = torch.Generator().manual_seed(seed)
    inputs, inner, outputs = sizes
    drawn = []
    for shape in ((inner if gate.ungated else 2 * inner, inputs), (outputs, inner)):
        matrix = torch.randn(num, *(shape[::-1] if transposed else shape), generator=generator) / 5
        bias = torch.randn(num, shape[0], generator=generator) if has_bias else None
        drawn.append((matrix.to(DEVICE, dtype), None if bias is None else bias.to(DEVICE, dtype)))
    (up, up_bias), (down, down_bias) = drawn
    biases = None if up_bias is None else (up_bias, down_bias)
    return FusedExperts(up, down, biases, gate, experts.mix, transposed=transposed).fused


def batch(seed: int, rows: int, each: int, num: int, inputs: int, dtype: torch.dtype = torch.float32):
    """Some of the chosen are no experts."""
    generator = torch.Generator().manual_seed(seed + 1)
    x = torch.randn(rows, inputs, generator=generator).to(DEVICE, dtype)
    chosen = torch.randint(-1, num + 1, (rows, each), generator=generator).to(DEVICE)
    return x, chosen, torch.rand(rows, each, generator=generator).to(DEVICE)


@settings(max_examples=5, phases=LOOKING)
@given(
    seed=st.integers(0, 1000),
    rows=st.sampled_from([0, 1, 2, 9, 24]),
    each=st.sampled_from([1, 2, 3]),
    num=st.sampled_from([1, 2, 5, 8]),
    gate=st.sampled_from(GATES),
    dtype=st.sampled_from([torch.float32, torch.float16]),
    transposed=st.booleans(),
    has_bias=st.booleans(),
)
def test_equals_reference(seed, rows, each, num, gate, dtype, transposed, has_bias):
    stacks = stacks_of(gate, seed, num, dtype=dtype, transposed=transposed, has_bias=has_bias)
    x, chosen, weights = batch(seed, rows, each, num, 48, dtype)
    got, want = experts.mix(x, chosen, weights, stacks), reference.mix(x, chosen, weights, stacks)
    assert (got.shape, got.dtype) == ((rows, 72), dtype)
    assert torch.allclose(got, want, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.slow
def test_long_sums_and_many_outputs():
    """More inputs, outputs and places than one program takes."""
    stacks = stacks_of(ExpertGate(), 3, 2, (200, 150, 600))
    given_ = batch(3, 70, 2, 2, 200)
    want = reference.mix(*given_, stacks)
    assert torch.allclose(experts.mix(*given_, stacks), want, rtol=1e-5, atol=1e-5 * float(want.std()))


@pytest.mark.parametrize("places", [16, 64])
def test_each_place_is_in_one_tile(places):
    """As many tiles as are foretold are enough, whoever chooses whom; the others are idle."""
    for num_places, num in ((1, 128), (200, 5), (150, 40), (64, 1)):
        for chosen in (torch.arange(num_places) % (num + 1), torch.zeros(num_places, dtype=torch.int64)):
            tiles = min(num_places, num_places // places + num)
            order, table = experts._grouped(chosen.to(DEVICE), num, places, tiles)
            used = [(expert, first, count) for expert, first, count in table.tolist() if expert >= 0]
            assert all(0 < count <= places for _, _, count in used)
            found = [(p, expert) for expert, first, count in used for p in order[first : first + count].tolist()]
            assert sorted(found) == [(p, e) for p, e in enumerate(chosen.tolist()) if e < num]


def test_a_rows_bits_are_its_own():
    """Alone or among others, in numbers whose sums are exact in any order: the interpreter's matmul is the CPU's."""
    stacks = stacks_of(ExpertGate(squared=True, ungated=True), 1)
    for matrix in (stacks.up, stacks.down):
        matrix.copy_(matrix.mul(4).round())
    x, chosen, weights = batch(1, 30, 2, 5, 48)
    x = x.round()
    together = experts.mix(x, chosen, weights, stacks)
    for i in (7, 29):
        row = slice(i, i + 1)
        assert torch.equal(experts.mix(x[row], chosen[row], weights[row], stacks)[0], together[i])
