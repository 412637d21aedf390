"""Plots for the reports. They need matplotlib, which the extra `bench` installs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_SIZE, _DPI = (7.0, 4.4), 110  # inches, dots per inch
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")  # safe for colour blindness


@dataclass(frozen=True)
class Line:
    """Measured points joined by a line. With `curve`, the points stay unconnected; `level` is a dashed line."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    curve: tuple[Sequence[float], Sequence[float]] | None = None
    level: Sequence[float] = ()


def draw(path: Path, title: str, x_label: str, y_label: str, lines: Sequence[Line]) -> str:
    """Write one plot and return its name."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=_SIZE, dpi=_DPI, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for i, line in enumerate(lines):
        colour = _COLOURS[i % len(_COLOURS)]
        axes.plot(line.x, line.y, "o" if line.curve else "o-", color=colour, label=line.label)
        if line.curve is not None:
            axes.plot(*line.curve, color=colour, linewidth=1)
        for level in line.level:
            axes.axhline(level, color=colour, linestyle="--", linewidth=1)
    axes.set_title(title)
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    return path.name
