"""What was read from a file leaves memory; what was written stays as it is."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.mapped import let_go

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="pages are counted by Linux")


def resident(path: Path) -> int:
    """KiB of a mapped file that are in this process's memory."""
    lines, found = Path("/proc/self/smaps").read_text().splitlines(), 0
    for i, line in enumerate(lines):
        if line.endswith(str(path)):
            found += int(next(later for later in lines[i:] if later.startswith("Rss:")).split()[1])
    return found


def test_mapped_pages_are_let_go_and_read_again(tmp_path: Path) -> None:
    path, numbers = tmp_path / "weights", torch.arange(2**20, dtype=torch.int32)
    numbers.numpy().tofile(path)
    with path.open("rb") as file:
        os.fsync(file.fileno())  # only what lies in the file already can be dropped
    mapped = torch.from_numpy(np.memmap(path, np.int32, "c"))
    assert torch.equal(mapped, numbers)
    assert resident(path) == 4096
    let_go(mapped)
    assert resident(path) < 1024
    assert torch.equal(mapped, numbers)


def test_numbers_of_our_own_survive() -> None:
    numbers = torch.arange(2**20)
    let_go(numbers)
    let_go(numbers[:3])
    let_go(numbers[:0])
    assert torch.equal(numbers, torch.arange(2**20))
