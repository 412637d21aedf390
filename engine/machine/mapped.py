"""Weights that are mapped from their files, how much of them has been read, and memory for what is made of them."""

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
from typing import Any

import numpy as np
from torch import Tensor

_DONTNEED, _HUGEPAGE = 4, 14  # MADV_*, of Linux
_PAGES = Path("/proc/self/pagemap")  # 8 bytes of each page
_SWAPPED, _OF_FILE, _PRESENT = (1 << bit for bit in (62, 61, 63))


_SECONDS = 2.0  # between two words of progress
_GB = 10**9


class ReadProgress:
    """How far the weights of a checkpoint have been read, told every two seconds."""

    def __init__(self, what: str, size: Callable[[], int], tell: Callable[[str], None]) -> None:
        """`size` is asked when something is told: files of a hub may not be here before."""
        self._what, self._size, self._tell = what, size, tell
        self._bytes, self._told = 0, time.monotonic()

    def add(self, num_bytes: int) -> None:
        """So much more has been read."""
        self._bytes += num_bytes
        self._say(lambda size: min(self._bytes, size))

    def at(self, done: int, of: int) -> None:
        """So many of so many tensors have been read."""
        self._say(lambda size: size * done // max(1, of))

    def _say(self, read: Callable[[int], int]) -> None:
        now = time.monotonic()
        if now - self._told >= _SECONDS:
            self._told, size = now, self._size()
            self._tell(f"{self._what}: {read(size) / _GB:.1f} of {size / _GB:.1f} GB")


_reading: ContextVar[ReadProgress | None] = ContextVar("reading", default=None)


@contextmanager
def told(reading: ReadProgress) -> Iterator[None]:
    """What is read on this thread meanwhile, `reading` is told of."""
    before = _reading.set(reading)
    try:
        yield
    finally:
        _reading.reset(before)


def reading() -> ReadProgress | None:
    """Who is to be told."""
    return _reading.get()


def let_go(tensor: Tensor) -> None:
    """`tensor` will hardly be read again: what is mapped from a file may leave this process's memory.

    It stays in the system's cache of files for as long as there is room, so that whoever starts next finds it there.
    Nothing that was written is touched: all pages must be as they lie in the file.
    """
    advise, (start, length) = _madvise(), _pages(tensor)
    if advise is not None and length and _lie_in_file(start, length):
        advise(start, length, _DONTNEED)
        watcher = reading()
        if watcher is not None:
            watcher.add(tensor.nbytes)


def in_large_pages(tensor: Tensor) -> None:
    """`tensor` is about to be written for the first time: in pages of megabytes, where the system has them. A hint."""
    advise, (start, length) = _madvise(), _pages(tensor)
    if advise is not None and length and tensor.is_cpu:
        advise(start, length, _HUGEPAGE)


def _pages(tensor: Tensor) -> tuple[int, int]:
    """Where its whole pages begin, and how many bytes they are."""
    start = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    return start, max(0, tensor.data_ptr() + tensor.nbytes - start) // mmap.PAGESIZE * mmap.PAGESIZE


def _lie_in_file(start: int, length: int) -> bool:
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
