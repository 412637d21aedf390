"""The machine and software of a measurement: processor, versions, commit and memory bandwidth."""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import statistics
import subprocess
import tempfile
import time
from functools import cache
from importlib import metadata
from pathlib import Path

import torch

from pilotfish.engine.machine.threads import most_threads

_READ_C = Path(__file__).parent / "read.c"
_SWEEP = 2**28  # bytes per reading of memory: more than caches hold


def machine() -> dict[str, str]:
    """Return processor, threads, versions and commit."""
    return {
        "machine": f"{processor()}, {most_threads()} threads, {platform.system()}",
        "versions": versions("torch", "transformers"),
        "commit": commit(),
    }


def processor() -> str:
    """Return the processor's name and the part of it that this process may use."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    name = next((line.split(":")[1].strip() for line in lines if "model name" in line), platform.processor() or "?")
    return f"{name}, {os.cpu_count()} cores"


def versions(*packages: str) -> str:
    """`torch 2.13.0, Python 3.11.9`."""
    return ", ".join(
        [*(f"{name} {metadata.version(name)}" for name in packages), f"Python {platform.python_version()}"]
    )


def commit() -> str:
    """Return git's description of the commit, with `-dirty` if files were changed."""
    git = shutil.which("git")
    if git is None:
        return "unknown"
    command = [git, "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    described = subprocess.run(command, capture_output=True, text=True, check=False)
    return described.stdout.strip() or "unknown"


class Memory:
    """A buffer that exceeds all caches, and a measurement of how fast it is read."""

    def __init__(self, threads: int) -> None:
        self._buffer, self._threads = torch.ones(_SWEEP, dtype=torch.int8), threads

    def bandwidth(self, times: int = 7) -> float:
        """Return GB/s of reading the buffer, the median of `times` runs."""
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
        """Return how the buffer is read."""
        return "torch.sum of float32" if _reader() is None else "sums of 64-byte words in C"


@cache
def _reader() -> ctypes._NamedFuncPointer | None:
    """Return our reader in C, or None without a compiler (torch's sum reads more slowly)."""
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
