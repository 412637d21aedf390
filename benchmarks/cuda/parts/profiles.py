"""The device's work in a plain step and in a round, kernel by kernel, at the smallest batch and at the largest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch.profiler import ProfilerActivity, profile

from benchmarks.cuda.card import Card, wait
from benchmarks.cuda.engines import RandomPair, empty, engine_of, fill, positions_needed
from benchmarks.cuda.parts.decoding import MOST_AUTO
from benchmarks.cuda.report import PartReport
from benchmarks.cuda.setting import Setting
from pilotfish.engine.engine import Engine

_STEPS, _WARM = 4, 4
_IN_PAGE, _IN_FILE = 8, 40  # number of kernels listed
_WIDTH = 90  # maximum characters of a kernel's name


@dataclass(frozen=True, slots=True)
class KernelTime:
    """One kernel, summed over all steps of a profile."""

    name: str
    count: int
    microseconds: float


def write(setting: Setting, section: PartReport) -> None:
    """Write a short table to the page, and a long table for each profile to profile.txt."""
    card, k, file = Card.measured(setting.device), MOST_AUTO, list[str]()
    steps = min(_STEPS, setting.steps // 3)
    pair, most = RandomPair.of(card, setting.target, setting.draft), max(setting.sizes)
    engine = engine_of(
        pair, card, most, positions_needed(setting.context, most, steps + _WARM, k), setting.acceptance, k
    )
    if not card.is_cuda:
        section.needs_a_card("Time of kernels on the device (operations of the host stand here)")
    for size in (min(setting.sizes), most):
        for drafts in (0, k):
            kernels = _profiled(engine, card, size, setting.context, drafts, steps)
            count, micros = (sum(getattr(x, name) for x in kernels) / steps for name in ("count", "microseconds"))
            title = f"Batch {size}, K {drafts}: {count:.0f} kernels and copies a step, {micros / 1e3:.2f} ms of them"
            section.say(f"{title}.")
            section.number(f"{size}, K {drafts}", kernels=count, milliseconds=micros / 1e3)
            section.table("kernel", "times a step", "µs a step", "of all")
            for x in kernels[:_IN_PAGE]:
                share = x.microseconds / steps / micros if micros else 0.0
                section.row(f"`{x.name}`", f"{x.count / steps:g}", f"{x.microseconds / steps:.0f}", f"{share:.0%}")
            lines = (f"{x.microseconds / steps:10.1f} µs {x.count / steps:7.1f} x {x.name}" for x in kernels)
            file += [title, *list(lines)[:_IN_FILE], ""]
            section.file("profile.txt", "\n".join(file))


def _profiled(engine: Engine, card: Card, size: int, context: int, k: int, steps: int) -> list[KernelTime]:
    """Profile decoding steps, sorted by time on the device; on a CPU, operations by time on the host."""
    fill(engine, size, context, k)
    for _ in range(_WARM):  # one-time recordings are not part of a step
        engine.step()
    wait(card.device)
    with profile(activities=[ProfilerActivity.CUDA if card.is_cuda else ProfilerActivity.CPU]) as profiler:
        for _ in range(steps):
            engine.step()
        wait(card.device)
    empty(engine)
    averages: Any = profiler.key_averages()
    found = [
        KernelTime(x.key[:_WIDTH].replace("|", "/"), x.count, x.self_device_time_total or x.self_cpu_time_total)
        for x in averages
        if x.device_type.name == ("CUDA" if card.is_cuda else "CPU")
    ]
    return sorted(found, key=lambda kernel: -kernel.microseconds)
