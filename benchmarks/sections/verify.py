"""The cost of verifying K drafts, and whether it is flat in K."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from functools import partial

from benchmarks.harness.lab import Lab, Row, Section
from benchmarks.harness.turns import foreign, interleave

BATCHES = (1, 4, 8, 16)
DRAFTS = (1, 2, 3, 4, 5, 6, 7)
STEPS = 32  # of a turn; the drafts are never right, so each step produces one token
LIMIT = 1.35  # of K=7 over K=0 at batch 1


def measure(lab: Lab) -> list[Row]:
    """Measure drafts that are never right, so that every step verifies K drafts at lengths independent of K."""
    return [row for batch in lab.options.batches or BATCHES for row in _batch(lab, batch)]


def _batch(lab: Lab, batch: int) -> Iterator[Row]:
    context, drafts = lab.options.prompt, [0, *lab.drafts(DRAFTS)]
    engine, prompts = lab.engine(batch, context), lab.prompts(batch, context)
    ways = {str(k): partial(lab.turn, engine, prompts, k, most=STEPS) for k in drafts}
    turns = interleave(ways, lab.options.rounds, partial(_tell, lab, batch))
    plain = [statistics.median(turn.verify_seconds) for turn in turns["0"]]
    for k in drafts:
        mine = [statistics.median(turn.verify_seconds) for turn in turns[str(k)]]
        ratios = [a / b for a, b in zip(mine, plain, strict=True)]
        yield {
            "batch": batch,
            "context": context,
            "k": k,
            "milliseconds": 1e3 * statistics.median(mine),
            "ratio": statistics.median(ratios),
            "ratios": ratios,
            "foreign": foreign(turns[str(k)]),
        }


def _tell(lab: Lab, batch: int, text: str) -> None:
    lab.tell(f"verify, batch {batch}, {text}")


def verdict(rows: Sequence[Row]) -> Sequence[str]:
    """Return a sentence about the limit at batch 1."""
    last = next((r for r in rows if r["batch"] == 1 and r["k"] == 7), None)
    if last is None:
        return ()
    return [f"K=7 costs {last['ratio']:.2f} times K=0 at batch 1; the aim is at most {LIMIT}."]


SECTION = Section(
    "verify",
    "Time per verification against K",
    measure,
    "Milliseconds of a step without drafting (plan, target pass, verification, commit): median over the steps of a "
    "turn, then over rounds. Ratio: to K=0 in the same round, median over rounds. Drafts are always wrong here.",
    {
        "batch": "{batch}",
        "K": "{k}",
        "ms": "{milliseconds:.1f}",
        "ratio to K=0": "{ratio:.2f}",
        "foreign cores": "{foreign:.2f}",
    },
    verdict=verdict,
)
