"""Streams of some options while the engine dies: in short, as `make survive` does it.

`tests/exactness/test_continued.py` has every option with every proposer in one process, `tests/client/test_resume.py`
replicas.
"""

from __future__ import annotations

import asyncio
import json
from contextlib import nullcontext
from random import Random

import pytest

import loadtest.__main__
from loadtest.experiments import survival
from loadtest.experiments.hostile import CALLS, SIZE
from loadtest.process import ServerProcess

JOBS = (3, 11, 12, 19, 25, 28, 31)  # n, log-probabilities of the prompt, a structure, a head, a tool; two over HTTP


@pytest.mark.slow
@pytest.mark.timeout(300)  # a server of its own, on a machine that may be busy
def test_every_stream_is_as_undisturbed_when_the_engine_dies(tmp_path, monkeypatch):
    with ServerProcess(*survival.OPTIONS, "--warm-up-seconds", "0", log=tmp_path / "log") as server:
        alone = asyncio.run(survival.undisturbed([server.address], server.http_address, print, JOBS))
        found = asyncio.run(survival.engine_deaths(server, alone, 1, Random(0)))
        monkeypatch.setattr(loadtest.__main__, "_server", lambda options: nullcontext(server))
        assert loadtest.__main__.main(["restart", "--deaths", "1", "--untimed", "--out", str(tmp_path)]) == 0
    assert not list(found.problems())
    [pause] = json.loads((tmp_path / "results.json").read_text())["seconds"]
    assert pause > 0
    assert "python -m loadtest restart" in (tmp_path / "report.md").read_text()


@pytest.mark.slow
def test_hostile_calls_are_as_large_as_the_limit_lets_through():
    assert len(CALLS) > 60
    for name, call in CALLS.items():
        assert 0.5 * SIZE < len(call.make()) <= 4 << 20, name
