"""Lookup first: a match in the text is nearly free; where there is none, a drafter drafts."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from engine.proposers.base import Observer, Passed, Proposal, Proposer
from engine.proposers.suffix import SuffixProposer
from engine.types import Sequence


class FirstOf:
    """Each sequence of a batch by itself: what `lookup` finds, and where it finds nothing, what the drafter says."""

    def __init__(self, lookup: SuffixProposer, drafter: Proposer) -> None:
        self._lookup, self._drafter = lookup, drafter
        self.uses_draft_kv, self.shares_draft_kv = drafter.uses_draft_kv, drafter.shares_draft_kv

    def observe(self, passed: Seq[Passed]) -> None:
        """Pass it on: the drafter may need the target's features for its next drafts."""
        if isinstance(self._drafter, Observer):
            self._drafter.observe(passed)

    def find(self, sequence: Sequence, k: int) -> tuple[int, ...] | None:
        """What the lookup has, if that is anything."""
        return self._lookup.guess(sequence, k).tokens or None

    def propose(self, sequences: Seq[Sequence], k_each: Seq[int]) -> Proposal:
        """Merge both. A drafter that was passed over catches up by itself when it is asked again (I2)."""
        guesses = [self._lookup.guess(s, k) for s, k in zip(sequences, k_each, strict=True)]
        others = [i for i, guess in enumerate(guesses) if not guess.tokens]
        tokens = [guess.tokens for guess in guesses]
        if not others:
            return Proposal.certain(tokens)
        drafted = self._drafter.propose([sequences[i] for i in others], [k_each[i] for i in others])
        draft_probs = list(Proposal.certain(tokens).draft_probs)
        for i, drafts, probs in zip(others, drafted.tokens, drafted.draft_probs, strict=True):
            tokens[i], draft_probs[i] = drafts, probs
        return Proposal(tuple(tokens), tuple(draft_probs), drafted.forwards)
