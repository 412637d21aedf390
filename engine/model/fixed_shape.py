"""A runner whose passes all have one shape, so that a row's bits do not depend on the number of rows.

A matmul library chooses its kernel, and with it the order of its sums, by the shape of the operands. Here no operand
ever changes its shape: a batch is cut into tiles of `TILE` tokens, each tile is one pass, and padding fills the last
tile. Only a row's place in the tile and its neighbours there still change; `engine.startup.batch_invariance` tests at
load whether they change its bits.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import replace

import torch
from torch import Tensor

from engine.kv.batch import Feed
from engine.model.runner import Runner
from engine.model.tap import Tap
from engine.types import EMPTY_STATE, StateSpan

TILE = 16


class FixedShapeRunner:
    """Runs `inner` in passes of exactly `TILE` tokens; `scratch` is a page of its arena with `TILE` spare rows.

    `scratch_state` is a slot of its states, if it has any, that no sequence uses.

    `tap` belongs to the same model: after all passes it holds the same rows as after a single pass.
    """

    def __init__(self, inner: Runner, scratch: int, tap: Tap | None = None, scratch_state: int = 0) -> None:
        self._inner, self._scratch, self._tap, self._scratch_state = inner, scratch, tap, scratch_state
        self.vocab_size = inner.vocab_size

    def forward(self, feeds: Seq[Feed]) -> Tensor:
        """Do what `Runner.forward` does. Tiles run in order, so the arena holds a sequence's earlier tokens."""
        logits, tapped = list[Tensor](), list[dict[int, Tensor]]()
        for tile in cut(feeds):
            logits.append(self._pass(tile))
            if self._tap is not None:
                tapped.append(self._tap.take(sum(len(feed.tokens) for feed in tile)))
        if self._tap is not None and tapped:
            self._tap.join(tapped)
        return torch.cat(logits)

    def _pass(self, tile: list[Feed]) -> Tensor:
        wanted = wanted_rows(tile)
        if not wanted:
            return self._run(tile, logits=False)
        return self._run(tile, logits=True)[wanted]

    def _run(self, tile: list[Feed], *, logits: bool) -> Tensor:
        """Compute logits of all rows or of none: the number of wanted logits must not change a shape either."""
        missing = TILE - sum(len(feed.tokens) for feed in tile)
        state = StateSpan(EMPTY_STATE, 0, self._scratch_state, missing)
        padding = [Feed([0] * missing, 0, [self._scratch] * missing, state=state)] if missing else []
        return self._inner.forward([replace(f, num_logits=len(f.tokens) if logits else 0) for f in (*tile, *padding)])


def cut(feeds: Iterable[Feed], size: int = TILE) -> Iterator[list[Feed]]:
    """Cut feeds into tiles of `size` tokens, the last shorter; size 4, tokens [3, 6, 1] -> [[3, 1], [4], [1, 1]]."""
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
    """Take tokens start .. stop - 1 of a feed; if 5 tokens want 2 logits, tokens 2..4 want 1 and 4..5 the other."""
    num_logits = max(0, stop - max(start, len(feed.tokens) - feed.num_logits))
    first, end = feed.start + start, feed.start + stop
    state = None if feed.state is None else feed.state.part(feed.start, first, end)
    return replace(feed, tokens=feed.tokens[start:stop], start=first, num_logits=num_logits, state=state)


def wanted_rows(tile: Iterable[Feed]) -> list[int]:
    """The rows of a tile that want logits; (tokens, num_logits) [(3, 1), (2, 2), (4, 0)] -> [2, 3, 4]."""
    rows: list[int] = []
    stop = 0
    for feed in tile:
        stop += len(feed.tokens)
        rows += range(stop - feed.num_logits, stop)
    return rows
