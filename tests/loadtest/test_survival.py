"""Streams of every option while the engine dies, and while a replica does: in short, as `make survive` does it."""

from __future__ import annotations

import json

import pytest

from loadtest.__main__ import main
from loadtest.experiments.hostile import CALLS, SIZE
from loadtest.experiments.starts import ColdStart, ColdStarts

pytestmark = pytest.mark.slow


def test_every_stream_is_as_undisturbed_when_the_engine_dies(tmp_path, capsys):
    options = ["--runs", "1", "--deaths", "3", "--out", str(tmp_path)]
    assert main(["survive", *options]) == 0, capsys.readouterr().err
    assert json.loads((tmp_path / "results.json").read_text("utf-8"))["runs"]


def test_every_stream_is_as_undisturbed_when_a_replica_is_rolled_or_killed(tmp_path, capsys):
    options = ["--seconds", "20", "--every", "5", "--out", str(tmp_path)]
    assert main(["replicas", *options]) == 0, capsys.readouterr().err


def test_a_stream_pauses_and_goes_on_when_its_engine_dies(tmp_path, capsys):
    assert main(["restart", "--deaths", "2", "--untimed", "--out", str(tmp_path)]) == 0, capsys.readouterr().err
    assert len(json.loads((tmp_path / "results.json").read_text("utf-8"))["seconds"]) == 2


def test_cold_starts_with_a_head_accept_the_same_drafts(tmp_path, capsys):
    assert main(["starts", "--runs", "2", "--out", str(tmp_path)]) == 0, capsys.readouterr().err
    started = json.loads((tmp_path / "results.json").read_text("utf-8"))["started"]
    assert len(started) == 2
    assert all(one["accepted"] for one in started)


def test_a_start_that_accepts_nothing_or_something_else_is_a_problem():
    right, wrong, other = ColdStart(1.0, (1, 2), 4, 2), ColdStart(1.0, (1, 2), 4, 0), ColdStart(1.0, (1, 3), 4, 2)
    assert not list(ColdStarts([right, right], []).problems())
    assert len(list(ColdStarts([right, wrong], ["start 2: it ended"]).problems())) == 3
    assert len(list(ColdStarts([right, other], []).problems())) == 1


def test_hostile_calls_are_as_large_as_the_limit_lets_through():
    assert len(CALLS) > 60
    for name, call in CALLS.items():
        assert 0.5 * SIZE < len(call.make()) <= 4 << 20, name
