"""A runner whose every pass has one shape, so that a row's bits do not depend on how many rows there are.

A matmul library picks its kernel, and with it the order of its sums, by the shape of the operands. Here no operand
that a row of tokens goes through ever changes its shape: a batch is cut into tiles of `TILE` tokens, each tile is
a pass of its own, and what is missing from the last one is padding. What then still changes for a row is its place
in the tile and its neighbours there; `engine.startup.batch_invariance` asks a model at load whether that matters.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import replace

import torch
from torch import Tensor

from engine.kv.batch import Feed
from engine.model.runner import Runner, Tap

TILE = 16


class FixedShapeRunner:
    """Runs `inner` in passes of exactly `TILE` tokens; `scratch` is a page of its arena with `TILE` spare rows.

    `tap` is of the same model: after all passes it holds what it would after a single one.
    """

    def __init__(self, inner: Runner, scratch: int, tap: Tap | None = None) -> None:
        self._inner, self._scratch, self._tap = inner, scratch, tap
        self.vocab_size = inner.vocab_size

    def forward(self, feeds: Seq[Feed]) -> Tensor:
        """As `Runner.forward`. Tiles run in order, so a sequence finds its earlier tokens in the arena."""
        logits, hidden = list[Tensor](), list[Tensor]()
        for tile in cut(feeds):
            logits.append(self._pass(tile))
            if self._tap is not None and self._tap.hidden is not None:
                hidden.append(self._tap.hidden[: sum(len(feed.tokens) for feed in tile)])
        if self._tap is not None and hidden:
            self._tap.hidden = torch.cat(hidden)
        return torch.cat(logits)

    def _pass(self, tile: list[Feed]) -> Tensor:
        wanted = wanted_rows(tile)
        if not wanted:
            return self._run(tile, logits=False)
        return self._run(tile, logits=True)[wanted]

    def _run(self, tile: list[Feed], *, logits: bool) -> Tensor:
        """Logits of all rows or of none: how many were asked for must not show in a shape either."""
        missing = TILE - sum(len(feed.tokens) for feed in tile)
        padding = [Feed([0] * missing, 0, [self._scratch] * missing)] if missing else []
        return self._inner.forward([replace(f, num_logits=len(f.tokens) if logits else 0) for f in (*tile, *padding)])


def cut(feeds: Iterable[Feed], size: int = TILE) -> Iterator[list[Feed]]:
    """Tiles of `size` tokens, the last one shorter; size 4: tokens of [3, 6, 1] -> [[3, 1], [4], [1, 1]]."""
    tile: list[Feed] = []
    room = size
    for feed in feeds:
        done = 0
        while done < len(feed.tokens):
            piece = _piece(feed, done, min(len(feed.tokens), done + room))
            tile.append(piece)
            done += len(piece.tokens)
            room -= len(piece.tokens)
            if not room:
                yield tile
                tile, room = [], size
    if tile:
        yield tile


def _piece(feed: Feed, start: int, stop: int) -> Feed:
    """Tokens start .. stop - 1 of a feed; of 5 tokens that want 2 logits, 2..4 want 1 and 4..5 the other."""
    num_logits = max(0, stop - max(start, len(feed.tokens) - feed.num_logits))
    return replace(feed, tokens=feed.tokens[start:stop], start=feed.start + start, num_logits=num_logits)


def wanted_rows(tile: Iterable[Feed]) -> list[int]:
    """Which rows of a tile want logits; (tokens, num_logits) [(3, 1), (2, 2), (4, 0)] -> [2, 3, 4]."""
    rows: list[int] = []
    stop = 0
    for feed in tile:
        stop += len(feed.tokens)
        rows += range(stop - feed.num_logits, stop)
    return rows
