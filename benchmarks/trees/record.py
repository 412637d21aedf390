"""What a drafter guesses from every place of the target's own texts: along the right path, as a chain, and as a tree.

The texts are the target's outputs, so the token that a place verifies is known beforehand: the text's next one. Under
the coupled rule this holds for sampled texts too. The target's token at position t is the argmax of its logits plus the
noise of (seed, t), and a draft's rank at t is that of its logits plus the same noise.

An arena with pages of one row lets many guesses share a prefix: a guess is fed as a sequence of its own, whose page
table names the rows of the text before it and those of the guesses that led to it.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.kv.batch import Feed
from engine.proposers.suffix import Rules, SuffixIndex, best_guess
from engine.sampling import noise

WIDTH = 8  # the ranks that are told apart; a node of a tree has at most so many children
DEPTH = 16
NODES = 32

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


@dataclass(frozen=True)
class RecordedText:
    """A prompt and what the target wrote after it, greedily or at temperature 1 with the noise of `seed`."""

    tokens: tuple[int, ...]
    prompt_len: int
    seed: int | None  # None: greedy

    @property
    def starts(self) -> range:
        """Return the numbers of known tokens from which `DEPTH` more tokens are recorded."""
        return range(self.prompt_len + 1, len(self.tokens) - DEPTH + 1)

    def scores(self, logits: Tensor, positions: Sequence[int]) -> Tensor:
        """Return what ranks the tokens at `positions`, float64 `[n, vocab]`: logits, plus noise if sampled."""
        if self.seed is None:
            return logits.double()
        rows = torch.tensor(positions)
        shared = noise.gumbel(torch.full_like(rows, self.seed), rows, torch.zeros_like(rows), logits.shape[1])
        return logits.double().log_softmax(-1) + shared


class TreeDrafter(Protocol):
    """A drafter that goes on from any guess. With a lag of 1 its row r was fed token r + 1 (heads), else token r."""

    lag: int

    def read(self, tokens: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Read a text into the first rows; per row the logits `[n, vocab]` and what its children need `[n, hidden]`."""
        ...

    def grow(self, feeds: Sequence[Feed], hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Feed one guess per feed, with `hidden` of its parent; logits and hidden of each guess."""
        ...


@dataclass(frozen=True)
class Guesses:
    """One drafter's guesses from S places of a text, and what a lookup (`suffix`) finds there."""

    ranks: Integers  # [S, DEPTH], of the text's tokens, each after right guesses; WIDTH: none of the first
    chain: Floats  # [S, DEPTH], the drafter's own estimate that the first 1, 2, .. drafts of a chain are all right
    chance: Floats  # [S, NODES], the same for the nodes of a tree that grows by the likeliest node
    parent_chance: Floats  # [S, NODES]
    depth: Integers  # [S, NODES]
    right: NDArray[np.bool_]  # [S, NODES], whether the path to the node is the text
    found: Integers  # [S], drafts found by lookup
    found_right: Integers  # [S]

    @property
    def num_right(self) -> Integers:
        """Return how many leading drafts of a chain are right, `[S]`."""
        kept: Integers = (self.ranks == 0).cumprod(1).sum(1)
        return kept


class _Node(NamedTuple):
    """A guess that can be fed; sorted by falling chance."""

    cost: float  # -chance
    order: int
    token: int
    depth: int
    parent_chance: float
    is_right: bool
    pages: tuple[int, ...]  # of the guesses before it
    hidden: Tensor  # of its parent


@torch.inference_mode()
def record(drafter: TreeDrafter, text: RecordedText) -> Guesses:
    """Record a drafter's guesses from every start of `text`."""
    places = _Places(drafter, text)
    ranks, chain, found = places.ranks(), places.chain(), lookups(text)
    nodes = places.trees()
    return Guesses(
        ranks=ranks,
        chain=chain,
        chance=np.array([[-node.cost for node in tree] for tree in nodes]),
        parent_chance=np.array([[node.parent_chance for node in tree] for tree in nodes]),
        depth=np.array([[node.depth for node in tree] for tree in nodes]),
        right=np.array([[node.is_right for node in tree] for tree in nodes]),
        found=np.array([made for made, _ in found]),
        found_right=np.array([right for _, right in found]),
    )


class _Places:
    """All starts of one text, explored side by side."""

    def __init__(self, drafter: TreeDrafter, text: RecordedText) -> None:
        self._drafter, self._text, self._pages = drafter, text, count(len(text.tokens))
        logits, hidden = drafter.read(text.tokens)
        rows = torch.tensor([start - 1 - drafter.lag for start in text.starts])
        self._hidden = hidden[rows]
        self._scores = text.scores(logits[rows], text.starts)

    def ranks(self) -> Integers:
        """Follow the right path: ranks of the text's tokens."""
        found = []
        for depth, scores in enumerate(self._path(is_right=True)):
            right = torch.tensor([self._text.tokens[start + depth] for start in self._text.starts])
            found.append((scores > scores.gather(1, right[:, None])).sum(1).clamp(max=WIDTH))
        return torch.stack(found, 1).numpy()

    def chain(self) -> Floats:
        """Follow the best guess: the drafter's estimates that all drafts so far are right."""
        best = [scores.softmax(-1).amax(1) for scores in self._path(is_right=False)]
        return torch.stack(best, 1).cumprod(1).numpy()

    def _path(self, *, is_right: bool) -> Iterator[Tensor]:
        """Yield scores `[S, vocab]`, depth by depth, after the text's tokens or after the best guesses."""
        scores, hidden, pages = self._scores, self._hidden, [tuple[int, ...]()] * len(self._text.starts)
        for depth in range(1, DEPTH + 1):
            yield scores
            right = [self._text.tokens[start + depth - 1] for start in self._text.starts]
            tokens = right if is_right else scores.argmax(1).tolist()
            scores, hidden, pages = self._grow(tokens, [depth] * len(tokens), pages, hidden)

    def _grow(
        self, tokens: list[int], depths: list[int], pages: list[tuple[int, ...]], hidden: Tensor
    ) -> tuple[Tensor, Tensor, list[tuple[int, ...]]]:
        """Feed one guess for each start."""
        lag, feeds, own = self._drafter.lag, list[Feed](), [(*before, next(self._pages)) for before in pages]
        for start, token, depth, path in zip(self._text.starts, tokens, depths, own, strict=True):
            feeds.append(Feed([token], start + depth - 1 - lag, [*range(start - lag), *path]))
        logits, hidden = self._drafter.grow(feeds, hidden)
        positions = [start + depth for start, depth in zip(self._text.starts, depths, strict=True)]
        return self._text.scores(logits, positions), hidden, own

    def trees(self) -> list[list[_Node]]:
        """Grow a tree at each start by its likeliest node, `NODES` times; nodes in the order in which they came."""
        order, size = count(), len(self._text.starts)
        heaps: list[list[_Node]] = [[] for _ in range(size)]
        made: list[list[_Node]] = [[] for _ in range(size)]
        root = _Node(-1.0, -1, -1, 0, 1.0, is_right=True, pages=(), hidden=self._hidden)
        self._push(heaps, [root] * size, [()] * size, self._scores, self._hidden, order)
        for _ in range(NODES):
            best = [heapq.heappop(heap) for heap in heaps]
            for tree, node in zip(made, best, strict=True):
                tree.append(node)
            # A node at the last depth is fed too, so that a pass has a guess for each start; it gets no children.
            hidden = torch.stack([node.hidden for node in best])
            fed = [node.token for node in best], [node.depth for node in best], [node.pages for node in best]
            scores, hidden, pages = self._grow(*fed, hidden)
            self._push(heaps, best, pages, scores, hidden, order)
        return made

    def _push(
        self,
        heaps: list[list[_Node]],
        parents: list[_Node],
        pages: list[tuple[int, ...]],
        scores: Tensor,
        hidden: Tensor,
        order: Iterator[int],
    ) -> None:
        """Put the best children of `parents` on the heaps."""
        chances, tokens = (found.tolist() for found in scores.softmax(-1).topk(WIDTH))
        for i, parent in enumerate(parents):
            if parent.depth == DEPTH:
                continue
            right = self._text.tokens[self._text.starts[i] + parent.depth]
            for chance, token in zip(chances[i], tokens[i], strict=True):
                is_right = parent.is_right and token == right
                below = (parent.depth + 1, -parent.cost, is_right, pages[i], hidden[i])
                heapq.heappush(heaps[i], _Node(parent.cost * chance, next(order), token, *below))


def lookups(text: RecordedText, rules: Rules | None = None) -> list[tuple[int, int]]:
    """Return, per start, how many drafts `suffix` finds in the text before it, and how many leading ones are right."""
    rules, index, known, found = rules or Rules(), SuffixIndex(), list(text.tokens[: text.starts.start]), []
    index.grow(known, 0)
    for start in text.starts:
        guess = best_guess(known, index.places(known, rules.most_places), DEPTH, rules).tokens
        follows = text.tokens[start : start + DEPTH]
        right = next((i for i, token in enumerate(guess) if token != follows[i]), len(guess))
        found.append((len(guess), right))
        known.append(text.tokens[start])
        index.grow(known, start)
    return found
