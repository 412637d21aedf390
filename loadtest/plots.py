"""Plots of a server's behaviour under load. They need matplotlib, which the extra `loadtest` installs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loadtest.phases import Phase
from loadtest.samples import Objective

_SIZE, _DPI = (6.6, 4.0), 100  # inches, dots per inch
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")  # safe for colour blindness
RATE, CALLERS, BATCH = (
    "requests sent, per second",
    "callers, each with one request",
    "mean sequences per verifying pass",
)


@dataclass(frozen=True, slots=True)
class Series:
    """A line through points."""

    label: str
    points: Sequence[tuple[float, float]]
    dashed: bool = False


def draw(path: Path, title: str, axes: tuple[str, str], lines: Sequence[Series], *, log: bool = False) -> Path:
    """Draw one plot; `axes` are the axis labels with units."""
    figure, panel = _canvas(title, axes)
    for colour, line in zip(_COLOURS, lines, strict=False):
        x, y = zip(*line.points, strict=True)
        panel.plot(x, y, "--" if line.dashed else "o-", color=colour, label=line.label, markersize=4)
    if log:
        panel.set_yscale("log")
    else:
        panel.set_ylim(bottom=0)
    panel.legend(fontsize="small")
    return _save(figure, path)


def _canvas(title: str, axes: tuple[str, str]) -> tuple[Any, Any]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=_SIZE, dpi=_DPI, layout="constrained")
    FigureCanvasAgg(figure)
    panel = figure.subplots()
    panel.set_title(title, fontsize="medium")
    panel.set_xlabel(axes[0])
    panel.set_ylabel(axes[1])
    panel.grid(alpha=0.3)
    return figure, panel


def _save(figure: Any, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    return path


def curves(folder: Path, phases: Sequence[Phase], objective: Objective) -> Iterator[Path]:
    """Draw all plots of a sweep over rates and a sweep over numbers of callers."""
    rates = sorted((p for p in phases if p.rate is not None), key=lambda p: p.rate or 0.0)
    callers = sorted((p for p in phases if p.concurrency is not None), key=lambda p: p.concurrency or 0)
    if rates:
        yield from _over_rates(folder, rates, objective)
        yield _batch_sizes(folder / "batch-sizes.png", rates)
    if callers:
        points = [(float(p.concurrency or 0), p.summary.tokens_per_second) for p in callers]
        axes = (CALLERS, "tokens per second")
        yield draw(folder / "throughput.png", "Throughput against concurrency", axes, [Series("all callers", points)])
    yield from _speculation(folder, sorted(phases, key=lambda p: p.account.batch_size))


def _over_rates(folder: Path, rates: Sequence[Phase], objective: Objective) -> Iterator[Path]:
    for name, title in (
        ("time_to_first_token", "Time to first token, of requests that were served"),
        ("inter_token", "Time between two messages with tokens"),
        ("total", "Time to the last token, of requests that were served"),
    ):
        levels = [(p.rate or 0.0, getattr(p.summary, name)) for p in rates]
        lines = [Series(level, [(rate, found[level]) for rate, found in levels]) for level in ("p50", "p90", "p99")]
        yield draw(folder / f"{name.replace('_', '-')}.png", title, (RATE, "seconds"), lines, log=True)
    served = [(p.rate or 0.0, p.summary.served / p.summary.seconds) for p in rates]
    good = [(p.rate or 0.0, p.summary.goodput) for p in rates]
    refused = [(p.rate or 0.0, p.summary.refused / p.summary.seconds) for p in rates]
    best = max(value for _, value in served)
    ideal = Series("as many as were sent", [(0.0, 0.0), (best, best)], dashed=True)
    first, each = objective.time_to_first_token, objective.time_per_token
    title = f"Goodput: first token within {first:g} s, then at most {1000 * each:g} ms per token"
    lines = [Series("served", served), Series("served in time", good), ideal]  # the smaller last: they may be equal
    yield draw(folder / "goodput.png", title, (RATE, "requests per second"), lines)
    lines = [Series("told to come again", refused), Series("served", served)]
    yield draw(folder / "refused.png", "Refused past saturation", (RATE, "requests per second"), lines)


def _batch_sizes(path: Path, rates: Sequence[Phase]) -> Path:
    """Draw the shares of passes by the number of sequences in them, with a group of bars per rate."""
    shown = rates[:: max(1, len(rates) // len(_COLOURS))][-len(_COLOURS) :]
    bounds = [bound for bound in shown[0].account.batch_sizes if math.isfinite(bound)]
    used = [b for b in bounds if any(p.account.batch_sizes[b] for p in shown)]
    figure, panel = _canvas("Batch sizes against load", ("sequences in a verifying pass, up to", "share of passes"))
    for i, (colour, phase) in enumerate(zip(_COLOURS, shown, strict=False)):
        counts, width = phase.account.batch_sizes, 0.8 / len(shown)
        all_passes = sum(counts.values()) or 1.0
        places = [place + (i - len(shown) / 2 + 0.5) * width for place in range(len(used))]
        label = f"{phase.rate:.1f} requests/s"
        panel.bar(places, [counts[b] / all_passes for b in used], width, color=colour, label=label)
    panel.set_xticks(range(len(used)), [f"{bound:g}" for bound in used])
    panel.legend(fontsize="small")
    return _save(figure, path)


def _speculation(folder: Path, phases: Sequence[Phase]) -> Iterator[Path]:
    drafting = [p for p in phases if not math.isnan(p.account.acceptance_rate)]
    if not drafting:
        return
    kept = Series("drafts kept of those made", [(p.account.batch_size, p.account.acceptance_rate) for p in drafting])
    gain = Series("tokens/s over plain decoding's", [(p.account.batch_size, p.account.gain) for p in drafting])
    title = "What drafts bring against batch size (AUTO chooses how many)"
    yield draw(folder / "speculation.png", title, (BATCH, "ratio"), [kept, gain])
