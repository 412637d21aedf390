"""Whether and where Triton's kernels can run here: on a GPU, or interpreted, for which `tests/conftest.py` asks."""

from __future__ import annotations

from importlib import metadata

import numpy as np
import torch

from pilotfish.engine.kernels import has_triton

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _version(text: str) -> tuple[int, int]:
    major, minor, *_ = text.split(".")
    return int(major), int(minor)


def _why_not() -> str | None:
    if not has_triton():
        return "triton is not installed"
    old = not torch.cuda.is_available() and _version(metadata.version("triton")) < (3, 7)
    if old and _version(np.__version__) >= (2, 4):
        return "the interpreter of triton before 3.7 cannot read numpy 2.4's arrays"
    return None


WHY_NOT = _why_not()
