"""The kernels compile for GPUs, on a machine that has none."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton is not installed")

ROOT = Path(__file__).resolve().parents[2]
KERNELS = sorted(
    name
    for path in (ROOT / "engine/kernels").glob("*.py")
    for name in re.findall(r"def (_\w+_kernel)\(", path.read_text())
)


def test_all_kernels_compile():
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "tests/kernels/compiling.py", "90"],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=110, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert sorted({line.split()[0] for line in done.stdout.splitlines()}) == KERNELS
