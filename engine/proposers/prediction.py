"""Predicted outputs: the caller's text is the draft where the output follows it (`engine/request/prediction.py`)."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from engine.control.traits import Found
from engine.proposers.base import Proposal
from engine.types import Sequence


class PredictionProposer:
    """Proposes what the request's prediction has next. It is asked for sequences that are in their prediction."""

    uses_draft_kv = False
    shares_draft_kv = False

    def find(self, sequence: Sequence, k: int) -> Found:
        """The drafts that there are."""
        assert sequence.alignment is not None, "asked of a sequence without a prediction"
        return Found(sequence.alignment.drafts(k))

    def propose(self, sequences: Seq[Sequence], k_each: Seq[int]) -> Proposal:
        """Look each sequence up in its prediction."""
        return Proposal.certain([self.find(s, k).tokens for s, k in zip(sequences, k_each, strict=True)])
