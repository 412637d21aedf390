"""Chains against trees of drafts: guesses of the embedded pair's drafters, replayed under three lists of prices.

    python -m benchmarks.trees --out docs/benchmarks/trees

Every policy is chosen on one half of the texts and judged on the other, in both directions.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path

from rich.progress import track

from benchmarks.harness.machine import machine
from benchmarks.harness.synthetic import SHAPES
from benchmarks.trees.drafters import HeadTrees, ModelTrees, texts
from benchmarks.trees.page import page
from benchmarks.trees.policies import (
    ConfidentTree,
    DraftPolicy,
    FixedChain,
    all_chains,
    all_trees,
    best_tree,
    fixed_chains,
    fixed_trees,
    rank_table,
)
from benchmarks.trees.prices import BATCHES, StepPrices, of_card, of_embedded, of_shapes
from benchmarks.trees.record import DEPTH, NODES, Floats, Guesses, TreeDrafter, record
from benchmarks.trees.replay import Moves, moves, replay
from engine.machine.threads import use_threads
from models import embedded_draft, embedded_target

_SIZES = (1, 2, 4, 8, 16, NODES)
_DEPTHS = (1, 2, 3, 4, 8)  # of which the table of ranks tells
_TOKENS_PRICED = 48
Folds = tuple[Sequence[Guesses], Sequence[Guesses]]


@dataclass(frozen=True)
class LengthRow:
    """Tokens per step with `nodes` drafts, by shape."""

    drafter: str
    sampled: bool
    nodes: int
    chain: float | None  # None: longer than was recorded
    fixed_tree: float
    confident_tree: float


@dataclass(frozen=True)
class SpeedRow:
    """The best of each family: its speed relative to plain decoding, and what was chosen in both directions."""

    prices: str
    drafter: str
    sampled: bool
    with_lookups: bool
    batch: int
    fixed_chain: float
    fixed_tree: float
    any_chain: float
    any_tree: float
    chosen: dict[str, list[str]]


def main() -> None:
    """Measure, and write `OUT.md` and `OUT.json`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=64, help=f"written after each; the last {DEPTH} start no draft")
    parser.add_argument("--rounds", type=int, default=5, help="of the measurements of prices")
    parser.add_argument("--shapes", nargs=2, choices=SHAPES, default=["1.1b", "160m"], metavar=("TARGET", "DRAFT"))
    options = parser.parse_args()
    use_threads(1)
    target_shape, draft_shape = options.shapes
    written = {sampled: texts(options.prompts, options.tokens, is_sampled=sampled) for sampled in (False, True)}
    prompts = [text.tokens[: text.prompt_len] for text in written[False]]
    drafters: dict[str, TreeDrafter] = {
        "model": ModelTrees(embedded_draft(), options.tokens),
        "eagle": HeadTrees(options.tokens),
    }
    models = {**drafters, "target": ModelTrees(embedded_target(), options.tokens)}
    prices = [
        of_embedded(models, prompts, _TOKENS_PRICED, options.rounds),
        of_shapes(target_shape, draft_shape, options.rounds),
        of_card(),
    ]
    lengths, speeds, ranks = list[LengthRow](), list[SpeedRow](), list[dict[str, object]]()
    for (name, drafter), (sampled, own) in product(drafters.items(), written.items()):
        found = [record(drafter, text) for text in track(own, f"{name}, {'sampled' if sampled else 'greedy'}")]
        folds, table = (found[::2], found[1::2]), rank_table(found)
        shares = {depth: table[depth - 1].tolist() for depth in _DEPTHS}
        ranks += [{"drafter": name, "sampled": sampled, "depth": d, "shares": own} for d, own in shares.items()]
        lengths += _lengths(name, folds, prices[0], sampled=sampled)
        speeds += _speeds(name, folds, prices, sampled=sampled)
    report: dict[str, object] = {
        "command": " ".join(["python -m benchmarks.trees", *sys.argv[1:]]),
        **machine(),
        "prices": [_listed(own) for own in prices],
        "ranks": ranks,
        "lengths": [asdict(row) for row in lengths],
        "speeds": [asdict(row) for row in speeds],
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n", "utf-8")
    options.out.with_suffix(".md").write_text(page(report), "utf-8")


def _listed(prices: StepPrices) -> dict[str, object]:
    """Return milliseconds by rows and sequences of the batch."""
    draft = {name: {b: _some(own[b]) for b in BATCHES} for name, own in prices.draft.items()}
    return {"name": prices.name, "target": {b: _some(prices.target[b]) for b in BATCHES}, "draft": draft}


def _some(passes: Floats) -> dict[int, float]:
    return {rows: round(1e3 * float(passes[rows]), 4) for rows in _SIZES}


def _lengths(drafter: str, folds: Folds, prices: StepPrices, *, sampled: bool) -> Iterator[LengthRow]:
    """Yield tokens per step by the number of drafts; trees of a fixed shape are fitted on the other half."""

    def length(ways: Sequence[DraftPolicy]) -> float:
        both = [replay(moves(way, fold), prices, drafter, 1) for way, fold in zip(ways, folds, strict=True)]
        return (both[0] + both[1]).length

    for nodes in _SIZES:
        yield LengthRow(
            drafter=drafter,
            sampled=sampled,
            nodes=nodes,
            chain=length([FixedChain(nodes)] * 2) if nodes <= DEPTH else None,
            fixed_tree=length([best_tree(other, nodes, DEPTH) for other in folds[::-1]]),
            confident_tree=length([ConfidentTree(0.0, 0.0, nodes)] * 2),
        )


def _speeds(drafter: str, folds: Folds, prices: Sequence[StepPrices], *, sampled: bool) -> Iterator[SpeedRow]:
    """Yield the best of each family under all prices; each is chosen on one half and judged on the other."""
    for with_lookups in (False, True):
        halves = []
        for mine, other in (folds, folds[::-1]):
            families = {
                "fixed_chain": fixed_chains(),
                "fixed_tree": fixed_trees(mine),
                "any_chain": all_chains(),
                "any_tree": all_trees(mine),
            }
            ways = dict.fromkeys(way for family in families.values() for way in family)
            seen = {way: moves(way, mine, with_lookups=with_lookups) for way in ways}
            halves.append((families, seen, other))
        for own in prices:
            for batch in BATCHES:
                yield _row(own, drafter, batch, folds, halves, sampled=sampled, with_lookups=with_lookups)


Half = tuple[dict[str, list[DraftPolicy]], dict[DraftPolicy, Moves], Sequence[Guesses]]


def _row(
    prices: StepPrices,
    drafter: str,
    batch: int,
    folds: Folds,
    halves: Sequence[Half],
    *,
    sampled: bool,
    with_lookups: bool,
) -> SpeedRow:
    both = [replay(moves(FixedChain(0), fold), prices, drafter, batch) for fold in folds]
    plain, gains, chosen = (both[0] + both[1]).rate, dict[str, float](), dict[str, list[str]]()
    for family in halves[0][0]:
        judged = []
        for families, seen, other in halves:
            rates = {way: replay(seen[way], prices, drafter, batch).rate for way in families[family]}
            best = max(rates, key=lambda way: rates[way])
            chosen.setdefault(family, []).append(f"{type(best).__name__} {best}")
            judged.append(replay(moves(best, other, with_lookups=with_lookups), prices, drafter, batch))
        gains[family] = (judged[0] + judged[1]).rate / plain
    return SpeedRow(prices.name, drafter, sampled, with_lookups, batch, chosen=chosen, **gains)


if __name__ == "__main__":
    main()
