"""Each sequence's own choice of proposer within one batch; and what happens when one of them fails."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from functools import partial
from itertools import accumulate

from torch import Tensor

from engine.control.goodput import Found, Traits
from engine.kv.batch import Feed
from engine.proposers.base import Lookup, Observer, Passed, PredictionProposer, Proposal, Proposer
from engine.sampling.processors import allowed_prefix
from engine.stats import Forward
from engine.types import AUTO, PREDICTION, Sequence

log = logging.getLogger(__name__)

GIVE_UP_AFTER = 3  # failures in a row


class Proposers:
    """Named proposers behind the interface of one: asks for each sequence the one that drafts for it.

    `any_of`: names of those of which control chooses one for each sequence and step where a request asks for `auto`.
    """

    def __init__(self, by_name: Mapping[str, Proposer], vocab_size: int, any_of: Seq[str] = ()) -> None:
        self.by_name, self._vocab_size = {**by_name, PREDICTION: PredictionProposer()}, vocab_size
        self.any_of = tuple(any_of)
        self._observers = [(name, own) for name, own in by_name.items() if isinstance(own, Observer)]
        self._failures_in_a_row = dict.fromkeys(self.by_name, 0)
        self._blind: set[str] = set()  # observers that failed to see the last pass
        self._num_failures = 0  # since `take_failures` was called last

    def take_failures(self) -> int:
        """How many times a proposer has failed since the last call."""
        taken, self._num_failures = self._num_failures, 0
        return taken

    @property
    def names(self) -> tuple[str, ...]:
        """What a request may ask for."""
        own = tuple(name for name in self.by_name if name != PREDICTION)
        return (*own, AUTO) if self.any_of else own

    @property
    def draft_kv_users(self) -> tuple[str, ...]:
        """Those that need pages in an arena of their own."""
        return tuple(name for name, proposer in self.by_name.items() if proposer.uses_draft_kv)

    @property
    def draft_kv_sharers(self) -> frozenset[str]:
        """Those whose pages there may serve other sequences that begin alike."""
        return frozenset(name for name, proposer in self.by_name.items() if proposer.shares_draft_kv)

    @property
    def traits(self) -> dict[str, Traits]:
        """By name, what control has to know of each."""
        return {
            name: Traits(
                find=partial(self._find, name, proposer) if isinstance(proposer, Lookup) else None,
                num_unseen=partial(_num_unseen, name, proposer) if proposer.uses_draft_kv else None,
                is_parallel=proposer.is_parallel,
                most=proposer.most_drafts,
            )
            for name, proposer in self.by_name.items()
        }

    def _find(self, name: str, lookup: Lookup, sequence: Sequence, k: int) -> Found:
        """As in `_ask`: one that fails has nothing, and after three failures in a row it is not asked again."""
        if self._failures_in_a_row[name] == GIVE_UP_AFTER:
            return Found()
        try:
            return lookup.find(sequence, k)
        except Exception as error:  # noqa: BLE001 - whatever it is, the target can go on without
            self._failed(name, error)
            return Found()

    def propose(self, sequences: Seq[Sequence], k_each: Seq[int]) -> Proposal:
        """Merge what each proposer says of its own sequences, in the order of `sequences`."""
        tokens: list[tuple[int, ...]] = [()] * len(sequences)
        draft_probs: list[Tensor | None] = [None] * len(sequences)
        forwards: list[Forward] = []
        for name, proposer in self.by_name.items():
            mine = [i for i, s in enumerate(sequences) if k_each[i] and s.drafter == name]
            if mine:
                part = self._ask(name, proposer, [sequences[i] for i in mine], [k_each[i] for i in mine])
                forwards += part.forwards
                for i, drafts, probs in zip(mine, part.tokens, part.draft_probs, strict=True):
                    tokens[i] = allowed_prefix(sequences[i], drafts)
                    draft_probs[i] = None if probs is None else probs[: len(tokens[i])]
        return Proposal(tuple(tokens), tuple(draft_probs), tuple(forwards))

    def observe(self, sequences: Seq[Sequence], feeds: Seq[Feed]) -> None:
        """Show each observer what the target was just fed of those sequences that it may draft for."""
        first_rows = accumulate((len(feed.tokens) for feed in feeds), initial=0)
        # One row number more than feeds: where the next would begin.
        passed = [Passed(*each) for each in zip(sequences, feeds, first_rows, strict=False)]
        passed = [p for p in passed if p.sequence.speculation.num_draft_tokens > 0]
        for name, observer in self._observers:
            mine = [p for p in passed if name in p.sequence.drafters]
            if mine and self._failures_in_a_row[name] < GIVE_UP_AFTER:
                if self.by_name[name].uses_draft_kv:
                    for p in mine:
                        p.sequence.turn_to(name)
                self._blind.discard(name)
                try:
                    observer.observe(mine)
                except Exception as error:  # noqa: BLE001 - as in `_ask`; it drafts again after it has seen a pass
                    self._blind.add(name)
                    self._failed(name, error)

    def _ask(self, name: str, proposer: Proposer, sequences: list[Sequence], k_each: list[int]) -> Proposal:
        """A proposer that fails costs speed, never output: this step decodes plainly, and after three all do."""
        nothing = Proposal.certain([()] * len(sequences))
        if self._failures_in_a_row[name] == GIVE_UP_AFTER:
            for sequence in sequences:  # where there are others, one of them drafts from now on
                sequence.candidates = tuple(other for other in sequence.candidates if other != name)
                sequence.choice = next(iter(sequence.candidates), sequence.choice)
            return nothing
        if name in self._blind:
            return nothing
        if proposer.uses_draft_kv:
            for sequence in sequences:
                sequence.turn_to(name)
        known = [sequence.draft.kv_len for sequence in sequences]
        try:
            proposal = proposer.propose(sequences, k_each)
            self._check(proposal, k_each)
        except Exception as error:  # noqa: BLE001 - whatever it is, the target can go on without
            self._failed(name, error)
            for sequence, kv_len in zip(sequences, known, strict=True):
                sequence.draft.kv_len = kv_len  # what it wrote beyond before it failed is not known
            return nothing
        self._failures_in_a_row[name] = 0
        return proposal

    def _check(self, proposal: Proposal, k_each: list[int]) -> None:
        """Drafts go straight into the target's embedding and arena: too many, or no tokens, must not get there."""
        for drafts, k in zip(proposal.tokens, k_each, strict=True):
            if len(drafts) > k:
                raise ValueError(f"proposed {len(drafts)} drafts where at most {k} were asked for")
            if not all(0 <= token < self._vocab_size for token in drafts):
                raise ValueError(f"proposed {drafts}; token ids are 0 to {self._vocab_size - 1}")

    def _failed(self, name: str, error: Exception) -> None:
        self._num_failures += 1
        self._failures_in_a_row[name] += 1
        log.error("proposer %s failed; this step goes on without its drafts", name, exc_info=error)
        if self._failures_in_a_row[name] == GIVE_UP_AFTER:
            log.error("proposer %s failed %d times in a row; it is not asked again", name, GIVE_UP_AFTER)


def _num_unseen(name: str, proposer: Proposer, sequence: Sequence) -> int:
    return proposer.num_unseen(sequence, sequence.draft_of(name))
