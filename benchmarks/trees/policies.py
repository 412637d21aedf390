"""What is drafted at a place: chains and trees, of a fixed shape or by the drafter's own estimates."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import Protocol

import numpy as np

from benchmarks.trees.record import DEPTH, NODES, WIDTH, Floats, Guesses, Integers

_WEIGHT_OF_TABLE = 16  # places: how many a path must have been seen at to count as much as the table of ranks

Path = tuple[int, ...]  # the rank at each depth


@dataclass(frozen=True)
class DraftPlans:
    """What one policy does at S places of a text."""

    drafts: Integers  # [S], rows of the target besides that of the newest token
    gained: Integers  # [S], drafts that the target keeps
    rows: Integers  # [S, DEPTH], rows of the drafter's first, second, .. pass; the first feeds the newest token

    def after_lookup(self, guesses: Guesses) -> DraftPlans:
        """Return the plans of `auto`: where the lookup finds something, that is drafted, without a pass."""
        none = guesses.found == 0
        return DraftPlans(
            np.where(none, self.drafts, guesses.found),
            np.where(none, self.gained, guesses.found_right),
            self.rows * none[:, None],
        )


class DraftPolicy(Protocol):
    """A way to draft."""

    def plans(self, guesses: Guesses) -> DraftPlans:
        """Return what it does at each place."""
        ...


def _by_depth(depth: Integers, chosen: np.ndarray[tuple[int, ...], np.dtype[np.bool_]]) -> Integers:
    """Count the chosen nodes of each depth: `[S, NODES]` -> `[S, DEPTH]` of depths 1, 2, .. ."""
    return np.stack([(chosen & (depth == d)).sum(1) for d in range(1, DEPTH + 1)], 1)


@dataclass(frozen=True)
class FixedChain:
    """`k` drafts one after another."""

    k: int

    def __str__(self) -> str:
        """`4`."""
        return f"{self.k}"

    def plans(self, guesses: Guesses) -> DraftPlans:
        """Draft `k` everywhere."""
        size = len(guesses.ranks)
        rows = np.tile(np.arange(DEPTH) < self.k, (size, 1)).astype(np.int64)
        return DraftPlans(np.full(size, self.k), guesses.num_right.clip(max=self.k), rows)


@dataclass(frozen=True)
class ConfidentChain:
    """Drafts with at least the chance `least`; a draft of a smaller chance than `onward` is not fed to the drafter."""

    least: float
    onward: float

    def __str__(self) -> str:
        """`>= 0.3, fed >= 0.5`."""
        return f"{self.least:g}, fed {self.onward:g}"

    def plans(self, guesses: Guesses) -> DraftPlans:
        """Draft as far as the drafter believes."""
        fed = (guesses.chain >= self.onward).sum(1).clip(max=DEPTH - 1)
        drafts = np.minimum((guesses.chain >= self.least).sum(1), fed + 1)
        rows = (np.arange(DEPTH) < 1 + fed[:, None]).astype(np.int64)
        return DraftPlans(drafts, np.minimum(guesses.num_right, drafts), rows)


@dataclass(frozen=True)
class FixedTree:
    """The same tree everywhere, as a set of paths that holds every beginning of a path in it."""

    paths: frozenset[Path]

    def __str__(self) -> str:
        """`8 nodes, depth 3, 4 at the first`."""
        widest = sum(len(path) == 1 for path in self.paths)
        return f"{len(self.paths)} nodes, depth {max(map(len, self.paths))}, {widest} first"

    def plans(self, guesses: Guesses) -> DraftPlans:
        """Draft this tree everywhere."""
        inner = {path[:-1] for path in self.paths}
        rows = [sum(len(path) == depth for path in inner) for depth in range(DEPTH)]
        gained = [self._kept(tuple(ranks)) for ranks in guesses.ranks.tolist()]
        size = len(gained)
        return DraftPlans(np.full(size, len(self.paths)), np.array(gained), np.tile(np.array(rows), (size, 1)))

    def _kept(self, ranks: Path) -> int:
        return next((depth for depth in range(DEPTH) if ranks[: depth + 1] not in self.paths), DEPTH)


@dataclass(frozen=True)
class ConfidentTree:
    """Nodes with at least the chance `least`, at most `nodes`; those below `onward` are not fed to the drafter.

    As EAGLE-2 (Li et al. 2024, arXiv 2406.16858), but without its limit on the width of a level.
    """

    least: float
    onward: float
    nodes: int

    def __str__(self) -> str:
        """`0.1, fed 0.2, at most 16`."""
        return f"{self.least:g}, fed {self.onward:g}, at most {self.nodes}"

    def plans(self, guesses: Guesses) -> DraftPlans:
        """Draft what the drafter believes in."""
        among = np.arange(NODES) < self.nodes
        chosen = (guesses.chance >= self.least) & (guesses.parent_chance >= self.onward) & among
        fed = _by_depth(guesses.depth, chosen & (guesses.chance >= self.onward))
        rows = np.concatenate([np.ones_like(fed[:, :1]), fed[:, :-1]], 1)
        gained = (guesses.depth * (guesses.right & chosen)).max(1)
        return DraftPlans(chosen.sum(1), gained, rows)


def rank_table(guesses: Sequence[Guesses]) -> Floats:
    """Return how often the target's token has each rank at each depth, given right guesses before: `[DEPTH, WIDTH]`."""
    ranks = np.concatenate([g.ranks for g in guesses])
    on_path = np.cumprod(ranks < WIDTH, 1)
    before = np.concatenate([np.ones_like(on_path[:, :1]), on_path[:, :-1]], 1).sum(0)
    counts = np.stack([(on_path * (ranks == r)).sum(0) for r in range(WIDTH)], 1)
    shares: Floats = counts / before.clip(min=1)[:, None]
    return shares


