"""Drafts by script, for tests: always right, always wrong, or anything between."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq

from engine.proposers.base import Proposal, Proposer
from engine.types import Sequence

Script = Callable[[Sequence, int], Seq[int]]  # (sequence, how many) -> at most that many drafts


class ScriptedProposer(Proposer):
    """Proposes what a function says."""

    def __init__(self, script: Script) -> None:
        self._script = script

    def propose(self, sequences: Seq[Sequence], k_each: Seq[int]) -> Proposal:
        """Ask the script for each sequence."""
        return Proposal.certain([tuple(self._script(s, k)) for s, k in zip(sequences, k_each, strict=True)])
