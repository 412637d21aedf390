"""Kernels are interpreted on the CPU, element by element; where that cannot be done, their tests are skipped."""

from __future__ import annotations

import os
from importlib import metadata

import numpy as np
import pytest
import torch

from engine.kernels import has_triton

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when a kernel is defined, so before the first import


def _version(text: str) -> tuple[int, int]:
    major, minor, *_ = text.split(".")
    return int(major), int(minor)


def _why_not() -> str | None:
    if not has_triton():
        return "triton is not installed"
    if _version(metadata.version("triton")) < (3, 7) and _version(np.__version__) >= (2, 4):
        return "the interpreter of triton before 3.7 cannot read numpy 2.4's arrays"
    return None


WHY_NOT = _why_not()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "/kernels/" not in item.nodeid:
            continue
        # exp of a large number is inf, and x / inf is the 0 that is wanted.
        item.add_marker(pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning"))
        if WHY_NOT:
            item.add_marker(pytest.mark.skip(reason=WHY_NOT))
