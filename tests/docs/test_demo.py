"""`make demo`, as a newcomer runs it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

DEMO = Path(__file__).resolve().parents[2] / "examples" / "demo.py"


@pytest.mark.timeout(300)
def test_the_demo_succeeds():
    done = subprocess.run([sys.executable, DEMO], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Speculation changed no token" in done.stdout
