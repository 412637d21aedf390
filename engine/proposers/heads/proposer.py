"""Drafts with a head that predicts the target's features (EAGLE, arXiv 2401.15077).

The head is fed (feature of position t, token t + 1) and predicts the feature of t + 1, from which token t + 2 is drawn.
Beyond the target's last feature it continues from its own.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from pilotfish.engine.attention.registry import Ragged
from pilotfish.engine.kv.batch import Feed, RaggedBatch
from pilotfish.engine.proposers.base import Passed
from pilotfish.engine.proposers.chain import Chain, ChainProposer, extend
from pilotfish.engine.proposers.heads.base import HeadContext
from pilotfish.engine.proposers.heads.features import Features
from pilotfish.engine.proposers.heads.layers import FeatureHead
from pilotfish.engine.stats import Forward
from pilotfish.engine.types import KVCursor, Sequence

MOST_UNFED = 512  # features kept of an unused head, once more than twice as many are stored


class HeadProposer(ChainProposer):
    """Drafts with a head with its own arena; `places`: those of the target that it reads.

    Row r of a sequence's arena has the r-th fed feature. These are all positions but the last, except those whose K/V
    came from the prefix cache: then the first rows are missing, and attention, which depends only on distances, covers
    the rest. The cursor counts only features of the target. K/V of predicted features is beyond it, and overwritten
    later.
    """

    uses_draft_kv = True  # not shared: row r is not position r if features are missing

    def __init__(self, head: FeatureHead, places: tuple[int, ...], context: HeadContext) -> None:
        assert context.arena is not None, "it has a layout"
        self.head, self._places, self.arena = head, places, context.arena
        self.tap, self._attend, self._prefill = context.tap, context.attend, context.prefill
        self._name = context.name
        self.unfed: WeakKeyDictionary[Sequence, Features] = WeakKeyDictionary()

    @torch.inference_mode()
    def observe(self, passed: Seq[Passed]) -> None:
        """Store the hidden states that the head has not been fed yet. They are projected only when used."""
        before = [self.unfed.pop(p.sequence, None) for p in passed]  # if this fails, no stale rows remain
        hidden = self.tap.read(self._places)
        assert hidden is not None, "the target has not run"
        for p, features in zip(passed, before, strict=True):
            kept = features or Features()
            joins = kept.take(p.feed.start, hidden[p.rows_from(p.feed.start)])
            if features is None or not joins:
                p.sequence.draft.kv_len = 0  # the arena is not contiguous with these
            if kept.stop - kept.first > 2 * MOST_UNFED:
                kept.drop(kept.stop - kept.first - MOST_UNFED)
                p.sequence.draft.kv_len = 0
            self.unfed[p.sequence] = kept

    def num_unseen(self, sequence: Sequence, cursor: KVCursor) -> int:
        """In features."""
        features = self.unfed.get(sequence)
        return 0 if features is None else max(0, min(features.stop, len(sequence.tokens) - 1) - features.first - 2)

    def draft(self, chains: list[Chain], forwards: list[Forward]) -> None:
        """Catch up on the target's features, then draft, within the token budget, like `ModelProposer`."""
        chains, hidden = self._catch_up(chains, forwards)
        while chains:
            chains, hidden = self._extend(chains, hidden, forwards)

    def _catch_up(self, chains: list[Chain], forwards: list[Forward]) -> tuple[list[Chain], Tensor]:
        """Feed the target's features; chains that have caught up get their first draft."""
        budget = self._prefill.tokens_of_draft(self._name, len(chains))
        fed, ready = list[tuple[Chain, Feed, Tensor]](), [(c, self._ready(c.sequence)) for c in chains]
        for chain, rows in sorted(ready, key=lambda one: len(one[1])):
            feed = self._feed(chain.sequence, len(rows), budget)
            if feed.tokens:
                fed.append((chain, feed, rows[: len(feed.tokens)]))
                budget -= len(feed.tokens)
        if not fed:
            return [], torch.empty(0)
        features = self.head.project(torch.cat([rows for _, _, rows in fed]))
        hidden = self._forward([feed for _, feed, _ in fed], features, forwards)
        self._prefill.spend_of_draft(len(fed), len(features))
        for chain, feed, rows in fed:
            chain.sequence.draft.advance(feed.kv_len)
            self.unfed[chain.sequence].drop(len(rows))
        return self._grow([chain for chain, feed, _ in fed if feed.num_logits], hidden)

    def _ready(self, sequence: Sequence) -> Tensor:
        """The target's unfed hidden states `[n, places * width]`, if they are complete; else none."""
        features, stop = self.unfed.get(sequence) or Features(), len(sequence.tokens) - 1
        features.cut(stop)  # rows of rejected drafts
        return features.rows if features.stop == stop else torch.empty(0)

    def _feed(self, sequence: Sequence, count: int, budget: int) -> Feed:
        """The tokens of the next `count` features: token t + 1 for the feature of t."""
        stop = len(sequence.tokens)
        tokens = sequence.tokens[stop - count : stop][:budget]
        return Feed(tokens, sequence.draft.kv_len, sequence.draft.page_table, int(len(tokens) == count))

    def _extend(self, chains: list[Chain], hidden: Tensor, forwards: list[Forward]) -> tuple[list[Chain], Tensor]:
        """Feed each chain its own last feature and draft; the cursor does not move, so the rows are temporary."""
        feeds = [
            Feed([c.tokens[-1]], c.sequence.draft.kv_len + len(c.tokens) - 1, c.sequence.draft.page_table)
            for c in chains
        ]
        return self._grow(chains, self._forward(feeds, hidden, forwards))

    def _forward(self, feeds: list[Feed], features: Tensor, forwards: list[Forward]) -> Tensor:
        forwards.append(Forward("draft", len(feeds), len(features)))
        made: Tensor = self.head(features, self.ragged(feeds))
        return made

    def ragged(self, feeds: Seq[Feed]) -> Ragged:
        """The tokens of `feeds` over the head's arena."""
        return Ragged(RaggedBatch.of(feeds, self.arena.page_size, self.head.device), self.arena, self._attend)

    def _grow(self, chains: list[Chain], hidden: Tensor) -> tuple[list[Chain], Tensor]:
        """Draw a draft from each new feature `[len(chains), hidden]`; return unfinished chains, and their features."""
        if chains:
            extend(chains, self.head.logits(hidden))
        unfinished = [i for i, chain in enumerate(chains) if chain.is_unfinished]
        if len(unfinished) == len(chains):
            return chains, hidden
        return [chains[i] for i in unfinished], hidden[unfinished]
