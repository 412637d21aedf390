"""Plots for the reports. They need matplotlib, which the extra `bench` installs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_SIZE, _DPI = (7.0, 4.4), 110  # inches, dots per inch
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")  # safe for colour blindness


@dataclass(frozen=True)
class Line:
    """Measured points joined by a line."""

    label: str
    x: Sequence[float]
    y: Sequence[float]


def draw(path: Path, title: str, x_label: str, y_label: str, lines: Sequence[Line]) -> str:
    """Write one plot and return its name."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=_SIZE, dpi=_DPI, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for i, line in enumerate(lines):
        axes.plot(line.x, line.y, "o-", color=_COLOURS[i % len(_COLOURS)], label=line.label)
    axes.set_title(title)
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    return path.name
