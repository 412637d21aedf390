"""A smaller model guesses, one token at a time for the whole batch."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import torch
from torch import Tensor

from engine import sampling
from engine.batch import Feed
from engine.noise import Stream
from engine.proposers.base import Proposal
from engine.runner import Runner
from engine.sampling import Row, RowParams
from engine.stats import Forward
from engine.types import Sequence, Verification


@dataclass(slots=True)
class _Chain:
    """One sequence's drafts while they are being made."""

    sequence: Sequence
    k: int
    tokens: list[int] = field(default_factory=list)
    probs: list[Tensor] = field(default_factory=list)

    @property
    def length(self) -> int:
        """Tokens of the sequence and its drafts so far; the next draft goes here."""
        return len(self.sequence.tokens) + len(self.tokens)

    def feed(self, budget: int) -> Feed:
        """What the draft model has not seen, at most `budget` tokens of it; logits only if that reaches the end.

        One token in a steady state, two after a fully accepted round, the whole prompt at the start, everything
        since after a time without drafts: the same sentence each time (I2).
        """
        start, known = self.sequence.draft.kv_len, len(self.sequence.tokens)
        unseen = self.sequence.tokens[start:] + self.tokens[max(0, start - known) :]
        reaches_end = len(unseen) <= budget
        cursor = self.sequence.draft
        return Feed(unseen[:budget], start, cursor.page_table, int(reaches_end), cursor.table)

    def row(self) -> Row:
        """The draw of the next draft: with the target's own noise under the coupled rule, apart under rejection."""
        coupled = self.sequence.speculation.verification is Verification.COUPLED
        return Row(self.sequence, self.length, Stream.COUPLED if coupled else Stream.DRAFT)

    def draft_probs(self) -> Tensor | None:
        """The laws of all drafts, `[len(tokens), vocab]`, where the rejection rule will ask for them."""
        return torch.stack(self.probs) if self.probs else None


class ModelProposer:
    """Drafts with a model that speaks the target's token ids."""

    uses_draft_kv = True

    def __init__(self, runner: Runner, max_batch_tokens: int) -> None:
        self._runner, self._max_batch_tokens = runner, max_batch_tokens

    def propose(self, sequences: Seq[Sequence], k_each: Seq[int]) -> Proposal:
        """Draft; a sequence whose catch-up exceeds the token budget is fed a part of it and gets no drafts yet."""
        chains = [_Chain(sequence, k) for sequence, k in zip(sequences, k_each, strict=True)]
        forwards: list[Forward] = []
        active = [chain for chain in chains if chain.k]
        while active:
            active = self._extend(active, forwards)
        return Proposal(tuple(tuple(c.tokens) for c in chains), tuple(c.draft_probs() for c in chains), tuple(forwards))

    def _extend(self, chains: list[_Chain], forwards: list[Forward]) -> list[_Chain]:
        """One draft pass: every chain that is fed to its end grows by a token. Returns those that want more."""
        budget, feeds = self._max_batch_tokens, []
        for chain in chains:
            feeds.append(chain.feed(budget))
            budget -= len(feeds[-1].tokens)
        logits = self._runner.forward([feed for feed in feeds if feed.tokens])
        forwards.append(Forward("draft", sum(bool(f.tokens) for f in feeds), self._max_batch_tokens - budget))
        for chain, feed in zip(chains, feeds, strict=True):
            chain.sequence.draft.advance(feed.kv_len)
        grown = [chain for chain, feed in zip(chains, feeds, strict=True) if feed.num_logits]
        self._draw(grown, logits)
        return [chain for chain in grown if len(chain.tokens) < chain.k]

    def _draw(self, chains: list[_Chain], logits: Tensor) -> None:
        """Append one token to each chain; `logits` `[len(chains), vocab]`."""
        params = RowParams.of([chain.row() for chain in chains], logits.shape[1], logits.device)
        drawn = sampling.choose(logits, params).tolist()
        to_be_judged = [c.sequence.speculation.verification is Verification.REJECTION for c in chains]
        probs = sampling.probabilities(logits, params) if any(to_be_judged) else None
        for i, chain in enumerate(chains):
            chain.tokens.append(drawn[i])
            if probs is not None and to_be_judged[i]:
                chain.probs.append(probs[i])
