"""Runs pytest in forks of a process that has imported what takes long, and nothing that could have a fault.

Each line of its input is JSON: arguments and an output file. Each answer is an exit code.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest
from hypothesis.internal.conjecture import engine as hypothesis

PATIENCE = 900  # seconds of a run
LONG = ("torch", "transformers.pytorch_utils", "transformers.models.llama", "llguidance", "scipy.stats")


def run(arguments: list[str], output: str) -> int:
    """Run pytest in a fork; in the end, or when its time is over, kill all that it has started."""
    child = os.fork()
    if not child:
        os.setsid()
        with Path(output).open("w") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        # What was imported ahead has plain assertions.
        os._exit(pytest.main(["-W", "ignore::pytest.PytestAssertRewriteWarning", *arguments]))
    ended, status, end = 0, 0, time.monotonic() + PATIENCE
    while not ended and time.monotonic() < end:
        time.sleep(0.05)
        ended, status = os.waitpid(child, os.WNOHANG)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(status if ended else os.waitpid(child, 0)[1])


if __name__ == "__main__":
    os.environ["TRITON_INTERPRET"] = "1"
    hypothesis.MAX_SHRINKS = 0  # an example that fails is enough
    for name in LONG:
        __import__(name)
    for line in sys.stdin:
        asked = json.loads(line)
        print(run(asked["arguments"], asked["output"]), flush=True)
