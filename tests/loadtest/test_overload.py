"""The programs themselves, for some seconds, on the embedded pair in a process: sums, statuses and hints, no speeds."""

from __future__ import annotations

import json

import pytest

from loadtest.__main__ import main

SMALL = ["--serve", "--max-batch-size", "4", "--warm-up-seconds", "0"]


@pytest.mark.parametrize(
    ("experiment", "options"),
    [("overload", ["--seconds", "2"]), ("curve", ["--seconds", "0.5", "--shares", "0.5", "2"])],
)
def test_everything_sent_is_served_or_refused_with_a_hint(experiment, options, tmp_path, capsys):
    given = [experiment, "--out", str(tmp_path), "--untimed", "--workload", "steady", *options, *SMALL]
    assert main(given) == 0, capsys.readouterr().err
    found = json.loads((tmp_path / "results.json").read_text())
    for phase in found["phases"]:
        assert phase["adds_up"]
        assert phase["sent"] == phase["served"] + phase["refused"]
        assert not phase["unhinted"]
    assert set(found["phases"][-1]["statuses"]) <= {"OK", "RESOURCE_EXHAUSTED"}
    assert f"python -m loadtest {experiment}" in (tmp_path / "report.md").read_text()
