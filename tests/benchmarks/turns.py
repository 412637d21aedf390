"""Turns of a chosen speed."""

from __future__ import annotations

from benchmarks.harness.meter import CpuUsage
from benchmarks.harness.turns import Turn


def turn(speed: float) -> Turn:
    """Tokens per second of the decoding part."""
    return Turn([[1] * 11], 2.0, 10, 10 / speed, CpuUsage(2.0, 2.0, 0.0, 0.0))
