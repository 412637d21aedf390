"""Memory settings of processes: objects excluded from garbage collection, and when freed memory is returned."""

from __future__ import annotations

import atexit
import ctypes
import gc
from collections.abc import Iterator
from contextlib import contextmanager

_M_MMAP_THRESHOLD, _M_ARENA_MAX = -3, -8  # malloc.h
_LARGE = 128 << 10  # bytes
_YOUNG = 10_000  # objects, between collections; Python's default of 700 is less than one step of 64 streams makes


@contextmanager
def importing() -> Iterator[None]:
    """Context for imports: disables collection, then excludes all existing objects from later collections.

    Imports produce almost no garbage, and collections would take a sixth of their time.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def freeze_loaded() -> None:
    """Exclude all existing objects from later collections: models and libraries stay until the process ends.

    Every token creates a few objects. With many streams they live long enough to cause full collections, each of which
    would visit a few hundred thousand objects of torch and transformers (docs/benchmarks/frontend.md).
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG)
    atexit.register(gc.unfreeze)  # so that libraries can clean up their objects at exit


def settle() -> None:
    """Return memory that is not needed after loading to the system, including pages of code that ran once."""
    from pilotfish.engine.machine.mapped import release_freed, release_libraries  # numpy is imported later

    freeze_loaded()
    release_freed()
    release_libraries()


def map_large_blocks() -> None:
    """With glibc, return freed blocks of 128 KiB and more to the system immediately.

    Otherwise, after the first freed block of 4 MiB, glibc takes such blocks from its heaps, whose fragmentation keeps
    them large: after the largest calls of all kinds a server used 80 to 190 MiB more than before, now 45. Not for
    processes that compute, because each block must be mapped again.
    """
    _set(_M_MMAP_THRESHOLD, _LARGE)


def share_one_heap() -> None:
    """With glibc, let all threads that start from now on use one heap.

    Otherwise each of the first threads has its own heap, whose free end is never returned to the system: 34 MB of an
    engine whose layers were read by several threads.
    """
    _set(_M_ARENA_MAX, 1)


def _set(option: int, value: int) -> None:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(option, value)
