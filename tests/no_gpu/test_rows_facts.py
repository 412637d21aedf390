"""What row kernels and 4-bit matmuls take of a card, and how many kernels a layer is, as compiled."""

from __future__ import annotations

import json

import pytest

from tests.no_gpu import program

pytestmark = program.MARKS


@pytest.fixture(scope="module")
def facts():
    return json.loads(program.output("rows_facts"))


def test_row_kernels_spill_nothing_at_any_size(facts):
    """From rows of 2,048 numbers to those of 29,568; and read 16 bytes at a time."""
    assert {kernel["name"] for kernel in facts["rows"]} == {
        "_norm_kernel", "_gate_kernel", "_gate_round_kernel", "_round_kernel", "_rotate_kernel",
    }  # fmt: skip
    assert [kernel for kernel in facts["rows"] if kernel["stack"] or not kernel["wide_loads"]] == []


def test_a_matmul_in_4_bits_fits(facts):
    """Three variants for 1 to 200 rows of four matrices; no spills, copies of 16 bytes that run ahead, tensor cores."""
    assert len(facts["w4"]) == 3
    for kernel in facts["w4"]:
        assert (kernel["stack"], kernel["tensor_cores"]) == (0, True)
        assert kernel["shared"] < 100 << 10
        assert 16 in kernel["copies"]


@pytest.mark.parametrize(("weights", "most"), [("bf16", 9), ("fp8", 10), ("int4", 9)])
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_a_layer_is_so_many_kernels(facts, family, weights, most):
    """Four matmuls, attention, rotation, a gate and two sums with norms; in fp8 a rounding before o_proj.

    Before sums and norms were one kernel and rows were rounded by them it was 10 (llama in bfloat16) and 38 (in fp8).
    """
    found = facts["layers"][f"{family} {weights}"]
    assert len(found) == most, found
    assert found.count("_norm_kernel") == 2
