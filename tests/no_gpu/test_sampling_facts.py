"""What a draw is on a GPU, as far as its compiler can say without one: launches, variants, spills, loads."""

from __future__ import annotations

import json

import pytest

from tests.no_gpu import program

pytestmark = program.MARKS


@pytest.fixture(scope="module")
def facts():
    return json.loads(program.output("sampling_facts"))


def test_a_draw_is_a_handful_of_launches(facts):
    """Once 37 with cuts and 4 without, of kernels alone."""
    assert facts["launches"] == {"truncated": 10, "no cuts": 3}
    assert facts["torch"] == {"truncated": [], "no cuts": []}  # what torch launches beside them


def test_no_draw_compiles_after_the_first(facts):
    """A first draw with cuts compiles all that any number of rows asks for; once 19 variants, at the first request."""
    assert facts["compiled at first"] == {"float32": 6, "bfloat16": 5}  # the last kernel sees no logits
    assert facts["compiled later"] == []


def test_no_commit_compiles_after_the_first(facts):
    assert facts["commits compiled"] == 1


def test_draws_spill_nothing(facts):
    """Each thread's numbers stay in its registers; once 300 bytes of each were in memory."""
    assert facts["stack"] == [0] * 12


def test_logits_are_loaded_16_bytes_at_a_time(facts):
    assert facts["loads"] == {name: [16] for name in ("_peaks", "_count", "_weigh", "_end", "_noise")}
