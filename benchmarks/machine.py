"""What figures were taken on: processor, versions, commit; who else used the processor; how fast memory is read."""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import statistics
import subprocess
import tempfile
import time
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Self

import torch

_STAT = Path("/proc/stat")
_READ_C = Path(__file__).parent / "read.c"
_SWEEP = 2**28  # bytes that one reading of memory covers: more than caches hold
_TICK = 1 / os.sysconf("SC_CLK_TCK")  # seconds


def machine() -> dict[str, str]:
    """Processor, threads, versions and commit."""
    return {
        "machine": f"{processor()}, {torch.get_num_threads()} threads, {platform.system()}",
        "versions": versions("torch", "transformers"),
        "commit": commit(),
    }


def processor() -> str:
    """The processor's name and what of it this process may use."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    name = next((line.split(":")[1].strip() for line in lines if "model name" in line), platform.processor() or "?")
    return f"{name}, {os.cpu_count()} cores"


def versions(*packages: str) -> str:
    """`torch 2.13.0, Python 3.11.9`."""
    return ", ".join(
        [*(f"{name} {metadata.version(name)}" for name in packages), f"Python {platform.python_version()}"]
    )


def commit() -> str:
    """As git describes it, with `-dirty` where files were changed."""
    git = shutil.which("git")
    if git is None:
        return "unknown"
    command = [git, "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    described = subprocess.run(command, capture_output=True, text=True, check=False)
    return described.stdout.strip() or "unknown"


@dataclass(frozen=True, slots=True)
class Usage:
    """Processor time between two moments, in seconds; None where the system does not tell."""

    wall: float
    own: float
    foreign: float | None  # other processes' and the kernel's for them
    stolen: float | None  # cores that the host gave to others


class Meter:
    """Measures processor time of this process and of all others, from `start` on."""

    @classmethod
    def start(cls) -> Self:
        """Begin now."""
        meter = cls()
        meter._wall, meter._own, meter._busy = time.perf_counter(), time.process_time(), _busy()
        return meter

    def __init__(self) -> None:
        self._wall = self._own = 0.0
        self._busy: tuple[float, float] | None = None

    def stop(self) -> Usage:
        """What was used since."""
        wall, own = time.perf_counter() - self._wall, time.process_time() - self._own
        now, before = _busy(), self._busy
        if now is None or before is None:
            return Usage(wall, own, None, None)
        return Usage(wall, own, max(0.0, now[0] - before[0] - own), now[1] - before[1])


def _busy() -> tuple[float, float] | None:
    """Seconds since boot that all cores worked, and that were stolen from them."""
    try:
        fields = _STAT.read_text("ascii").split("\n", 1)[0].split()[1:]
    except OSError:
        return None
    user, nice, system, _idle, _wait, irq, soft, steal = (int(field) * _TICK for field in fields[:8])
    return user + nice + system + irq + soft, steal


class Memory:
    """A buffer that no cache holds, and how fast it is read."""

    def __init__(self, threads: int) -> None:
        self._buffer, self._threads = torch.ones(_SWEEP, dtype=torch.int8), threads

    def bandwidth(self, times: int = 7) -> float:
        """GB/s of reading it through, the median of some times."""
        return statistics.median(self._once() for _ in range(times))

    def _once(self) -> float:
        read = _reader()
        start = time.perf_counter()
        if read is None:
            self._buffer.view(torch.float32).sum()
        else:
            read(self._buffer.data_ptr(), self._buffer.nbytes, self._threads)
        return self._buffer.nbytes / (time.perf_counter() - start) / 1e9

    @property
    def method(self) -> str:
        """How it is read."""
        return "torch.sum of float32" if _reader() is None else "sums of 64-byte words in C"


@cache
def _reader() -> ctypes._NamedFuncPointer | None:
    """Our reader in C, or None without a compiler: torch's sum reads more slowly."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        return None
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "read.so"
        command = [compiler, "-O3", "-march=native", "-fopenmp", "-shared", "-fPIC", str(_READ_C), "-o", str(library)]
        if subprocess.run(command, capture_output=True, check=False).returncode:
            return None
        read = ctypes.CDLL(str(library)).read_through
    read.argtypes, read.restype = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int], ctypes.c_uint64
    return read
