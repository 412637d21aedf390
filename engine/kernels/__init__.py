"""Triton kernels for CUDA, and what each of them means in plain torch.

Triton is imported by the modules that hold kernels (`attention`, `plan`, `rows`, `sampling`, `truncation`, ...) and by
nothing else, so that a machine without it can do without. `args`, `paging` and `reference` are plain torch.
"""

from __future__ import annotations

import importlib.util
import os


def has_triton() -> bool:
    """Whether kernels can be built here at all; on a CPU they are then interpreted, where that is asked for."""
    return importlib.util.find_spec("triton") is not None


def is_interpreted() -> bool:
    """Whether kernels run on the CPU, element by element: for tests."""
    return has_triton() and os.environ.get("TRITON_INTERPRET") == "1"


def faults() -> tuple[type[Exception], ...]:
    """What a kernel raises that cannot be compiled, or does not fit on this card: no RuntimeError, but Triton's own."""
    if not has_triton():
        return ()
    from triton.errors import TritonError

    return (TritonError,)
