"""`pilotfish bench`: a row per batch and way, of the same tokens."""

from __future__ import annotations

import json

import pytest

from pilotfish.server import cli
from pilotfish.server.commands.bench import BenchRow, as_text

OPTIONS = ["--tokens", "8", "--rounds", "1", "--batches", "2", "--threads", "1", "--warm-up-seconds", "0"]


@pytest.mark.slow
def test_rows_of_the_embedded_pair(capsys):
    assert cli.main(["bench", "--json", *OPTIONS, "--proposer", "model"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(row["batch"], row["speculation"]) for row in rows] == [(2, way) for way in ("off", "fixed", "auto")]
    assert all(row["same_tokens"] for row in rows)
    assert rows[0]["gain"] == 1.0
    assert rows[0]["acceptance_rate"] is None
    assert rows[1]["acceptance_length"] > 1


@pytest.mark.parametrize("command", [["bench"], ["train-draft", "--out", "head"]], ids=["bench", "train-draft"])
def test_an_unsupported_model_is_reported(command, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.main([*command, str(tmp_path)]) == 2
    assert f"pilotfish {command[0]}: " in capsys.readouterr().err


def test_the_table_lines_up():
    rows = [BenchRow(1, "off", 100.0, 1.0, None, None, True), BenchRow(1, "auto", 150.0, 1.5, 0.75, 3.25, False)]
    head, plain, auto = as_text(rows, "title").splitlines()[2:]
    assert plain.index("100.0") + 5 == auto.index("150.0") + 5 == head.index("tokens/s") + 8
    assert "near-ties" in auto
    assert "near-ties" not in plain
