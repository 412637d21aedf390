"""Memory that the C library holds. Knows nothing of what it was used for."""

from __future__ import annotations

import ctypes


def give_back() -> None:
    """Give freed memory back to the system, where the C library can, which holds no lock of the interpreter."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
