"""`pilotfish check` on the command line: text or JSON, and the exit code says whether it works."""

from __future__ import annotations

import json

import pytest

from pilotfish.server.cli import main


def test_the_embedded_pair_is_the_default(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--no-load"]) == 0
    out = capsys.readouterr().out
    assert out.endswith("This machine can serve the model.\n")
    sections = [line for line in out.splitlines() if line and not line.startswith(" ")]
    assert sections == ["environment", "target", "draft", "pair", "This machine can serve the model."]


def test_json_for_machines(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "/nowhere", "--json", "--draft", "/nowhere2"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert not report["works"]
    assert len(report["problems"]) == 2


def test_reasons_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--no-load", "--max-model-len", "9999"]) == 1
    out = capsys.readouterr().out
    assert out.endswith(
        "This machine cannot serve the model:\n  - max_model_len is 9999; the models support at most 1024 positions\n"
    )


def test_an_invalid_option_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--kv-memory", "0"]) == 2
    assert "kv_memory" in capsys.readouterr().err
