"""Never slower when load and text change: one engine with AUTO moves from one point of the grid to the next."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.harness.lab import Lab, Row, Section
from benchmarks.harness.timing import AUTO
from benchmarks.harness.turns import Turn, foreign
from engine.engine import Engine

# Each change affects the number of requests, the accuracy of drafts, or both.
POINTS = ((1, 0.9), (16, 0.9), (16, 0.0), (4, 0.6), (4, 0.0), (32, 0.3), (1, 0.0), (1, 0.6), (32, 0.9), (4, 0.9))
NEVER_BELOW = 0.97


@dataclass(frozen=True)
class Leg:
    """One point in one round: the same requests with plain decoding and with AUTO."""

    batch: int
    rate: float
    plain: Turn
    auto: Turn

    @property
    def gain(self) -> float:
        """Return the speed-up over plain decoding, including the prompts."""
        return self.plain.seconds / self.auto.seconds


def measure(lab: Lab) -> list[Row]:
    """Go through all points round after round; every turn counts, including those right after a change."""
    batches = lab.options.batches
    points = [point for point in POINTS if batches is None or point[0] in batches]
    if not points:
        return []
    most = max(batch for batch, _ in points)
    plain, auto = lab.engine(most, lab.options.prompt), lab.engine(most, lab.options.prompt)
    rounds: list[list[Leg]] = []
    for number in range(lab.options.rounds):
        rounds.append([_leg(lab, plain, auto, batch, rate) for batch, rate in points])
        lab.tell(f"moving, round {number + 1}: {_total(rounds[-1]):.3f} times plain")
    legs = [_row(list(visits)) for visits in zip(*rounds, strict=True)]
    totals = [_total(visits) for visits in rounds]
    everything = {"batch": "all", "rate": "all", "gain": statistics.median(totals), "gains": totals}
    return [*legs, everything | {"foreign": max(row["foreign"] for row in legs)}]


def _leg(lab: Lab, plain: Engine, auto: Engine, batch: int, rate: float) -> Leg:
    prompts = lab.prompts(batch, lab.options.prompt)
    batches = {"0": lab.batch(plain, prompts, 0, rate), AUTO: lab.batch(auto, prompts, AUTO, rate)}
    turns = lab.abreast(batches, prompts)
    return Leg(batch, rate, turns["0"], turns[AUTO])


def _total(legs: Sequence[Leg]) -> float:
    return sum(leg.plain.seconds for leg in legs) / sum(leg.auto.seconds for leg in legs)


def _row(visits: Sequence[Leg]) -> Row:
    gains = [leg.gain for leg in visits]
    turns = [turn for leg in visits for turn in (leg.plain, leg.auto)]
    labels = {"batch": visits[0].batch, "rate": visits[0].rate}
    return labels | {"gain": statistics.median(gains), "gains": gains, "foreign": foreign(turns)}


def verdict(rows: Sequence[Row]) -> Sequence[str]:
    """Return a sentence about all legs together and the worst one."""
    *legs, everything = rows
    worst = min(legs, key=lambda r: r["gain"])
    where = f"batch {worst['batch']}, acceptance {worst['rate']:g}"
    total = f"All points together {everything['gain']:.2f} times plain"
    return [f"{total}; the worst is {worst['gain']:.2f} ({where}). The aim is {NEVER_BELOW}."]


SECTION = Section(
    "moving",
    "Never slower: one engine through changing load and text",
    measure,
    "Gain: seconds of plain decoding over seconds of AUTO for the same requests, prompts included, median over rounds; "
    "the next step is of whichever engine has used less time. "
    "The engine with AUTO sees one point after another, in this order, and nothing between them.",
    {
        "batch": "{batch}",
        "acceptance": "{rate}",
        "gain": "{gain:.2f}",
        "foreign cores": "{foreign:.2f}",
    },
    verdict=verdict,
)
