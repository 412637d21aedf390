"""Each sequence's own choice of proposer within one batch; and what happens when one of them fails."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from collections.abc import Sequence as Seq

from torch import Tensor

from engine.proposers.base import Proposal, Proposer
from engine.stats import Forward
from engine.types import Sequence

log = logging.getLogger(__name__)


class Proposers:
    """Named proposers behind the interface of one: asks for each sequence the one it was given."""

    def __init__(self, by_name: Mapping[str, Proposer]) -> None:
        self._by_name = dict(by_name)
        self.num_failures = 0

    @property
    def names(self) -> tuple[str, ...]:
        """What a request may ask for."""
        return tuple(self._by_name)

    @property
    def draft_kv_users(self) -> frozenset[str]:
        """Those that need pages in the draft model's arena."""
        return frozenset(name for name, proposer in self._by_name.items() if proposer.uses_draft_kv)

    def propose(self, sequences: Seq[Sequence], k_each: Seq[int]) -> Proposal:
        """Merge what each proposer says of its own sequences, in the order of `sequences`."""
        tokens: list[tuple[int, ...]] = [()] * len(sequences)
        probs: list[Tensor | None] = [None] * len(sequences)
        forwards: list[Forward] = []
        for name, proposer in self._by_name.items():
            mine = [i for i, s in enumerate(sequences) if k_each[i] and s.speculation.proposer == name]
            if mine:
                part = self._ask(proposer, [sequences[i] for i in mine], [k_each[i] for i in mine])
                forwards += part.forwards
                for i, drafts, law in zip(mine, part.tokens, part.probs, strict=True):
                    tokens[i], probs[i] = drafts, law
        return Proposal(tuple(tokens), tuple(probs), tuple(forwards))

    def _ask(self, proposer: Proposer, sequences: list[Sequence], k_each: list[int]) -> Proposal:
        """A proposer that fails costs speed, never output: this step decodes plainly."""
        try:
            return proposer.propose(sequences, k_each)
        except Exception:
            log.exception("%s failed; this step goes on without its drafts", type(proposer).__name__)
            self.num_failures += 1
            for sequence in sequences:
                sequence.draft.kv_len = 0  # what it wrote before it failed is not known: feed it all again
            return Proposal.certain([()] * len(sequences))
