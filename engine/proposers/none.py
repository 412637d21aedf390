"""Plain decoding: the oracle that all others are held against."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from engine.proposers.base import Proposal
from engine.types import Sequence


class NoProposer:
    """Proposes nothing."""

    uses_draft_kv = False
    shares_draft_kv = False

    def propose(self, sequences: Seq[Sequence], k_each: Seq[int]) -> Proposal:
        """No drafts for anyone."""
        return Proposal.certain([()] * len(sequences))
