"""What the attention kernel is compiled to for Hopper, on a machine without a GPU: `attention_facts.py` says it."""

from __future__ import annotations

import json

from tests.no_gpu import program

REGISTERS, SHARED = 64 << 10, 227 << 10  # of a multiprocessor, and bytes of it
SPILLED = 64  # bytes of stack that are no matter: a register or two at the edges of loops


pytestmark = program.MARKS


def told(*args: str) -> list[dict]:
    return [json.loads(line) for line in program.output("attention_facts", *args).splitlines()]


def test_keys_and_values_have_two_buffers_and_nothing_spills():
    """While one block of keys is worked on the next is loaded; two programs of decoding share a multiprocessor."""
    facts = told("shapes", "bfloat16/4/128", "bfloat16/8/128", "bfloat16/48/64")
    assert len(facts) == 6
    for fact in facts:
        assert len(fact["buffers"]) == 2, fact
        assert all(int(buffer.split("x")[0]) >= 2 for buffer in fact["buffers"]), fact
        assert fact["in_flight"] > 0, fact
        assert fact["tensor_cores"], fact
        assert fact["stack"] < SPILLED, fact
        assert fact["wide_copies"] > 0, fact
        assert fact["other_copies"] == 0, fact
        assert fact["wide_loads"] > 0, fact
        at_once = 1 if fact["kind"] == "prompt" else 2
        assert at_once * (fact["shared"] + 1024) <= SHARED + 1024, fact
        assert at_once * fact["registers"] * fact["warps"] * 32 <= REGISTERS, fact
    assert facts[0]["buffers"] == ["2x64x128", "2x64x128"]


def test_float32_and_wide_heads_do_not_spill():
    """8.8 KB were spilled, because whole heads went through registers; now pieces of them do.

    Of latent heads (576 and 512) 888 bytes were, in tiles of 64 rows.
    """
    wide = "bfloat16/4/192/128", "bfloat16/8/512", "bfloat16/16/576/512/within"
    facts = told("shapes", "float32/4/128", "float32/8/128", *wide)
    for fact in facts:
        assert fact["stack"] < SPILLED, fact
    for fact in facts[2:]:
        assert min(int(buffer.split("x")[0]) for buffer in fact["buffers"]) >= 2, fact
    assert facts[-1]["buffers"] == ["2x16x512", "2x16x64"], "values are not loaded again"


def test_one_model_needs_few_variants():
    """Not one for each parity of the number of tiles, width of tables and number of splits: 22 of them there were."""
    (counted,) = told("batches")
    assert counted == {"_plan_kernel": 2, "_attend_kernel": 2, "_merge_kernel": 1}
