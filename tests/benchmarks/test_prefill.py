"""`python -m benchmarks.prefill` on a model so small that the figures mean nothing."""

from __future__ import annotations

import sys

from benchmarks import prefill


def test_a_row_for_every_bound_and_length(monkeypatch, capsys):
    options = ["--shape", "tiny", "--lengths", "20", "40", "--bounds", "0", "50", "--rounds", "1", "--others", "2"]
    monkeypatch.setattr(sys, "argv", ["prefill", *options, "--threads", "1"])
    prefill.main()
    rows = [line.split("|")[1:-1] for line in capsys.readouterr().out.splitlines() if line.startswith("| ")][1:]
    assert [(row[0].strip(), row[1].strip()) for row in rows] == [
        ("none", "20"), ("50", "20"), ("none", "40"), ("50", "40"),
    ]  # fmt: skip
    assert all(float(cell) >= 0 for row in rows for cell in row[2:])
