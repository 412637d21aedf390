"""Drawing drafts one after another from logits, common to all proposers that have logits."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch import Tensor

from pilotfish.engine.params import Verification
from pilotfish.engine.proposers.base import Proposer
from pilotfish.engine.sampling.distribution import any_truncated, draw, draw_rows, probabilities, samplers_of
from pilotfish.engine.sampling.noise import LogitsRow, Stream
from pilotfish.engine.sampling.processors import process
from pilotfish.engine.stats import Forward
from pilotfish.engine.step import Work
from pilotfish.engine.types import Sequence


@dataclass(slots=True)
class Chain:
    """One sequence's drafts while they are being made, up to `k` of them."""

    sequence: Sequence
    k: int
    tokens: list[int] = field(default_factory=list)
    probs: list[Tensor] = field(default_factory=list)

    @property
    def is_unfinished(self) -> bool:
        """Whether another draft is needed."""
        return len(self.tokens) < self.k

    @property
    def row(self) -> LogitsRow:
        """The next draft's row, drawn with the target's noise under the coupled rule, else with separate noise."""
        return LogitsRow(self.sequence, tuple(self.tokens), Stream.DRAFT if self.keeps_probs else Stream.COUPLED)

    @property
    def keeps_probs(self) -> bool:
        """Whether the rejection rule needs the distribution of each draft."""
        return self.sequence.speculation.verification is Verification.REJECTION


class ChainProposer(Proposer, ABC):
    """Drafts drawn from the proposer's own logits."""

    @torch.inference_mode()
    def propose(self, works: Seq[Work], forwards: list[Forward]) -> list[Work]:
        """One chain for each sequence."""
        chains = [Chain(work.sequence, work.num_draft) for work in works]
        self.draft([chain for chain in chains if chain.k], forwards)
        return [
            work.with_drafts(tuple(chain.tokens), torch.stack(chain.probs) if chain.probs else None)
            for work, chain in zip(works, chains, strict=True)
        ]

    @abstractmethod
    def draft(self, chains: list[Chain], forwards: list[Forward]) -> None:
        """Extend unfinished chains as far as possible, and append each pass of the model to `forwards`."""


def extend(chains: Seq[Chain], logits: Tensor) -> None:
    """Append one token to each chain, drawn with the sequence's parameters; `logits` `[len(chains), vocab]`.

    The only place where drafts are drawn: all that shapes the target's distribution shapes the draft's here.
    """
    if not chains:
        return
    rows, judged = [chain.row for chain in chains], [i for i, chain in enumerate(chains) if chain.keeps_probs]
    logits = process(logits, rows)
    if judged:
        samplers, truncated = samplers_of(rows, logits.shape[1], logits.device), any_truncated(rows)
        probs, drawn = probabilities(logits, samplers, truncated=truncated), draw(logits, samplers, truncated=truncated)
        for i in judged:
            chains[i].probs.append(probs[i])
    else:
        drawn = draw_rows(logits, rows)
    for chain, token in zip(chains, drawn.token.tolist(), strict=True):
        chain.tokens.append(token)


def extend_at_once(chains: Seq[Chain], logits: Tensor) -> None:
    """Draw all drafts of each chain, one depth at a time: processors see the drafts before.

    `logits` have `chain.k` rows for each chain in order: for k [2, 1], drafts 0 and 1 of the first, 0 of the second.
    """
    placed = list(zip(chains, accumulate((chain.k for chain in chains), initial=0), strict=False))
    for depth in range(max(chain.k for chain in chains)):
        deep = [(chain, first + depth) for chain, first in placed if chain.k > depth]
        extend([chain for chain, _ in deep], logits[[row for _, row in deep]])
