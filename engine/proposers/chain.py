"""Drafts that are drawn one after another from logits: common to all proposers with a distribution of their own."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch import Tensor

from engine.params import Verification
from engine.proposers.base import Proposal
from engine.sampling import distribution
from engine.sampling.distribution import RowParams
from engine.sampling.noise import LogitsRow, Stream
from engine.sampling.processors import process
from engine.stats import Forward
from engine.types import Sequence


@dataclass(slots=True)
class Chain:
    """One sequence's drafts while they are being made, up to `k` of them."""

    sequence: Sequence
    k: int
    tokens: list[int] = field(default_factory=list)
    probs: list[Tensor] = field(default_factory=list)

    @property
    def is_unfinished(self) -> bool:
        """Whether another draft is wanted."""
        return len(self.tokens) < self.k

    @property
    def row(self) -> LogitsRow:
        """The draw of the next draft: with the target's own noise under the coupled rule, apart under rejection."""
        stream = Stream.DRAFT if self.is_judged_by_law else Stream.COUPLED
        return LogitsRow(self.sequence, tuple(self.tokens), stream)

    @property
    def is_judged_by_law(self) -> bool:
        """Whether the rejection rule needs the distribution of each draft."""
        return self.sequence.speculation.verification is Verification.REJECTION


def chains_of(sequences: Seq[Sequence], k_each: Seq[int]) -> list[Chain]:
    """One empty chain each."""
    return [Chain(sequence, k) for sequence, k in zip(sequences, k_each, strict=True)]


def draw(chains: Seq[Chain], logits: Tensor) -> None:
    """Append one token to each chain, as the sequence's own parameters have it; `logits` `[len(chains), vocab]`.

    The one place where a draft is drawn: whatever shapes the target's distribution shapes the draft's here.
    """
    if not chains:
        return
    rows, needs_law = [chain.row for chain in chains], any(chain.is_judged_by_law for chain in chains)
    logits, probs = process(logits, rows), None
    if needs_law:
        params = RowParams.of(rows, logits.shape[1], logits.device)
        probs = distribution.probabilities(logits, params.samplers, truncated=params.truncated)
    drawn = distribution.draw(logits, rows).tolist()
    for i, chain in enumerate(chains):
        chain.tokens.append(drawn[i])
        if probs is not None and chain.is_judged_by_law:
            chain.probs.append(probs[i])


def draw_at_once(chains: Seq[Chain], logits: Tensor) -> None:
    """Draw all drafts of each chain, those of one depth together: processors see what was drawn before.

    `logits` have `chain.k` rows of each chain, one chain after the other: of k [2, 1] those of drafts 0 and 1, and 0.
    """
    placed = list(zip(chains, accumulate((chain.k for chain in chains), initial=0), strict=False))
    for depth in range(max(chain.k for chain in chains)):
        deep = [(chain, first + depth) for chain, first in placed if chain.k > depth]
        draw([chain for chain, _ in deep], logits[[row for _, row in deep]])


def proposal_of(chains: Seq[Chain], forwards: Seq[Forward]) -> Proposal:
    """All chains, in their order."""
    return Proposal(
        tokens=tuple(tuple(chain.tokens) for chain in chains),
        draft_probs=tuple(torch.stack(chain.probs) if chain.probs else None for chain in chains),
        forwards=tuple(forwards),
    )