def best_tree(guesses: Sequence[Guesses], nodes: int, depth: int) -> FixedTree:
    """Return the tree of `nodes` nodes and at most `depth` that keeps most drafts, by the guesses of many places.

    The likeliest paths are the best tree, because a path is never likelier than its beginning (Sequoia, Chen et al.
    2024, arXiv 2402.12374, does the same by dynamic programming over a table by rank). Here the chance of a rank
    depends on the whole path before it: its frequency, drawn toward the table where the path is rare.
    """
    ranks = np.concatenate([g.ranks for g in guesses])
    table = rank_table(guesses)
    seen = Counter(tuple(row[:d]) for row in ranks.tolist() for d in range(DEPTH + 1))
    order, chosen = count(), set[Path]()
    heap: list[tuple[float, int, Path]] = [(-1.0, -1, ())]
    while len(chosen) <= nodes:
        cost, _, path = heapq.heappop(heap)
        chosen.add(path)
        if len(path) == depth:
            continue
        for rank in range(WIDTH):
            at = seen[path] + _WEIGHT_OF_TABLE
            chance = (seen[*path, rank] + _WEIGHT_OF_TABLE * table[len(path), rank]) / at
            heapq.heappush(heap, (cost * chance, next(order), (*path, rank)))
    return FixedTree(frozenset(chosen - {()}))


_LEAST = (0.02, 0.05, 0.1, 0.2, 0.35, 0.6)
_ONWARD = (1.0, 2.0, 4.0)  # times `least`


def fixed_chains() -> list[DraftPolicy]:
    """Return chains of 0 (plain decoding) to `DEPTH` drafts."""
    return [FixedChain(k) for k in range(DEPTH + 1)]


def all_chains() -> list[DraftPolicy]:
    """Return these and chains that stop where the drafter is unsure."""
    return [*fixed_chains(), *(ConfidentChain(c, min(1.0, times * c)) for c in _LEAST for times in _ONWARD)]


def fixed_trees(guesses: Sequence[Guesses], most: int = NODES) -> list[DraftPolicy]:
    """Return the best trees, of these guesses, of several sizes and depths; chains are trees too."""
    sizes = [(n, d) for n in (2, 3, 4, 6, 8, 16, 32) for d in (1, 2, 3, 4, 6, DEPTH)]
    fitting = [(n, d) for n, d in sizes if n <= most and n <= WIDTH**d]
    return [*fixed_chains(), *dict.fromkeys(best_tree(guesses, n, d) for n, d in fitting)]


def all_trees(guesses: Sequence[Guesses], most: int = NODES) -> list[DraftPolicy]:
    """Return these, and all chains, and trees that grow where the drafter is sure."""
    sizes = [n for n in (4, 8, 16, 32) if n <= most]
    grown = [ConfidentTree(c, min(1.0, times * c), n) for c in _LEAST for times in _ONWARD for n in sizes]
    return [*all_chains(), *fixed_trees(guesses, most)[DEPTH + 1 :], *grown]
