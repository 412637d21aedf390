"""The page of the comparison, in Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks.trees.record import WIDTH

_ROWS = (1, 2, 4, 8, 16, 32, 64)
_HOW = {False: "greedy", True: "sampled"}

_HEAD = """# Trees of drafts against chains

`{command}`

{machine}; {versions}; commit {commit}.

The embedded target wrote texts after held-out functions, greedily and at temperature 1 (coupled rule). From every place
of them the draft model (`model`) and the EAGLE head (`eagle`) guessed on: along the right path, as a chain, and as a
tree that grows by its likeliest node. Chains and trees then decode these texts in a replay: no model runs, and a step
costs what its passes cost by their rows. Attention to a tree, the choice of siblings, and moving the keys and values of
the branch that is kept cost nothing here: trees are judged favourably. Every policy is chosen on one half of the texts
and judged on the other, in both directions. [Record 51](../adr/0051-chains-and-no-trees.md) says what follows."""

_RANKS = """## Acceptance by rank

The share of places where the target's token has this rank among the drafter's, given a guess of one of these ranks at
each depth before."""

_LENGTHS = """## Tokens per step by the number of drafts

A fixed tree has one shape at all places: the best for the other half of the texts. A confident tree has at each place
the nodes that the drafter believes in most (as in EAGLE-2). Costs do not count here."""

_PRICES = """## Prices

Milliseconds of a pass by its rows, at batch 1. On the embedded pair they are steps of the engine without drafting, and
drafts with their draw; elsewhere single passes. `eagle` of the larger shapes is one layer and the target's output
matrix."""

_SPEEDS = """## Speed, relative to plain decoding

*Fixed* is the best K against the tree of the best shape. *Any* adds chains and trees that follow the drafter's
estimates at each place. A chain is a tree, too: where no tree is better on one half, a chain is judged on the other.
*auto* drafts what a lookup finds, as a chain, and only elsewhere with the drafter."""


def page(report: Mapping[str, Any]) -> str:
    """Return the page of a report."""
    lines = [_HEAD.format(**report), "", *_ranks(report["ranks"]), "", *_lengths(report["lengths"]), ""]
    lines += [*_prices(report["prices"]), "", *_speeds(report["speeds"])]
    return "\n".join(lines) + "\n"


def _ranks(found: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    yield from (_RANKS, "")
    yield "| drafter | decoding | depth | " + " | ".join(map(str, range(1, WIDTH + 1))) + " | none of these |"
    yield "|---|---|---|" + "---|" * (WIDTH + 1)
    for row in found:
        shares = [*row["shares"], 1 - sum(row["shares"])]
        cells = " | ".join(f"{share:.3f}" for share in shares)
        yield f"| {row['drafter']} | {_HOW[row['sampled']]} | {row['depth']} | {cells} |"


def _lengths(found: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    yield from (_LENGTHS, "")
    yield "| drafter | decoding | drafts | chain | fixed tree | confident tree |"
    yield "|---|---|---|---|---|---|"
    for row in found:
        chain = "" if row["chain"] is None else f"{row['chain']:.2f}"
        trees = f"{row['fixed_tree']:.2f} | {row['confident_tree']:.2f}"
        yield f"| {row['drafter']} | {_HOW[row['sampled']]} | {row['nodes']} | {chain} | {trees} |"


def _prices(found: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    rows = list(next(iter(found))["target"][1])
    yield from (_PRICES, "")
    yield "| prices | pass | " + " | ".join(f"{count} rows" if count > 1 else "1 row" for count in rows) + " |"
    yield "|---|---|" + "---|" * len(rows)
    for one in found:
        for name, passes in {"target": one["target"], **one["draft"]}.items():
            yield f"| {one['name']} | {name} | " + " | ".join(f"{passes[1][count]:.2f}" for count in rows) + " |"


def _speeds(found: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    yield from (_SPEEDS, "")
    heads = "fixed chain | fixed tree | tree/chain | any chain | any tree | tree/chain | tree chosen"
    yield f"| prices | drafter | decoding | batch | {heads} |"
    yield "|" + "---|" * 11
    for row in sorted(found, key=lambda row: row["prices"]):
        drafter = f"auto ({row['drafter']})" if row["with_lookups"] else row["drafter"]
        pairs = [(row[f"{kind}_chain"], row[f"{kind}_tree"]) for kind in ("fixed", "any")]
        cells = " | ".join(f"{chain:.2f} | {tree:.2f} | {tree / chain:.2f}" for chain, tree in pairs)
        chosen = "; ".join(dict.fromkeys(row["chosen"]["any_tree"]))
        yield f"| {row['prices']} | {drafter} | {_HOW[row['sampled']]} | {row['batch']} | {cells} | {chosen} |"
