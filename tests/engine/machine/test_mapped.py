"""What was read from a file leaves memory; what was written stays as it is."""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from pilotfish.engine.kv.arena import KVArena, KVLayout, LayerKV
from pilotfish.engine.machine.mapped import release_libraries, release_mapped

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="pages are counted by Linux")


def resident(path: Path) -> int:
    """KiB of a mapped file that are in this process's memory."""
    lines, found = Path("/proc/self/smaps").read_text().splitlines(), 0
    for i, line in enumerate(lines):
        if line.endswith(str(path)):
            found += int(next(later for later in lines[i:] if later.startswith("Rss:")).split()[1])
    return found


def written(path: Path) -> torch.Tensor:
    """A file of numbers, mapped."""
    torch.arange(2**20, dtype=torch.int32).numpy().tofile(path)
    with path.open("rb") as file:
        os.fsync(file.fileno())
    return torch.from_numpy(np.memmap(path, np.int32, "c"))


def in_cache(path: Path) -> int:
    """How many pages of a file the system holds."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as view:
        held = (ctypes.c_ubyte * -(-len(view) // mmap.PAGESIZE))()
        data = np.frombuffer(view, np.uint8)
        assert not ctypes.CDLL(None).mincore(ctypes.c_void_p(data.ctypes.data), ctypes.c_size_t(len(view)), held)
        del data
        return sum(page & 1 for page in held)


def test_mapped_pages_are_let_go_and_read_again_from_the_systems_cache(tmp_path: Path) -> None:
    """Or whoever starts next would read all of it from the disk again."""
    path, numbers = tmp_path / "weights", torch.arange(2**20, dtype=torch.int32)
    mapped = written(path)
    assert torch.equal(mapped, numbers)
    assert resident(path) == 4096
    release_mapped(mapped)
    assert resident(path) < 1024
    assert in_cache(path) == 4096 * 1024 // mmap.PAGESIZE
    assert torch.equal(mapped, numbers)


def test_code_is_let_go_and_runs_again() -> None:
    library = Path(torch.__file__).resolve().parent / "lib" / "libtorch_cpu.so"
    before, product = resident(library), torch.ones(3, 3) @ torch.ones(3, 3)
    release_libraries()
    assert resident(library) < before / 4
    assert torch.equal(torch.ones(3, 3) @ torch.ones(3, 3), product)


def test_a_page_that_was_written_to_is_not_let_go_of(tmp_path: Path) -> None:
    mapped = written(tmp_path / "weights")
    mapped[500_000] = -1
    release_mapped(mapped)
    assert mapped[500_000] == -1


def test_numbers_of_our_own_survive() -> None:
    numbers = torch.arange(2**20)
    release_mapped(numbers)
    release_mapped(numbers[:3])
    release_mapped(numbers[:0])
    assert torch.equal(numbers, torch.arange(2**20))


def test_the_first_token_of_an_arena_waits_for_no_memory_but_its_own() -> None:
    """A large page in every layer takes half a second to be zeroed."""
    layers, rows = 8, torch.tensor([8192])  # in the middle: the ends share no large page
    arena = KVArena(KVLayout([LayerKV(4, 64, 64)] * layers, torch.bfloat16), 1024, 16, torch.device("cpu"))
    one, statm = torch.ones(1, 4, 64, dtype=torch.bfloat16), Path("/proc/self/statm")
    arena.write(0, rows, one, one)
    before = int(statm.read_text().split()[1])
    for layer in range(1, layers):
        arena.write(layer, rows, one, one)
    assert int(statm.read_text().split()[1]) - before < 100 * layers, "pages of the system"
