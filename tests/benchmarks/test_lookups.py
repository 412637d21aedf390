"""What the benchmark of lookups counts."""

from __future__ import annotations

import pytest

from benchmarks.lookups import markdown, measure


def test_a_text_that_goes_round_is_found_and_one_that_is_new_is_not() -> None:
    round_, new = [[*range(20)] * 60], [[*range(2000)]]
    for texts, acceptance, per_step in ((round_, 1.0, 7.0), (new, 0.0, 1.0)):
        rows = list(measure(texts, 4000, 2))
        assert [row.tokens > least for row, least in zip(rows, (2000, 4000), strict=True)] == [True, True]
        assert rows[0].acceptance == acceptance
        assert rows[0].tokens_per_step >= per_step
        assert rows[0].requests < rows[1].requests
    assert rows[0].tokens_per_step == pytest.approx(1.0)
    told = dict.fromkeys(("command", "machine", "versions", "commit"), "x")
    assert markdown(told, rows).count("\n| ") == 3
