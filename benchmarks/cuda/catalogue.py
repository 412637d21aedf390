"""The parts of both commands, in order of worth, and how long each may take. Knows no torch.

Limits are of a part's own work on one H100. What a part leaves over goes to those behind it, and what it
wants beyond its limit is taken from nobody, so that a whole command never takes longer than `WHOLE` seconds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module

from benchmarks.cuda.report import PartReport
from benchmarks.cuda.setting import Setting

WHOLE = 540  # seconds: a machine is lent for calls of ten minutes, of which some go into getting there
START = 15  # of these until the first part has loaded its libraries; others load while one before them works


@dataclass(frozen=True, slots=True)
class Part:
    """One section: `work` is a function of a module of `benchmarks.cuda`."""

    name: str
    work: str
    title: str
    limit: int  # seconds
    expected: int  # seconds on an H100, by arithmetic

    def load(self) -> Callable[[Setting, PartReport], None]:
        """Import what it needs."""
        module, _, function = self.work.rpartition(".")
        found: Callable[[Setting, PartReport], None] = getattr(import_module(f"benchmarks.cuda.{module}"), function)
        return found


FIRST_LIGHT = (
    Part("card", "card.ceilings", "Card, versions, ceilings", 20, 5),
    Part("attention", "parts.checks.attention", "Attention against its reference", 70, 45),
    Part("kernels", "parts.checks.others", "Other kernels against their reference", 45, 25),
    Part("tokens", "parts.tokens.compare", "Tokens of rounds, plain steps and transformers", 70, 45),
    Part("waits", "parts.waits.count", "Synchronisations in the steady loop", 30, 20),
    Part("plain", "parts.decoding.plain", "Plain decoding against its limit", 55, 30),
    Part("rounds", "parts.decoding.rounds", "Rounds against theirs", 75, 50),
    Part("speed", "parts.kernels.attention", "Attention against a copy", 30, 15),
    Part("profile", "parts.profiles.write", "Kernels of a step, by time", 45, 30),
    Part("tuning", "parts.tuning.sweep", "Tuning of attention", 85, 80),
)
FIRST_LIGHT_2 = (
    Part("auto", "parts.decoding.auto", "AUTO against plain decoding", 215, 150),
    Part("peers", "parts.peers.compare", "Beside transformers, decoding alone", 200, 140),
    Part("prefill", "parts.prefill.measure", "Prompts against their limit", 50, 25),
    Part("draws", "parts.kernels.draws", "Draws of tokens against a sort", 60, 35),
)
COMMANDS = {"first-light": FIRST_LIGHT, "first-light-2": FIRST_LIGHT_2}


def table(parts: tuple[Part, ...]) -> list[str]:
    """As docs/benchmarks/cuda.md shows them."""
    rows = [f"| `{p.name}` | {p.title} | {p.expected / 60:.1f} | {p.limit / 60:.1f} |" for p in parts]
    expected, limit = sum(p.expected for p in parts), START + sum(p.limit for p in parts)
    return [
        "| part | what | minutes, by arithmetic | at most |",
        "|---|---|---|---|",
        *rows,
        f"| | all, with loading | {(START + expected) / 60:.1f} | {limit / 60:.1f} |",
    ]
