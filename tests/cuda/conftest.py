"""Processes that share a card: each may take its part of the memory, and no more."""

from __future__ import annotations

import os

import torch

SHARE = 0.8  # of the card for all of them; the rest is for what CUDA takes itself


def pytest_configure() -> None:
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    if workers > 1 and torch.cuda.is_available():
        torch.cuda.set_per_process_memory_fraction(SHARE / workers)
