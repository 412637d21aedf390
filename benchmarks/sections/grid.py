"""Never slower: AUTO against plain decoding and against the best fixed K, over batch, acceptance and context."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from benchmarks.harness.lab import Lab, Row, Section, row_of
from benchmarks.harness.timing import AUTO

BATCHES = (1, 4, 16, 32)
RATES = (0.0, 0.3, 0.6, 0.9)
CONTEXTS = (64, 1024)
DRAFTS = (1, 2, 4, 7)
HOPELESS = 0.8  # relative speed in the first round below which a fixed K cannot be the best one
CACHED = 512  # tokens: longer prompts are cached after the first prefill, or prefill would dominate the measurement
SETTLING = 3  # turns of AUTO that do not count after a change of the text
NEVER_BELOW, WITHIN = 0.97, 0.90


def measure(lab: Lab) -> list[Row]:
    """Measure each cell: plain, AUTO, and the fixed K that are fast enough in the first round."""
    batches, contexts = lab.options.batches or BATCHES, lab.options.contexts or CONTEXTS
    return [row for context in contexts for batch in batches for row in _cells(lab, batch, context)]


def _cells(lab: Lab, batch: int, context: int) -> Iterator[Row]:
    prompts = lab.prompts(batch, context)
    engines = lab.engines(batch, context, DRAFTS)
    salt = "cached" if context > CACHED else None
    if salt is not None:  # so that AUTO's draft model has cached them too, with any choice
        lab.turn(engines[AUTO], prompts, min(DRAFTS), 0.0, salt)
    for rate in lab.options.rates or RATES:
        for _ in range(SETTLING):
            lab.turn(engines[AUTO], prompts, AUTO, rate, salt)
        turns = lab.rounds(engines, prompts, rate, partial(_tell, lab, batch, context, rate), salt, HOPELESS)
        plain = turns["0"]
        rows = [row_of(mine, plain, k=name) for name, mine in turns.items()]
        best = max((r for r in rows if r["k"] != AUTO), key=lambda r: r["gain"])
        mine = next(r for r in rows if r["k"] == AUTO)
        yield mine | {
            "batch": batch,
            "context": context,
            "rate": rate,
            "plain": next(r["tokens_per_second"] for r in rows if r["k"] == "0"),
            "best_k": best["k"],
            "best_gain": best["gain"],
            "share_of_best": mine["gain"] / best["gain"],
            "fixed": {r["k"]: r["gain"] for r in rows},
        }


def _tell(lab: Lab, batch: int, context: int, rate: float, text: str) -> None:
    lab.tell(f"grid, batch {batch}, context {context}, acceptance {rate}, {text}")


def verdict(rows: Sequence[Row]) -> Sequence[str]:
    """Return a sentence about the worst cells."""
    if not rows:
        return ()
    worst, behind = min(rows, key=lambda r: r["gain"]), min(rows, key=lambda r: r["share_of_best"])
    never = f"Worst of {len(rows)} cells: AUTO is {worst['gain']:.2f} times plain ({_where(worst)})"
    within = f"Farthest behind the best fixed K: {behind['share_of_best']:.2f} of it ({_where(behind)})"
    return [f"{never}; the aim is {NEVER_BELOW}. {within}; the aim is {WITHIN}."]


def _where(row: Row) -> str:
    return f"batch {row['batch']}, context {row['context']}, acceptance {row['rate']:g}"


SECTION = Section(
    "grid",
    "Never slower: AUTO over batch, acceptance and context",
    measure,
    "Decoding speed of plain in tokens/s; gains over plain in the same round, median over rounds. In a round each way "
    "has an engine of its own, and the next step is of whichever has used least time. A fixed K that is below "
    f"{HOPELESS} of the best way in the first, uncounted round is not run again. Prompts of more than {CACHED} tokens "
    "are cached by target and draft from the first round on. One engine with AUTO goes through all rates at a batch "
    f"and context, with {SETTLING} turns that do not count after each change.",
    {
        "context": "{context}",
        "batch": "{batch}",
        "acceptance": "{rate:g}",
        "plain tokens/s": "{plain:.1f}",
        "AUTO": "{gain:.2f}",
        "AUTO, whole": "{whole_gain:.2f}",
        "best K": "{best_k}",
        "its gain": "{best_gain:.2f}",
        "AUTO/best": "{share_of_best:.2f}",
        "foreign cores": "{foreign:.2f}",
    },
    verdict=verdict,
)
