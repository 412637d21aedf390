"""A peer's process: turns come back whole, and whatever goes wrong is a reason on the page."""

from __future__ import annotations

import sys

import pytest

from benchmarks.peers.remote import NotMeasured, Remote

PROMPTS = [[5, 6, 7, 8], [1, 2, 3, 4]]


def echo(tmp_path, **settings):
    return Remote(sys.executable, "tests.benchmarks.echo", settings, tmp_path / "echo.log")


def test_turns_come_back_whole(tmp_path):
    with echo(tmp_path) as remote:
        assert remote.ready() == "echo 1"
        for tokens in (2, 4):
            turn = remote.run(PROMPTS, tokens, 0)
            assert turn.tokens == [prompt[:tokens] for prompt in PROMPTS]
            assert turn.decode_tokens == 2 * (tokens - 1)
            assert 0 < turn.decode_seconds < turn.seconds
    assert (tmp_path / "echo.log").read_text().count("what a library prints") == 2


def test_what_cannot_be_loaded_is_not_measured(tmp_path):
    with echo(tmp_path, fails=True) as remote, pytest.raises(NotMeasured, match="no model here"):
        remote.ready()


@pytest.mark.parametrize(("k", "reason"), [(7, "cannot do seven"), (13, "code 3")])
def test_what_cannot_be_done_is_not_measured(tmp_path, k, reason):
    with echo(tmp_path) as remote:
        remote.ready()
        with pytest.raises(NotMeasured, match=reason):
            remote.run(PROMPTS, 2, k)


def test_a_module_that_is_not_there_is_not_measured(tmp_path):
    with Remote(sys.executable, "tests.benchmarks.nowhere", {}, tmp_path / "log") as remote, pytest.raises(NotMeasured):
        remote.ready()
