"""Programs that define kernels without the interpreter, and so cannot be part of the tests' own process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from pilotfish.engine.kernels import has_triton

ROOT = Path(__file__).resolve().parents[2]
MARKS = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(not has_triton(), reason="triton is not installed"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here, and it is asked instead"),
]


def output(name: str, *args: str, **environment: str) -> str:
    """What `tests/no_gpu/NAME.py` prints."""
    paths = {"PYTHONPATH": f"{ROOT}:{ROOT / 'proto'}"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", f"tests.no_gpu.{name}", *args],
        cwd=ROOT, env=os.environ | paths | environment, capture_output=True, text=True, timeout=850, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout
