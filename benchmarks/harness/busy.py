"""Neighbour processes that keep cores busy during a measurement. Uses only the standard library."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def neighbours(count: int) -> Iterator[None]:
    """Run `count` processes that compute and never wait, until the context ends.

    Raises:
        ValueError: `count` is negative.
    """
    if count < 0:
        raise ValueError(f"neighbours: {count} is not a number of processes")
    running = [subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()
