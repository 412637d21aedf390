"""The parts of both commands, most important first, and the time limit of each. This module does not import torch.

Limits are for the part's own work on one H100. Time that a part does not use remains for later parts. A part that
needs more than its limit and this remaining time is killed, so a command never takes longer than `WHOLE` seconds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module

from benchmarks.cuda.report import PartReport
from benchmarks.cuda.setting import Setting

WHOLE = 540  # seconds: the machine is available for ten minutes per call, and setup takes some of them
START = 15  # seconds until the first part has loaded its libraries; later parts load while the part before them runs


@dataclass(frozen=True, slots=True)
class Part:
    """One section: `work` is a function of a module of `benchmarks.cuda`."""

    name: str
    work: str
    title: str
    limit: int  # seconds
    expected: int  # seconds on an H100, estimated

    def load(self) -> Callable[[Setting, PartReport], None]:
        """Import and return the function."""
        module, _, function = self.work.rpartition(".")
        found: Callable[[Setting, PartReport], None] = getattr(import_module(f"benchmarks.cuda.{module}"), function)
        return found


FIRST_LIGHT = (
    Part("card", "card.ceilings", "Card, versions, ceilings", 15, 5),
    Part("attention", "parts.checks.attention", "Attention against its reference", 60, 45),
    Part("kernels", "parts.checks.others", "Other kernels against their reference", 45, 25),
    Part("families", "parts.families.compare", "Sinks, chunks, latents and experts", 60, 50),
    Part("tokens", "parts.tokens.compare", "Tokens of rounds, plain steps and transformers", 60, 45),
    Part("waits", "parts.waits.count", "Synchronisations in the steady loop", 30, 20),
    Part("plain", "parts.decoding.plain", "Plain decoding against its limit", 45, 30),
    Part("rounds", "parts.decoding.rounds", "Rounds against theirs", 60, 50),
    Part("speed", "parts.kernels.attention", "Attention against a copy", 25, 15),
    Part("profile", "parts.profiles.write", "Kernels of a step, by time", 40, 30),
    Part("tuning", "parts.tuning.sweep", "Tuning of attention", 85, 80),
)
FIRST_LIGHT_2 = (
    Part("auto", "parts.decoding.auto", "AUTO against plain decoding", 215, 150),
    Part("peers", "parts.peers.compare", "Beside transformers, decoding alone", 200, 140),
    Part("prefill", "parts.prefill.measure", "Prompts against their limit", 50, 25),
    Part("draws", "parts.kernels.draws", "Draws of tokens against a sort", 45, 35),
    Part("fp8", "parts.kernels.fp8", "Matrices in fp8, and their sums kept short", 15, 5),
)
COMMANDS = {"first-light": FIRST_LIGHT, "first-light-2": FIRST_LIGHT_2}


def table(parts: tuple[Part, ...]) -> list[str]:
    """Return the table in docs/benchmarks/cuda.md."""
    rows = [f"| `{p.name}` | {p.title} | {p.expected / 60:.1f} | {p.limit / 60:.1f} |" for p in parts]
    expected, limit = sum(p.expected for p in parts), START + sum(p.limit for p in parts)
    return [
        "| part | what | minutes, by arithmetic | at most |",
        "|---|---|---|---|",
        *rows,
        f"| | all, with loading | {(START + expected) / 60:.1f} | {limit / 60:.1f} |",
    ]
