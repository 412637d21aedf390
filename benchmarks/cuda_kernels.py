"""The kernels alone: attention against a copy, draws against a sort. `benchmarks.cuda` prints their tables."""

from __future__ import annotations

import platform
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from time import perf_counter

import torch

from engine.kernels.args import Laws
from engine.kernels.paging import Paging

PAGE = 32
DRAWN = (1, 6, 48, 192)  # rows: a draft step or a verification of one sequence, of 8 and of 32


@dataclass(frozen=True, slots=True)
class Card:
    """What the machine can do, measured."""

    device: torch.device
    name: str
    bytes_per_second: float  # of a copy, read and written counted
    flops: float  # of a large bf16 matmul

    @property
    def is_cuda(self) -> bool:
        """Whether it is a GPU at all; on a CPU the script only shows that it runs."""
        return self.device.type == "cuda"


def seconds_of(run: Callable[[], object], device: torch.device, times: int = 20) -> float:
    """Median of `times` runs after two that warm up."""
    found = []
    for i in range(times + 2):
        wait(device)
        start = perf_counter()
        run()
        wait(device)
        found.append(perf_counter() - start if i > 1 else 0.0)
    return statistics.median(found[2:])


def wait(device: torch.device) -> None:
    """Until the device has done all that it was told."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def measured_card(device: torch.device) -> Card:
    """Copy half a GiB; multiply two matrices."""
    size, side = (2**28, 8192) if device.type == "cuda" else (2**22, 256)
    source = torch.zeros(size, dtype=torch.bfloat16, device=device)
    target = torch.empty_like(source)
    copying = seconds_of(lambda: target.copy_(source), device)
    a = torch.randn(side, side, device=device).bfloat16()
    multiplying = seconds_of(lambda: a @ a, device, times=5)
    name = torch.cuda.get_device_name() if device.type == "cuda" else platform.processor() or "CPU"
    return Card(device, name, 2 * source.nbytes / copying, 2 * side**3 / multiplying)


def attention_table(card: Card, context: int) -> Iterator[str]:
    """The attention kernel over one layer of the 8B's K/V, as graphs of 20 calls so that launches cost nothing."""
    from engine.kernels import attention

    yield f"\n## Attention kernel, context {context}, 32 heads over 8, head size 128, bf16\n"
    yield "| sequences | rows each | one program per tile, µs | one per split, µs | TB/s of the better | of the copy |"
    yield "|---|---|---|---|---|---|"
    for size, rows in ((1, 1), (1, 6), (8, 1), (8, 6), (32, 1), (32, 6)):
        pages = -(-context // PAGE)
        arena = torch.randn(2, size * pages * PAGE, 8, 128, device=card.device).bfloat16()
        tables = torch.randperm(size * pages).view(size, pages).tolist()
        paging = Paging.of([rows] * size, [context - rows] * size, tables, PAGE, 4, card.device)
        query = torch.randn(size * rows, 32, 128, device=card.device).bfloat16()
        call = partial(attention.attend, query, arena[0], arena[1], paging, 128**-0.5)
        seconds = [graph_seconds(partial(call, spread=spread), card.device) for spread in (False, True)]
        rate = arena.nbytes / min(seconds)
        times = " | ".join(f"{s * 1e6:.1f}" for s in seconds)
        yield f"| {size} | {rows} | {times} | {rate / 1e12:.2f} | {rate / card.bytes_per_second:.0%} |"


def sampling_table(card: Card, vocab: int) -> Iterator[str]:
    """Draws of tokens, as graphs too; what torch takes to sort the same rows beside them."""
    from engine.kernels import sampling

    yield f"\n## Draws from {vocab} tokens, bf16 logits\n"
    yield "| rows | temperature alone, µs | top-p 0.9, µs | top-k 50 and top-p 0.9, µs | torch.sort, µs |"
    yield "|---|---|---|---|---|"
    for rows in DRAWN:
        logits = torch.randn(rows, vocab, device=card.device).bfloat16().mul_(3)
        laws = [law_of(rows, vocab, *cut, card.device) for cut in ((vocab, 1.0), (vocab, 0.9), (50, 0.9))]
        calls: list[Callable[[], object]] = [
            partial(sampling.choose, logits, law, cuts=i > 0) for i, law in enumerate(laws)
        ]
        calls.append(partial(torch.sort, logits, dim=-1, descending=True, stable=True))
        yield f"| {rows} | " + " | ".join(f"{graph_seconds(call, card.device) * 1e6:.1f}" for call in calls) + " |"


def law_of(rows: int, vocab: int, top_k: int, top_p: float, device: torch.device) -> Laws:
    """Rows of one law, each with a seed of its own."""
    whole = torch.arange(rows, device=device)
    real = torch.ones(rows, dtype=torch.float64, device=device)
    return Laws(real.float(), whole * 0 + min(top_k, vocab), real * top_p, real * 0, whole, whole * 0 + 9, whole * 0)


def graph_seconds(call: Callable[[], object], device: torch.device, calls: int = 20) -> float:
    """Seconds of one call, from a CUDA graph of many."""
    call()
    wait(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call()
    return seconds_of(graph.replay, device) / calls
