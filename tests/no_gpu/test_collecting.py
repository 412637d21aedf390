"""What `make test-cuda` would run on a card, collected where there is none: an error there would cost a card's time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

ROOT = Path(__file__).resolve().parents[2]
HERE = ("tests/kernels", "tests/cuda")
NEEDS_NO_CARD = "there is a GPU here, and it is asked instead"
LACKING = ("accelerate is not installed", "llguidance is not installed", "pydantic is not installed")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(torch.cuda.is_available(), reason=NEEDS_NO_CARD),
]


def test_everything_is_collected_as_where_there_is_a_gpu() -> None:
    """No error, at least a test of each file, and none of them skipped for want of a GPU."""
    ours = ("TRITON_INTERPRET", "PYTEST_XDIST")  # of this process, and not of the one to come
    environment = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-c", "tests/cuda/gpu.ini", "--rootdir", ".", "--confcutdir", ".", "-q",
         "-p", "no:cacheprovider", "-p", "tests.no_gpu.pretending", "--collect-only", "--no-header", *HERE],
        cwd=ROOT, env=environment | {"PYTHONPATH": f"{ROOT}:{ROOT / 'proto'}"}, capture_output=True, text=True,
        timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    (told,) = [line for line in done.stdout.splitlines() if line.startswith("collected ")]
    found = json.loads(told.removeprefix("collected "))
    assert set(found["modules"].values()) <= set(LACKING), "a whole file would be skipped"
    would_not_run = {test: why for test, why in found["tests"].items() if why not in (None, NEEDS_NO_CARD)}
    assert not would_not_run
    files = {str(path.relative_to(ROOT)) for folder in HERE for path in (ROOT / folder).glob("test_*.py")}
    assert {test.partition("::")[0] for test in found["tests"]} | found["modules"].keys() == files
