"""Memory of this process: pages mapped from files, memory freed in C, and the progress of reading weights."""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

_DONTNEED, _HUGEPAGE, _NOHUGEPAGE = 4, 14, 15  # MADV_*, of Linux
_PAGES, _MAPS = Path("/proc/self/pagemap"), Path("/proc/self/maps")  # 8 bytes per page
_SWAPPED, _OF_FILE, _PRESENT = (1 << bit for bit in (62, 61, 63))


_SECONDS = 2.0  # between two reports of progress
_MB = 10**6


class ReadProgress:
    """Reports every two seconds how much of the weights of a checkpoint has been read, and in how many seconds."""

    def __init__(self, what: str, size: Callable[[], int], report: Callable[[str], None]) -> None:
        """`size` is called at each report, because hub files may not be downloaded before."""
        self._what, self._size, self._report = what, size, report
        self._bytes, self._began = 0, time.monotonic()
        self._reported = self._began

    def add(self, num_bytes: int) -> None:
        self._bytes += num_bytes
        self._maybe_report(lambda size: min(self._bytes, size))

    def at(self, done: int, of: int) -> None:
        """Report that `done` of `of` tensors have been read."""
        self._maybe_report(lambda size: size * done // max(1, of))

    def _maybe_report(self, read: Callable[[int], int]) -> None:
        now = time.monotonic()
        if now - self._reported >= _SECONDS:
            self._reported, size = now, self._size()
            self._report(f"{self._what}: {read(size) / _MB:.0f} of {size / _MB:.0f} MB, {now - self._began:.1f} s")


_reading: ContextVar[ReadProgress | None] = ContextVar("reading", default=None)


@contextmanager
def reporting_to(reading: ReadProgress) -> Iterator[None]:
    """Report everything that this thread reads inside the block to `reading`."""
    before = _reading.set(reading)
    try:
        yield
    finally:
        _reading.reset(before)


def reading() -> ReadProgress | None:
    """The current `ReadProgress` of this thread, if any."""
    return _reading.get()


def release_mapped(tensor: Tensor) -> None:
    """Release the memory of a tensor that is mapped from a file and rarely read again (madvise).

    The pages stay in the system's file cache as long as there is memory, so the next process that starts finds them
    there. Only tensors whose pages are all unchanged pages of a file are released, so written data is never lost.
    """
    advise, (start, length) = _madvise(), _pages(tensor)
    if advise is not None and length and _lie_in_file(start, length):
        advise(start, length, _DONTNEED)
        progress = reading()
        if progress is not None:
            progress.add(tensor.nbytes)


def release_libraries() -> None:
    """Release the pages of all code, like `release_mapped`; pages that are needed again are mapped again.

    Most of the code that importing torch reads, 75 of 90 MB, runs only once.
    """
    advise = _madvise()
    if advise is None:
        return
    for line in _MAPS.read_text("utf-8", "replace").splitlines():
        place, rights, _, _, inode, *_ = line.split(maxsplit=5)
        start, stop = (int(address, 16) for address in place.split("-"))
        if rights in ("r-xp", "r--p") and inode != "0" and _lie_in_file(start, stop - start):
            advise(start, stop - start, _DONTNEED)


def release_freed() -> None:
    """Return free memory of the C library to the system, if supported; does not hold the GIL."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def in_pages(tensor: Tensor, *, large: bool) -> None:
    """Advise the system to use large or small pages for a tensor that has not been written yet."""
    advise, (start, length) = _madvise(), _pages(tensor)
    if advise is not None and length and tensor.is_cpu:
        advise(start, length, _HUGEPAGE if large else _NOHUGEPAGE)


def _pages(tensor: Tensor) -> tuple[int, int]:
    """The address of the tensor's first whole page, and the number of bytes of its whole pages."""
    start = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    return start, max(0, tensor.data_ptr() + tensor.nbytes - start) // mmap.PAGESIZE * mmap.PAGESIZE


def _lie_in_file(start: int, length: int) -> bool:
    import numpy as np  # imported late: a front end uses only `release_freed`

    try:
        with _PAGES.open("rb", buffering=0) as file:
            file.seek(start // mmap.PAGESIZE * 8)
            found = np.frombuffer(file.read(length // mmap.PAGESIZE * 8), np.uint64)
    except OSError:
        return False
    return bool(np.all((found & _SWAPPED == 0) & ((found & _PRESENT == 0) | (found & _OF_FILE != 0))))


@cache
def _madvise() -> Any:
    """The C function, or None on a system that is not Linux."""
    found = getattr(ctypes.CDLL(None), "madvise", None) if os.uname().sysname == "Linux" else None
    if found is not None:
        found.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return found
