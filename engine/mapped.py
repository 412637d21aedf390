"""Weights that are mapped from their files: what was read once and is kept in another form need not stay in memory."""

from __future__ import annotations

import ctypes
import mmap
from functools import cache
from typing import Any

from torch import Tensor

_PAGEOUT = 21  # MADV_PAGEOUT, Linux 5.4: a page that is as it lies in a file is let go of, no other is changed


def let_go(tensor: Tensor) -> None:
    """`tensor` will hardly be read again: its pages may leave memory. A hint, for memory of any kind."""
    advise = _madvise()
    if advise is None or not tensor.nbytes:
        return
    start = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    length = tensor.data_ptr() + tensor.nbytes - start
    if length >= mmap.PAGESIZE:
        advise(start, length // mmap.PAGESIZE * mmap.PAGESIZE, _PAGEOUT)


@cache
def _madvise() -> Any:
    """The C function, or None on a system without it."""
    found = getattr(ctypes.CDLL(None), "madvise", None)
    if found is not None:
        found.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return found
