"""Seconds of work, learned from past steps: a sum of unit costs. Uses no model, no clock and no sequence.

    seconds = price of a pass + n * price of a sequence + ... = prices . quantities

Prices are never negative, so that more work never looks cheaper. Each measurement updates the fit, weighted by relative
error. Costs of work that has not occurred for a while are not forgotten: a measurement replaces old information only
along its own direction (directional forgetting, Kulhavy 1987).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import Any

import numpy as np
import numpy.typing as npt

from pilotfish.engine.control.constants import KEEP, MOST, PRIOR

Floats = npt.NDArray[np.float64]

# The price of rows is linear between these numbers of rows: the first few may be nearly free, later ones are not.
KNOTS = np.array([0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 1024, 2048, 8192], float)
_WIDTHS = np.diff(KNOTS)
# What has a price, before the ramps of rows: a pass; a call of a proposer and each sequence in it, without its passes;
# a sequence in a pass, without its rows; 1,024 tokens of context, read once, and once for each row.
PASS, CALL, ASKED, SEQUENCE, CONTEXT, ATTENDED = range(6)
_UNITS = np.array([1, 1, 1, 1, 1 / 1024, 1 / 1024])
_FIRST_RAMP = len(_UNITS)
NUM_QUANTITIES = _FIRST_RAMP + len(_WIDTHS)


def quantities(
    *, calls: int = 0, asked: int = 0, passes: int = 0, sequences: float = 0, context: float = 0, attended: float = 0,
    rows: Seq[float] = (),
) -> Floats:  # fmt: skip
    """`context`: tokens with K/V, each once; `attended`: once per row; `rows`: of each pass.

    Rows are cut at the knots: 5 -> 1, 1, 1, 1, 1 of the 2 from 4 to 6, and nothing beyond.
    """
    found = np.zeros(NUM_QUANTITIES)
    found[:_FIRST_RAMP] = _UNITS * (passes, calls, asked, sequences, context, attended)
    for each in rows:
        found[_FIRST_RAMP:] += np.clip(each - KNOTS[:-1], 0, _WIDTHS)
    return found


class CostModel:
    """The unit costs of one kind of work."""

    def __init__(self) -> None:
        self.count = 0
        self.most_rows = 0.0  # of any pass, up to the next knot
        self._values = np.zeros(NUM_QUANTITIES)
        self._curve = np.zeros(len(KNOTS))
        self._joining = np.zeros(0)  # as far as it was asked for
        # Normal equations of the fit.
        self._information = _belief()
        self._moments = np.zeros(NUM_QUANTITIES)

    @classmethod
    def of_state(cls, state: Mapping[str, Any]) -> CostModel:
        """The model that made a `state`. Raises ValueError, KeyError or TypeError for anything else."""
        prices = cls()
        prices.count, prices.most_rows = int(state["count"]), float(state["most_rows"])
        fit = {name: np.array(state[name], float) for name in ("values", "information", "moments")}
        shapes = {"values": (NUM_QUANTITIES,), "information": (NUM_QUANTITIES,) * 2, "moments": (NUM_QUANTITIES,)}
        sound = all(fit[name].shape == shape and np.isfinite(fit[name]).all() for name, shape in shapes.items())
        if not sound or (fit["values"] < 0).any() or not (np.diagonal(fit["information"]) > 0).all():
            raise ValueError("expected prices")
        prices._values, prices._information, prices._moments = fit.values()
        prices._draw_curve()
        return prices

    def state(self) -> dict[str, Any]:
        """What was learned, as JSON values."""
        fit = {"values": self._values, "information": self._information, "moments": self._moments}
        return {"count": self.count, "most_rows": self.most_rows} | {name: x.tolist() for name, x in fit.items()}

    def of(self, work: Floats) -> float:
        """Expected seconds of `work`."""
        return float(work @ self._values)

    def rows(self, count: Floats) -> Floats:
        """Seconds that `count` rows add to a pass; beyond the most that were measured, in proportion."""
        known = np.minimum(count, self.most_rows)
        return np.interp(known, KNOTS, self._curve) * (count / np.maximum(known, 1e-9))

    def joining(self, count: int) -> Floats:
        """Seconds that the first, the second, ... of `count` sequences adds to a pass that feeds a row of each."""
        if len(self._joining) < count:
            width = np.arange(count + 1.0)
            self._joining = np.diff(self.rows(width)) + self.price(SEQUENCE)
            self._joining[0] += self.price(PASS)
        return self._joining[:count]

    def price(self, what: int) -> float:
        """Seconds of one `PASS`, `CALL`, ..."""
        return float(self._values[what] * _UNITS[what])

    def learn(self, work: Floats, seconds: float) -> None:
        """Learn from one measurement. Values of a clock that stood still or jumped are ignored."""
        if not (math.isfinite(seconds) and 1e-9 < seconds < 1e6):
            return
        expected = max(self.of(work), 1e-9) if self.count else seconds
        seconds = min(max(seconds, expected / MOST), expected * MOST)
        self._forget(work)
        scale = 1 / expected
        if not self.count:
            self._information = scale**2 * _belief()
        self._information += np.outer(work, work) * scale**2
        self._moments += work * (seconds * scale**2)
        self.count += 1
        self._joining = np.zeros(0)
        ramps = np.flatnonzero(work[_FIRST_RAMP:])
        self.most_rows = max(self.most_rows, float(KNOTS[ramps[-1] + 1]) if ramps.size else 0.0)
        self._improve()

    def _forget(self, work: Floats) -> None:
        known = self._information @ work
        total = float(work @ known)
        if self.count and total > 0:
            self._moments -= known * ((1 - KEEP) * float(work @ self._moments) / total)
            self._information -= np.outer(known, known) * ((1 - KEEP) / total)

    def _improve(self) -> None:
        """One round of coordinate descent toward the best fit with costs that are not negative.

        It starts where the last one ended, with the price of a pass. After steps of one size only, all sizes are
        therefore expected to cost the same, and drafts that need no pass to be free, so that others are tried.
        """
        values, slopes = self._values, self._information @ self._values - self._moments
        for i, curvature in enumerate(self._information.diagonal().tolist()):
            change = -float(slopes[i]) / curvature
            if values[i] or change > 0:
                change = max(change, -float(values[i]))
                values[i] += change
                slopes += change * self._information[i]
        self._draw_curve()

    def _draw_curve(self) -> None:
        self._curve[1:] = np.cumsum(self._values[_FIRST_RAMP:] * _WIDTHS)


def _belief() -> Floats:
    """The information before any measurement: nothing costs anything, and a row costs as much as the one before."""
    found = np.eye(NUM_QUANTITIES) * PRIOR**2
    for i in range(len(_WIDTHS) - 1):
        change = np.zeros(NUM_QUANTITIES)
        change[_FIRST_RAMP + i : _FIRST_RAMP + i + 2] = PRIOR * _WIDTHS[i], -PRIOR * _WIDTHS[i]
        found += np.outer(change, change)
    return found
