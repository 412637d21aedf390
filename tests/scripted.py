"""Drafts by script, for tests: always right, always wrong, or anything between."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import replace

from pilotfish.engine.proposers.base import Proposer
from pilotfish.engine.stats import Forward
from pilotfish.engine.step import Work
from pilotfish.engine.types import Sequence

Script = Callable[[Sequence, int], Seq[int]]  # (sequence, how many) -> at most that many drafts


class ScriptedProposer(Proposer):
    """Proposes what a function says."""

    def __init__(self, script: Script) -> None:
        self._script = script

    def propose(self, works: Seq[Work], forwards: list[Forward]) -> list[Work]:
        """Ask the script for each sequence."""
        return [work.with_drafts(tuple(self._script(work.sequence, work.num_draft))) for work in works]


def drafts_from(proposer: Proposer, sequences: Seq[Sequence], k_each: Seq[int]) -> tuple[tuple[int, ...], ...]:
    """What a proposer makes for sequences of which each has only its newest token to feed."""
    works = [replace(Work.feeding(s, 1), num_draft=k) for s, k in zip(sequences, k_each, strict=True)]
    return tuple(work.drafts for work in proposer.propose(works, []))
