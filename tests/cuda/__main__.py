"""`make test-cuda`: the tests of kernels and those that need a GPU, with what this machine's Python has.

Where xdist is installed several processes share the card: compiling, which takes most of the time, is work for CPUs.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

WHOLE = 540  # seconds: a machine is lent for calls of ten minutes, of which some go into getting there
EACH = 150  # seconds of one test
WORKERS = 8
ROOT = Path(__file__).resolve().parents[2]


def arguments() -> list[str]:
    """For pytest; options of plugins only where the plugins are."""
    found = ["-c", "tests/cuda/gpu.ini", "--rootdir", ".", "--confcutdir", ".", "tests/kernels", "tests/cuda"]
    if importlib.util.find_spec("xdist"):  # tests are handed out one by one: some compile for a minute
        found += ["-n", str(min(WORKERS, os.cpu_count() or 1)), "--dist", "worksteal"]
    if importlib.util.find_spec("pytest_timeout"):
        found += ["--timeout", str(EACH)]
    return found


def main() -> int:
    """pytest's status; 124 where it had not ended in time. What it printed until then stays."""
    command = [sys.executable, "-u", "-m", "pytest", *arguments(), *sys.argv[1:]]
    try:
        return subprocess.run(command, cwd=ROOT, timeout=WHOLE, check=False).returncode
    except subprocess.TimeoutExpired:
        print(f"test-cuda had not ended after {WHOLE} s, and was stopped", flush=True)
        return 124


if __name__ == "__main__":
    sys.exit(main())
