"""Speed against K by acceptance, and measured speed-up against acceptance beside the theory."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from benchmarks.harness.lab import Lab, Row, Section, row_of
from benchmarks.harness.timing import AUTO
from benchmarks.harness.turns import Turn

BATCHES = (1, 4)
RATES = (0.3, 0.6, 0.8, 0.9)
DRAFTS = (1, 2, 3, 4, 5, 6, 8)


def measure(lab: Lab) -> list[Row]:
    """Measure every K and AUTO at every acceptance."""
    batches, rates = lab.options.batches or BATCHES, lab.options.rates or RATES
    return [row for batch in batches for row in _batch(lab, batch, rates)]


def _batch(lab: Lab, batch: int, rates: Sequence[float]) -> Iterator[Row]:
    context = lab.options.prompt
    prompts = lab.prompts(batch, context)
    engines = lab.engines(batch, context, DRAFTS)
    for rate in rates:
        turns = lab.rounds(engines, prompts, rate, partial(_tell, lab, batch, rate))
        for name, mine in turns.items():
            yield row_of(mine, turns["0"], batch=batch, rate=rate, k=name) | _costs(mine, turns["0"])


def _costs(turns: Sequence[Turn], plain: Sequence[Turn]) -> Row:
    """Return the costs of verification and drafting in units of a plain step; the theory uses them."""
    step = statistics.median(s for turn in plain for s in turn.verify_seconds)
    verify = statistics.median(s for turn in turns for s in turn.verify_seconds)
    drafting = statistics.median(s for turn in turns for s in turn.draft_seconds)
    return {"verify_cost": verify / step, "draft_cost": drafting / step}


def _tell(lab: Lab, batch: int, rate: float, text: str) -> None:
    lab.tell(f"sweep, batch {batch}, acceptance {rate}, {text}")


def expected_gain(rate: float, k: int, verify_cost: float, draft_cost: float) -> float:
    """Tokens per round, (1 - a^(K+1)) / (1 - a), over a round's cost in plain steps (Leviathan 2023, theorem 3.8)."""
    tokens = k + 1 if rate == 1 else (1 - rate ** (k + 1)) / (1 - rate)
    return tokens / (verify_cost + draft_cost)


def plot(rows: Sequence[Row], folder: Path) -> Sequence[str]:
    """Draw one plot of each kind per batch."""
    batches = sorted({r["batch"] for r in rows})
    parts = {batch: [r for r in rows if r["batch"] == batch] for batch in batches}
    return [picture(part, batch, folder) for batch, part in parts.items() for picture in (_by_k, _by_rate)]


def _by_k(rows: Sequence[Row], batch: int, folder: Path) -> str:
    from benchmarks.harness.plots import Line, draw

    lines = []
    for rate in sorted({r["rate"] for r in rows}):
        mine = [r for r in rows if r["rate"] == rate]
        fixed = [r for r in mine if r["k"] != AUTO]
        auto = [r["tokens_per_second"] for r in mine if r["k"] == AUTO]
        lines.append(
            Line(
                f"acceptance {rate:g}",
                [int(r["k"]) for r in fixed],
                [r["tokens_per_second"] for r in fixed],
                level=auto,
            )
        )
    title = f"Batch {batch}: speed by number of drafts (dashed: AUTO)"
    return draw(folder / f"sweep-k-batch{batch}.png", title, "drafts per round, K", "decoding speed (tokens/s)", lines)


def _by_rate(rows: Sequence[Row], batch: int, folder: Path) -> str:
    """Plot measured points, and theoretical curves from the measured costs of drafting and verification."""
    from benchmarks.harness.plots import Line, draw

    lines = []
    for k in [k for k in ("1", "2", "4", "8") if any(r["k"] == k for r in rows)]:
        mine = sorted((r for r in rows if r["k"] == k), key=lambda r: r["rate"])
        verify, draft = (statistics.median(r[cost] for r in mine) for cost in ("verify_cost", "draft_cost"))
        grid = [i / 50 for i in range(50)]
        theory = [expected_gain(rate, int(k), verify, draft) for rate in grid]
        points = [r["rate"] for r in mine], [r["gain"] for r in mine]
        lines.append(Line(f"K={k}", *points, curve=(grid, theory)))
    title = f"Batch {batch}: gain by acceptance (points measured, curves expected)"
    label = "speed over plain decoding (ratio)"
    return draw(folder / f"gamma-batch{batch}.png", title, "acceptance rate per draft", label, lines)


def verdict(rows: Sequence[Row]) -> Sequence[str]:
    """Return a sentence about the speed-up at acceptance 0.8."""
    told = []
    for batch, aim in ((1, 1.7), (4, 1.3)):
        mine = [r for r in rows if r["batch"] == batch and r["rate"] == 0.8]
        if mine:
            best, auto = max(mine, key=lambda r: r["gain"]), next(r for r in mine if r["k"] == AUTO)
            told.append(
                f"Batch {batch}, acceptance 0.8: best {best['gain']:.2f} times plain (K {best['k']}), "
                f"AUTO {auto['gain']:.2f}; the aim is {aim}."
            )
    return told


SECTION = Section(
    "sweep",
    "Speed against K and acceptance",
    measure,
    "Decoding speed in tokens/s (from the moment that every sequence has a token), median over rounds. In a round each "
    "way has an engine of its own, and the next step is of whichever has used least time. Gain: to plain decoding in "
    "the same round, median; whole gain: the same with the prompts' time in it. Costs of a round are in plain steps.",
    {
        "batch": "{batch}",
        "acceptance": "{rate:g}",
        "K": "{k}",
        "tokens/s": "{tokens_per_second:.1f}",
        "gain": "{gain:.2f}",
        "whole gain": "{whole_gain:.2f}",
        "kept of drafts": "{acceptance_rate:.2f}",
        "verify cost": "{verify_cost:.2f}",
        "draft cost": "{draft_cost:.2f}",
        "foreign cores": "{foreign:.2f}",
    },
    plot,
    verdict,
)
