"""Some seconds of chaos on the embedded pair: who behaves has his own tokens, and nothing is left over."""

from __future__ import annotations

import json

import pytest

from loadtest.__main__ import main


@pytest.mark.slow
def test_who_behaves_does_not_notice(tmp_path, capsys):
    options = ["--seconds", "5", "--untimed", "--out", str(tmp_path), "--serve", "--warm-up-seconds", "0"]
    assert main(["chaos", *options]) == 0, capsys.readouterr().err
    found = json.loads((tmp_path / "results.json").read_text())
    assert found["notes"]["right"] > 0
    assert found["notes"]["wrong"] == found["notes"]["strange"] == []
    assert len(found["notes"]["deeds"]) > 5
    census = found["after"]["census"]
    assert census["free_pages"] == census["total_pages"]
