"""Drafts from n-gram lookup in the text so far, on repetitive and on non-repetitive text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from benchmarks.harness.lab import Lab, Row, Section, row_of
from benchmarks.harness.timing import AUTO, run_turn, way
from benchmarks.harness.turns import Turn, interleave
from engine.engine import Engine
from engine.startup.build import build_engine
from engine.startup.calibrate import calibrate

BATCHES = (1, 4)
DRAFTS = (4, 8, 16)
AIM = 2.5


def measure(lab: Lab) -> list[Row]:
    """Measure `ngram` with fixed K and AUTO; no draft model is used."""
    return [
        row for batch in lab.options.batches or BATCHES for loops in (True, False) for row in _batch(lab, batch, loops)
    ]


def _batch(lab: Lab, batch: int, loops: bool) -> Iterator[Row]:
    prompts = lab.pair.rule.prompts(batch, lab.options.prompt, repetitive=loops)
    fixed, auto = _engine(lab, batch), _engine(lab, batch)
    ways = {str(k): partial(_turn, lab, fixed, prompts, k) for k in (0, *lab.drafts(DRAFTS))}
    ways[AUTO] = partial(_turn, lab, auto, prompts, AUTO)
    name = "repeats" if loops else "does not repeat"
    turns = interleave(ways, lab.options.rounds, lambda text: lab.tell(f"ngram, batch {batch}, text {name}, {text}"))
    for k, mine in turns.items():
        yield row_of(mine, turns["0"], batch=batch, text=name, k=k)


def _engine(lab: Lab, batch: int) -> Engine:
    changes = {"draft": None, "proposer": "ngram", "max_batch_size": batch, "max_model_len": 512}
    engine = build_engine(lab.config.model_copy(update=changes))
    engine.warm_up()
    calibrate(engine, engine.config.warm_up_seconds)
    return engine


def _turn(lab: Lab, engine: Engine, prompts: Sequence[tuple[int, ...]], k: int | str) -> Turn:
    turn = run_turn(engine, prompts, lab.options.tokens, way(k, "ngram" if k else None, most=16))
    if turn.tokens != [lab.pair.rule.text(prompt[-1], lab.options.tokens) for prompt in prompts]:
        raise RuntimeError(f"K={k} gave other tokens than the rule that is planted in the weights")
    return turn


def verdict(rows: Sequence[Row]) -> Sequence[str]:
    """Return a sentence about repetitive text at batch 1, and about the cost of lookups without a match."""
    mine = [r for r in rows if r["batch"] == 1 and r["text"] == "repeats"]
    vain = [r for r in rows if r["text"] != "repeats" and r["k"] == AUTO]
    if not mine or not vain:
        return ()
    best, auto = max(mine, key=lambda r: r["gain"]), next(r for r in mine if r["k"] == AUTO)
    gains = f"{best['gain']:.2f} times plain (K {best['k']}), AUTO {auto['gain']:.2f}"
    least = min(r["gain"] for r in vain)
    return [f"Repetitive text at batch 1: {gains}; the aim is {AIM}. Where nothing repeats AUTO is {least:.2f}."]


SECTION = Section(
    "ngram",
    "n-gram drafts",
    measure,
    "Text that repeats goes round in a loop of 24 tokens, prompt and output; the other has no pair of tokens twice. "
    "Columns as above.",
    {
        "batch": "{batch}",
        "text": "{text}",
        "K": "{k}",
        "tokens/s": "{tokens_per_second:.1f}",
        "gain": "{gain:.2f}",
        "kept of drafts": "{acceptance_rate:.2f}",
        "foreign cores": "{foreign:.2f}",
    },
    verdict=verdict,
)
