"""What kernels are compiled to for Hopper, on a machine without a GPU: `facts.py` says it."""

from __future__ import annotations

import json
import re

import pytest

from tests.no_gpu import program
from tests.no_gpu.budgets import BUDGETS, NOT_ON_SM_80

REGISTERS = 64 << 10  # of a multiprocessor
SHARED = {80: 163 << 10, 90: 227 << 10}  # bytes that one block may have
KERNELS = {
    name
    for path in (program.ROOT / "engine/kernels").glob("*.py")
    for name in re.findall(r"^def (_\w+_kernel)\(", path.read_text(), re.MULTILINE)
}
SPILLED = 64  # bytes of stack that are no matter: a register or two at the edges of loops

pytestmark = [*program.MARKS, pytest.mark.slow(lowest=True)]


@pytest.fixture(scope="module")
def facts():
    return json.loads(program.output("facts"))


def of_card(facts, card):
    return [line for line in facts["resources"] if line["card"] == card]


def test_all_kernels_are_met_and_compile_for_both_cards(facts):
    assert KERNELS == set(BUDGETS) == {line["kernel"] for line in of_card(facts, 90)}
    assert {line["kernel"] for line in of_card(facts, 80)} == KERNELS - NOT_ON_SM_80


def test_blocks_fit_and_spill_nothing(facts):
    """What attention spills hangs on the shape: `test_float32_and_wide_heads_do_not_spill`."""
    for line in facts["resources"]:
        budget, card = BUDGETS[line["kernel"]], line["card"]
        assert line["shared"] <= SHARED[card], line
        if (line["kernel"], card) != ("_attend_kernel", 90):
            assert line["stack"] <= (budget.stack if card == 90 else budget.stack_on_sm_80), line
        assert line.get("blocks", budget.blocks) >= budget.blocks, line


def test_a_mixture_needs_few_variants(facts):
    assert all(count <= BUDGETS[kernel].variants for kernel, count in facts["experts"].items())


# ---------------------------------------------------------------------------------------------------------- attention


def test_keys_and_values_have_two_buffers_and_nothing_spills(facts):
    """While one block of keys is worked on the next is loaded; two programs of decoding share a multiprocessor."""
    found = [fact for fact in facts["shapes"] if fact["shape"] in ("bfloat16/4/128", "bfloat16/48/64")]
    assert len(found) == 4
    for fact in found:
        assert len(fact["buffers"]) == 2, fact
        assert all(int(buffer.split("x")[0]) >= 2 for buffer in fact["buffers"]), fact
        assert fact["in_flight"] > 0, fact
        assert fact["tensor_cores"], fact
        assert fact["wide_copies"] > 0, fact
        assert fact["other_copies"] == 0, fact
        assert fact["wide_loads"] > 0, fact
        at_once = 1 if fact["kind"] == "prompt" else 2
        assert at_once * (fact["shared"] + 1024) <= SHARED[90] + 1024, fact
        assert at_once * fact["registers"] * fact["warps"] * 32 <= REGISTERS, fact
    assert found[0]["buffers"] == ["2x64x128", "2x64x128"]


def test_float32_and_wide_heads_do_not_spill(facts):
    """8.8 KB were spilled, because whole heads went through registers; now pieces of them do.

    Of latent heads (576 and 512) 888 bytes were, in tiles of 64 rows.
    """
    narrow = BUDGETS["_attend_kernel"].stack
    assert [
        fact for fact in facts["shapes"] if fact["stack"] >= (SPILLED if "512" in fact["shape"] else narrow + 1)
    ] == []
    wide = [fact for fact in facts["shapes"] if fact["shape"].count("/") > 2 or fact["shape"].endswith("512")]
    assert len(wide) >= 3
    for fact in wide:
        assert min(int(buffer.split("x")[0]) for buffer in fact["buffers"]) >= 2, fact
    assert wide[-1]["buffers"] == ["2x16x512", "2x16x64"], "values are not loaded again"


def test_codes_come_while_others_are_worked_on(facts):
    """In int8 K and V are multiplied by tensor cores, and nothing but a scale lies between a code and its product."""
    found = [fact for fact in facts["shapes"] if fact["shape"].endswith("int8")]
    assert [fact["kind"] for fact in found] == ["decode", "prompt", "decode"]
    for fact in found:
        assert fact["tensor_cores"], fact
        assert fact["in_flight"] > 0, fact
        assert fact["stack"] < SPILLED, fact


# -------------------------------------------------------------------------------------------------------- row kernels


def test_row_kernels_spill_nothing_at_any_size(facts):
    """From rows of 2,048 numbers to those of 29,568; and read 16 bytes at a time."""
    assert {kernel["name"] for kernel in facts["rows"]} == {
        "_norm_kernel", "_gate_kernel", "_round_kernel", "_rotate_kernel",
    }  # fmt: skip
    assert [kernel for kernel in facts["rows"] if kernel["stack"] or not kernel["wide_loads"]] == []


def test_a_matmul_in_4_bits_fits(facts):
    """Three variants for 1 to 200 rows of four matrices; no spills, copies of 16 bytes that run ahead, tensor cores."""
    assert len(facts["w4"]) == 3
    for kernel in facts["w4"]:
        assert (kernel["stack"], kernel["tensor_cores"]) == (0, True)
        assert kernel["shared"] < 100 << 10
        assert 16 in kernel["copies"]


# -------------------------------------------------------------------------------------------------- draws and commits


def test_a_draw_is_a_handful_of_launches(facts):
    """Once 37 with cuts and 4 without, of kernels alone."""
    assert facts["draws"]["launches"] == {"truncated": 10, "no cuts": 3}
    assert facts["draws"]["torch"] == {"truncated": [], "no cuts": []}  # what torch launches beside them


def test_no_draw_and_no_commit_compiles_after_the_first(facts):
    """A first draw with cuts compiles all that any number of rows asks for; once 19 variants, at the first request."""
    assert facts["draws"]["compiled at first"] == {"float32": 6, "bfloat16": 5}  # the last kernel sees no logits
    assert facts["draws"]["compiled later"] == []
    assert facts["draws"]["commits compiled"] == 1


def test_draws_spill_nothing_and_load_logits_16_bytes_at_a_time(facts):
    """Each thread's numbers stay in its registers; once 300 bytes of each were in memory."""
    assert facts["draws"]["stack"] == [0] * 12
    assert facts["draws"]["loads"] == {name: [16] for name in ("_peaks", "_search", "_end", "_noise")}
