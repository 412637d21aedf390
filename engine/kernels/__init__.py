"""Triton kernels for CUDA, and their equivalents in plain torch.

Only the modules with kernels (`attention`, `plan`, `rows`, `sampling`, `truncation`, ...) import Triton, which is
optional. `args`, `paging` and `reference` are plain torch.
"""

from __future__ import annotations

import importlib.util
import os


def has_triton() -> bool:
    """Whether Triton is installed; on a CPU kernels are interpreted on request."""
    return importlib.util.find_spec("triton") is not None


def is_interpreted() -> bool:
    """Whether kernels are interpreted on the CPU, for tests."""
    return has_triton() and os.environ.get("TRITON_INTERPRET") == "1"


def faults() -> tuple[type[Exception], ...]:
    """The errors of a kernel that cannot be compiled or does not fit on this GPU: Triton's own classes."""
    if not has_triton():
        return ()
    from triton.errors import TritonError

    return (TritonError,)
