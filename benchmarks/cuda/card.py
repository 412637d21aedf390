"""The machine under test: its description, its measured limits, and functions for timing on it."""

from __future__ import annotations

import platform
import statistics
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from time import perf_counter

import torch

from benchmarks.cuda.report import PartReport
from benchmarks.cuda.setting import Setting
from benchmarks.harness.machine import commit, processor, versions

_CALLS = 20  # number of calls in a timed graph, so that launch costs are negligible
_CPU_CACHE = 2**12  # bytes: small, so that a dry run also uses several arenas


@dataclass(frozen=True, slots=True)
class Card:
    """The measured limits of the machine."""

    device: torch.device
    name: str
    bytes_per_second: float  # of a copy, counting both read and written bytes
    flops: float  # of a large bf16 matmul
    cache_bytes: int  # of the L2 cache

    @property
    def is_cuda(self) -> bool:
        """Return whether it is a GPU. On a CPU, the benchmark only shows that everything runs."""
        return self.device.type == "cuda"

    @property
    def dtype(self) -> torch.dtype:
        """Return the type for kernels alone: bfloat16, which Triton's interpreter does not support, or float16."""
        return torch.bfloat16 if self.is_cuda else torch.float16

    @classmethod
    def measured(cls, name: str) -> Card:
        """Measure a copy of half a GiB and a matmul."""
        device = torch.device(name)
        torch.manual_seed(0)
        size, side = (2**28, 8192) if device.type == "cuda" else (2**20, 128)
        source = torch.zeros(size, dtype=torch.bfloat16, device=device)
        target = torch.empty_like(source)
        copying = seconds_of(lambda: target.copy_(source), device)
        a = torch.randn(side, side, device=device).bfloat16()
        multiplying = seconds_of(lambda: a @ a, device, times=5)
        rates = 2 * source.nbytes / copying, 2 * side**3 / multiplying
        if device.type == "cpu":
            return cls(device, processor(), *rates, _CPU_CACHE)
        found = torch.cuda.get_device_properties(device)
        return cls(device, found.name, *rates, found.L2_cache_size)


def ceilings(setting: Setting, section: PartReport) -> None:
    """Write the description of the machine and the rates from which all limits are computed."""
    section.say(f"{versions('torch', 'transformers', *_triton())}; commit {commit()}; {processor()}.")
    if setting.is_cuda:
        found = torch.cuda.get_device_properties(0)
        section.say(
            f"{found.name}, compute capability {found.major}.{found.minor}, {found.multi_processor_count} "
            f"multiprocessors, {found.total_memory / 2**30:.0f} GiB, L2 cache {found.L2_cache_size / 2**20:.0f} MiB, "
            f"CUDA {torch.version.cuda}."
        )
    else:
        section.needs_a_card(f"The rest of this line ({platform.machine()} here)")
    card = Card.measured(setting.device)
    section.say(f"Copies {card.bytes_per_second / 1e12:.3f} TB/s, bf16 matmuls {card.flops / 1e12:.2f} TFLOP/s.")
    section.number("card", name=card.name, bytes_per_second=card.bytes_per_second, flops=card.flops)


def _triton() -> tuple[str, ...]:
    from pilotfish.engine.kernels import has_triton

    return ("triton",) if has_triton() else ()


def wait(device: torch.device) -> None:
    """Wait until the device has completed all submitted work."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def seconds_of(run: Callable[[], object], device: torch.device, times: int = 20) -> float:
    """Return the median of `times` runs after two warm-up runs."""
    found = []
    for i in range(times + 2):
        wait(device)
        start = perf_counter()
        run()
        wait(device)
        found.append(perf_counter() - start if i > 1 else 0.0)
    return statistics.median(found[2:])


def seconds_of_each(calls: Seq[Callable[[], object]], device: torch.device) -> float:
    """Return seconds of one call, from a CUDA graph that repeats `calls`. On a CPU, each call runs once."""
    if device.type == "cpu":
        start = perf_counter()
        for call in calls:
            call()
        return (perf_counter() - start) / len(calls)
    for call in calls:  # compile all kernels before the graph is recorded
        call()
    wait(device)
    rounds = -(-_CALLS // len(calls))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in [*calls] * rounds:
            call()
    return seconds_of(graph.replay, device) / (rounds * len(calls))
