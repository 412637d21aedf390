"""What a draw is on a GPU, found through a driver that runs nothing: launches, variants, spills, widths of loads."""

from __future__ import annotations

import random
import re
from collections import defaultdict
from typing import Any

import torch

from pilotfish.engine.kernels import sampling
from pilotfish.engine.kernels.args import SamplerRows, Tracks
from tests.no_gpu.counting import Counting
from tests.no_gpu.stand_in import StandIn

VOCAB = 128256


def samplers_of(num_rows: int, skipped: int) -> SamplerRows:
    """Numbers that begin anywhere: what an allocator or a slice gives."""
    whole = torch.zeros(num_rows + skipped, dtype=torch.int64)[skipped:]
    real = torch.zeros(num_rows + skipped, dtype=torch.float64)[skipped:]
    return SamplerRows(
        top_k=whole, top_p=real, min_p=real, seed=whole, position=whole, stream=whole,
        temperature=real.float().clone(),
    )  # fmt: skip


def draw(num_rows: int, dtype: torch.dtype, *, truncated: bool, skipped: int = 0) -> None:
    sampling.choose(torch.empty(num_rows, VOCAB, dtype=dtype), samplers_of(num_rows, skipped), truncated=truncated)


def launches_of(driver: StandIn, truncated: bool) -> tuple[int, list[str]]:
    logits, samplers, before = torch.empty(3, VOCAB), samplers_of(3, 0), len(driver.launches)
    with Counting() as counting:
        sampling.choose(logits, samplers, truncated=truncated)
    return len(driver.launches) - before, counting.names


def commit_all() -> None:
    """Of all K up to 16."""
    for k in (0, 1, 2, 3, 4, 15, 16):
        for size in (1, 3, 48):
            whole = torch.zeros(size + 1, dtype=torch.int64)
            rows = torch.zeros(size + 1, 99, dtype=torch.int64)
            tracks = Tracks(rows, whole, whole, torch.zeros(size + 1, 8, dtype=torch.int64), whole)
            drawn = torch.zeros(size, k + 1, dtype=torch.int64)
            sampling.commit(drawn, drawn[:, 1:], whole[1:], whole[:-1], tracks)


def facts(driver: StandIn) -> dict[str, Any]:
    at_first = {}
    for dtype in (torch.float32, torch.bfloat16):
        before = len(driver.seen)
        draw(7, dtype, truncated=True)
        at_first[str(dtype).removeprefix("torch.")] = len(driver.seen) - before
    known, chance = set(driver.seen), random.Random(0)
    for num_rows in (1, 16, 128, *(chance.randint(1, 200) for _ in range(9))):
        for dtype in (torch.float32, torch.bfloat16):
            for truncated in (True, False):
                draw(num_rows, dtype, truncated=truncated, skipped=chance.randint(0, 3))
    later = sorted(set(driver.seen) - known)
    counted = {name: launches_of(driver, truncated) for name, truncated in (("truncated", True), ("no cuts", False))}
    draws = len(driver.seen)
    commit_all()
    loads, mine = defaultdict(set), driver.newest()
    for compiled in mine:
        # The only vectors that these kernels load are of logits.
        for count, bits in re.findall(r"ld\.global\.v(\d)\.b(\d+)", compiled.kernel.asm["ptx"]):
            loads[compiled.name.removesuffix("_kernel")].add(int(count) * int(bits) // 8)
    return {
        "launches": {name: number for name, (number, _) in counted.items()},
        "torch": {name: seen for name, (_, seen) in counted.items()},
        "compiled at first": at_first,
        "compiled later": later,
        "commits compiled": len(driver.seen) - draws,
        "stack": [compiled.resources.stack for compiled in mine],
        "loads": {name: sorted(widths) for name, widths in loads.items()},
    }
