"""Processor use between two moments: by this process, and by others. Uses only the standard library."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Self

_STAT = Path("/proc/stat")
_TICK = 1 / os.sysconf("SC_CLK_TCK")  # seconds


@dataclass(frozen=True, slots=True)
class CpuUsage:
    """Processor time between two moments, in seconds; None where the system does not report it."""

    wall: float
    own: float
    foreign: float | None  # of other processes, including the kernel's work for them
    stolen: float | None  # cores that the hypervisor gave to other guests


class Meter:
    """Measures processor time of this process and of all others, from `start` on."""

    def __init__(self) -> None:
        self._wall = self._own = 0.0
        self._busy: tuple[float, float] | None = None

    @classmethod
    def start(cls) -> Self:
        meter = cls()
        meter._wall, meter._own, meter._busy = time.perf_counter(), time.process_time(), _busy()
        return meter

    def stop(self) -> CpuUsage:
        """Return the usage since the start."""
        wall, own = time.perf_counter() - self._wall, time.process_time() - self._own
        now, before = _busy(), self._busy
        if now is None or before is None:
            return CpuUsage(wall, own, None, None)
        return CpuUsage(wall, own, max(0.0, now[0] - before[0] - own), now[1] - before[1])


def _busy() -> tuple[float, float] | None:
    """Return seconds since boot that all cores worked, and seconds stolen from them."""
    try:
        fields = _STAT.read_text("ascii").split("\n", 1)[0].split()[1:]
    except OSError:
        return None
    user, nice, system, _idle, _wait, irq, soft, steal = (int(field) * _TICK for field in fields[:8])
    return user + nice + system + irq + soft, steal
