"""What of the Locust users needs no Locust; and, where it is installed, all of it for a moment."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from loadtest.__main__ import main
from loadtest.swarm.shapes import share_of_users


def test_users_come_as_the_scenario_says():
    assert [share_of_users("ramp", moment) for moment in (0.0, 1 / 3, 1.0)] == [0.0, 0.5, 1.0]
    assert [share_of_users("spike", moment) for moment in (0.1, 0.5, 0.9)] == [0.2, 1.0, 0.2]
    assert share_of_users("steady", 0.0) == 1.0


@pytest.mark.skipif(find_spec("locust") is None, reason="it comes with the extra loadtest")
def test_a_swarm_of_a_few_fails_nowhere(tmp_path, capsys):
    options = ["--users", "6", "--workers", "1", "--seconds", "4", "--out", str(tmp_path)]
    assert main(["locust", *options, "--serve", "--warm-up-seconds", "0"]) == 0, capsys.readouterr().err
    page = (tmp_path / "report.md").read_text()
    for entry in ("1 first token", "2 between messages", "3 whole call", "4 tokens"):
        assert f"gRPC steady: {entry}" in page
        assert f"HTTP steady: {entry}" in page
