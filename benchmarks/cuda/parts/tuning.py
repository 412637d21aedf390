"""The fastest blocks, warps, buffers and programs for attention on this card, for engine/kernels/tuning.json.

Each winner is written as soon as it is known, to a file in that format that can replace the committed one.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace

import torch

from benchmarks.cuda.arenas import Arenas
from benchmarks.cuda.card import Card, seconds_of_each
from benchmarks.cuda.parts.attending import ATTENDED
from benchmarks.cuda.parts.kernels import DECODED, VERIFIED
from benchmarks.cuda.report import PartReport
from benchmarks.cuda.setting import Setting
from benchmarks.cuda.shapes import Heads
from pilotfish.engine.kernels import faults
from pilotfish.engine.kernels.paging import Tuning, key_of, tuning_for

Shapes = tuple[tuple[int, int, int], ...]
# (keys at a time, warps, buffers): the shapes that compile without spills, and their neighbours
_DECODE: Shapes = ((64, 4, 3), (64, 4, 2), (64, 4, 4), (32, 4, 3), (32, 4, 5), (64, 8, 3), (128, 4, 2), (128, 8, 3))
_PROMPT: Shapes = ((64, 8, 3), (64, 8, 2), (64, 4, 3), (32, 8, 3), (128, 8, 2), (128, 8, 3))
_PROGRAMS = (132, 264, 528, 1056)


@dataclass(frozen=True, slots=True)
class Task:
    """Batches of one kind for which a tuning must be fast: the geometric mean of their times counts."""

    key: str
    first: Tuning
    arenas: list[Arenas]

    def microseconds(self, tuning: Tuning, device: torch.device) -> float:
        """Return the microseconds of one call."""
        logs = [math.log(seconds_of_each(arenas.calls(tuning), device)) for arenas in self.arenas]
        return math.exp(sum(logs) / len(logs)) * 1e6

    def differs(self, tuning: Tuning) -> float:
        """Return the largest difference in the results that this tuning causes."""
        pairs = [(arenas.calls(tuning)[0](), arenas.calls(self.first)[0]()) for arenas in self.arenas]
        return max(float((got.float() - want.float()).abs().max()) for got, want in pairs)


def sweep(setting: Setting, section: PartReport) -> None:
    """Try blocks, warps and buffers, then the number of programs; write the winner of each task to tuning.json."""
    card, winners = Card.measured(setting.device), dict[str, Mapping[str, int]]()
    for task, shapes in _tasks(setting, card):
        section.say(f"`{task.key}`")
        section.table("keys at a time", "warps", "buffers", "programs", "µs", "")
        best, least = task.first, math.inf
        for tuning in [replace(task.first, block_n=n, num_warps=w, num_stages=s) for n, w, s in shapes]:
            best, least = _better(task, tuning, card, best, least, section)
        for programs in _PROGRAMS if card.is_cuda else ():
            if programs != best.programs:
                best, least = _better(task, replace(best, programs=programs), card, best, least, section)
        winners[task.key] = asdict(best)
        section.number(task.key, **asdict(best), microseconds=least)
        section.file("tuning.json", json.dumps(winners, indent=2) + "\n")


def _tasks(setting: Setting, card: Card) -> Iterable[tuple[Task, Shapes]]:
    """Yield tasks, the target's first, because the time limit may cut off the last ones."""
    context, sizes = setting.long_context, (min(setting.sizes), max(setting.sizes))
    for shape in dict.fromkeys((setting.target, setting.draft)):
        heads = Heads.of(shape)
        for prompt, shapes in ((False, _DECODE), (True, _PROMPT)):
            if prompt:
                chunk = context // 4
                batches = [([chunk], [0]), ([chunk], [context - chunk])]
            else:
                batches = [([rows] * n, [context - rows] * n) for n in sizes for rows in (DECODED, VERIFIED)]
            arenas = [Arenas.of(card, heads, *batch, card.dtype) for batch in batches[: None if card.is_cuda else 1]]
            key = key_of(_capability(card), card.dtype, heads.group, heads.dim, prompt)
            yield (
                Task(key, tuning_for(card.dtype, heads.group, heads.dim, prompt), arenas),
                shapes[: None if card.is_cuda else 1],
            )


def _better(
    task: Task, tuning: Tuning, card: Card, best: Tuning, least: float, section: PartReport
) -> tuple[Tuning, float]:
    """Return the faster tuning, if its results agree."""
    cells = tuning.block_n, tuning.num_warps, tuning.num_stages, tuning.programs
    try:
        difference, micros = task.differs(tuning), task.microseconds(tuning, card.device)
    except faults() as error:  # it does not fit on this card
        section.row(*cells, "", f"{type(error).__name__}: {str(error).splitlines()[0]}")
        return best, least
    is_right = difference <= ATTENDED[card.dtype]
    is_better = is_right and micros < least
    section.row(
        *cells, f"{micros:.1f}", "best so far" if is_better else "" if is_right else f"**off by {difference:.2g}**"
    )
    return (tuning, micros) if is_better else (best, least)


def _capability(card: Card) -> str:
    return ".".join(map(str, torch.cuda.get_device_capability())) if card.is_cuda else "none"
