"""What processes set about their memory: what collections leave out, and what goes back when it is freed."""

from __future__ import annotations

import atexit
import ctypes
import gc
from collections.abc import Iterator
from contextlib import contextmanager

_M_MMAP_THRESHOLD, _M_ARENA_MAX = -3, -8  # malloc.h
_LARGE = 128 << 10  # bytes


@contextmanager
def importing() -> Iterator[None]:
    """Import within it: nothing is collected meanwhile, and later collections leave out what there is at its end.

    Imports leave hardly any garbage, and collections would take a sixth of their time.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def freeze_loaded() -> None:
    """Exclude all existing objects from later collections: models and libraries stay until the process ends.

    Every token creates a few objects. With many streams they live long enough to cause full collections, and each full
    collection would visit some hundred thousand objects of torch and transformers (docs/benchmarks/frontend.md).
    """
    gc.collect()
    gc.freeze()
    atexit.register(gc.unfreeze)  # so that libraries can clean up their objects at exit


def settle() -> None:
    """Keep of a load what stays: other memory goes back to the system, and so do pages of code that was run once."""
    from engine.machine.mapped import release_freed, release_libraries  # numpy is imported later

    freeze_loaded()
    release_freed()
    release_libraries()


def map_large_blocks() -> None:
    """Let freed blocks of 128 KiB and more go back to the system at once, where the C library is glibc.

    Else the first freed block of 4 MiB lets glibc take such blocks from its heaps, which their gaps keep large: after
    the largest calls of all kinds a server had 80 to 190 MiB more than before, now 45. Not for processes that compute:
    each block has to be mapped again.
    """
    _set(_M_MMAP_THRESHOLD, _LARGE)


def share_one_heap() -> None:
    """Let all threads that start from now on take memory from one heap, where the C library is glibc.

    Else each of the first threads has a heap of its own, and what is free at the end of such a one is never given back:
    34 MB of an engine whose layers were read by several threads.
    """
    _set(_M_ARENA_MAX, 1)


def _set(option: int, value: int) -> None:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(option, value)
