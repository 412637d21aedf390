"""First light without a card: whatever one part does the next runs, and limits hold."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.cuda.catalogue import COMMANDS, START, WHOLE, table

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'proto'}"}


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", "cuda"])  # which says how processes begin; these parts need neither
def test_a_part_that_hangs_crashes_or_raises_does_not_stop_the_next(device, tmp_path):
    command = [sys.executable, "-m", "tests.benchmarks.faulty_parts", device, str(tmp_path), "1"]
    told = subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert told.returncode == 1, told.stderr
    numbers, page = json.loads((tmp_path / "faulty.json").read_text()), (tmp_path / "faulty.md").read_text()
    assert {name: found["outcome"] for name, found in numbers.items()} == {
        "hangs": "killed", "raises": "failed", "works": "ended", "crashes": "failed", "lacks_a_library": "failed",
        "again": "ended",
    }  # fmt: skip
    assert page.count("**Failed.**") == 4
    for told in ("before it raises", "ValueError: what went wrong", "before it crashes",
                 "ended with status -11", "ModuleNotFoundError: there is no such library"):  # fmt: skip
        assert told in page
    assert page.count("it works") == 2
    assert (tmp_path / "faulty.log").read_text().count("printed by a part that works") == 2


def test_a_kill_keeps_what_was_written(tmp_path):
    command = [sys.executable, "-m", "tests.benchmarks.faulty_parts", "cpu", str(tmp_path), "1000"]
    page, numbers = tmp_path / "faulty.md", tmp_path / "faulty.json"
    with subprocess.Popen(command, cwd=ROOT, env=ENVIRONMENT) as running:
        while running.poll() is None and not (numbers.exists() and numbers.read_text()):
            time.sleep(0.05)
        running.kill()
    assert "before it hangs" in page.read_text()
    assert json.loads(numbers.read_text()) == {"hangs": {"before": {"it": 1.0}}}
    while processes_that_name(str(tmp_path)):  # a part that outlived its command would hold the card
        time.sleep(0.05)


def processes_that_name(words: str) -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_text()
        except OSError:
            continue  # it has ended meanwhile
        found += [line] if words in line else []
    return found


@pytest.mark.parametrize("command", COMMANDS)
def test_limits_leave_each_command_within_nine_minutes_and_its_page_shows_them(command):
    parts = COMMANDS[command]
    assert START + sum(part.limit for part in parts) <= WHOLE <= 9 * 60
    assert all(part.expected <= part.limit for part in parts)
    assert "\n".join(table(parts)) in (ROOT / "docs/benchmarks/cuda.md").read_text()
