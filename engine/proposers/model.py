"""Drafts with a smaller model, one token at a time for the whole batch."""

from __future__ import annotations

import copy
import itertools
from typing import TYPE_CHECKING

from pilotfish.engine.control.prefill_budget import PrefillBudget
from pilotfish.engine.errors import ModelError
from pilotfish.engine.kv.batch import Feed
from pilotfish.engine.model.runner import Runner
from pilotfish.engine.proposers.chain import Chain, ChainProposer, extend
from pilotfish.engine.stats import Forward

if TYPE_CHECKING:
    from pilotfish.engine.model.decoder.decoder import DecoderModel


class ModelProposer(ChainProposer):
    """Drafts with a model with the target's token ids: another one, or the target's own first layers."""

    uses_draft_kv = True
    shares_draft_kv = True

    def __init__(self, runner: Runner, prefill: PrefillBudget, name: str) -> None:
        self.runner, self._prefill, self._name = runner, prefill, name

    def draft(self, chains: list[Chain], forwards: list[Forward]) -> None:
        """Draft. A sequence whose catch-up exceeds the token budget is fed a part of it and gets no drafts yet."""
        # Sequences with little to catch up come first, so that a long prompt does not cost others their drafts.
        chains = sorted(chains, key=lambda c: len(c.sequence.tokens) - c.sequence.draft.kv_len)
        while chains:
            chains = self._extend(chains, forwards)

    def _extend(self, chains: list[Chain], forwards: list[Forward]) -> list[Chain]:
        """One draft pass: every chain that has caught up grows by a token. Returns unfinished chains."""
        budget, feeds = self._prefill.tokens_of_draft(self._name, len(chains)), list[Feed]()
        for chain in chains:
            feeds.append(_feed(chain, budget))
            budget -= len(feeds[-1].tokens)
        logits = self.runner.forward([feed for feed in feeds if feed.tokens])
        forwards.append(Forward("draft", sum(bool(f.tokens) for f in feeds), sum(len(f.tokens) for f in feeds)))
        self._prefill.spend_of_draft(forwards[-1].sequences, forwards[-1].tokens)
        for chain, feed in zip(chains, feeds, strict=True):
            chain.sequence.draft.advance(feed.kv_len)
        grown = [chain for chain, feed in zip(chains, feeds, strict=True) if feed.num_logits]
        extend(grown, logits)
        return [chain for chain in grown if chain.is_unfinished]


def _feed(chain: Chain, budget: int) -> Feed:
    """The tokens that the draft model has not been fed, at most `budget`; with logits if they reach the end.

    One token in a steady state, two after a fully accepted round, the whole prompt at the start, more after steps
    without drafts (I2).
    """
    sequence = chain.sequence
    start, known = sequence.draft.kv_len, len(sequence.tokens)
    unseen = sequence.tokens[start:] + chain.tokens[max(0, start - known) :]
    reaches_end = len(unseen) <= budget
    tokens, cursor = unseen[:budget], sequence.draft
    state = cursor.span(start, start + len(tokens), known) if tokens else None
    return Feed(tokens, start, cursor.page_table, int(reaches_end), cursor.table, state)


def first_layers(model: DecoderModel, layers: int) -> DecoderModel:
    """A model of the first `layers` decoder layers, final norm and output matrix, with shared weights.

    Without training for early exit, early layers approximate the output only roughly; LayerSkip checkpoints (Elhoushi
    et al. 2024, arXiv 2404.16710) are trained for it.

    Raises:
        ModelError: the model has fewer layers.
    """
    depth = len(model.model.layers)
    if not 1 <= layers < depth:
        raise ModelError(f"draft is self:{layers}; the target has {depth} layers: expected 1 to {depth - 1}")
    # Tensors in the memo of a deep copy are not copied: new modules with the same weights.
    shared = {id(tensor): tensor for tensor in itertools.chain(model.parameters(), model.buffers())}
    twin = copy.deepcopy(model, shared)
    twin.model.layers = twin.model.layers[:layers]
    return twin
