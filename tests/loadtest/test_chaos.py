"""Some seconds of chaos on the embedded pair: who behaves has his own tokens, and nothing is left over."""

from __future__ import annotations

import asyncio

import pytest

from loadtest.experiments.chaos import OPTIONS, PROGRAM, chaos, chaos_lines
from loadtest.process import ServerProcess


@pytest.mark.slow
@pytest.mark.timeout(300)  # a server of its own, on a machine that may be busy
def test_who_behaves_does_not_notice(tmp_path):
    """So short that no process is killed: the server is its own replica."""
    with ServerProcess(*OPTIONS, "--warm-up-seconds", "0", log=tmp_path / "log", program=PROGRAM) as server:
        found = asyncio.run(chaos(server, server, 0.5, 3.0, print))
    assert not list(found.problems(timed=False))
    assert found.notes.right > 0
    assert len(found.notes.deeds) > 5
    assert any(line.startswith("| fault-") for line in chaos_lines(found))
