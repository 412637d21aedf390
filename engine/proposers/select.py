"""The choice of a proposer for each sequence of a batch, and the handling of proposers that fail."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import replace
from functools import partial
from itertools import accumulate
from weakref import WeakKeyDictionary

from pilotfish.engine.control.goodput import Found, Traits
from pilotfish.engine.kv.batch import Feed
from pilotfish.engine.proposers.base import Lookup, Observer, Passed, Proposer
from pilotfish.engine.sampling.processors import allowed_prefix
from pilotfish.engine.stats import Forward
from pilotfish.engine.step import Step, Work
from pilotfish.engine.types import AUTO, PREDICTION, Sequence

log = logging.getLogger(__name__)

GIVE_UP_AFTER = 3  # failures in a row


class Proposers:
    """Named proposers; the sequences of one batch may use different ones.

    `any_of`: the candidates of `auto`, among which control chooses for each sequence and step.
    """

    def __init__(self, by_name: Mapping[str, Proposer], vocab_size: int, any_of: Seq[str] = ()) -> None:
        self.by_name, self._vocab_size, self.any_of = dict(by_name), vocab_size, tuple(any_of)
        self._observers = [(name, own) for name, own in by_name.items() if isinstance(own, Observer)]
        self._failures_in_a_row = dict.fromkeys(self.by_name, 0)
        self._blind: set[str] = set()  # observers that failed to see the last pass
        self._num_failures = 0  # since `take_failures` was called last
        # By sequence and lookup: the length when it was searched, the maximum number of drafts, the drafts found.
        self._found = WeakKeyDictionary[Sequence, dict[str, tuple[int, int, Found]]]()

    def take_failures(self) -> int:
        """Number of failures of proposers since the last call."""
        taken, self._num_failures = self._num_failures, 0
        return taken

    @property
    def names(self) -> tuple[str, ...]:
        """Names that a request may choose."""
        return (*self.by_name, AUTO) if self.any_of else tuple(self.by_name)

    @property
    def draft_kv_users(self) -> tuple[str, ...]:
        """Those that need pages in the draft's arena."""
        return tuple(name for name, proposer in self.by_name.items() if proposer.uses_draft_kv)

    @property
    def draft_kv_sharers(self) -> frozenset[str]:
        """Those whose pages there can be shared by sequences with a common prefix."""
        return frozenset(name for name, proposer in self.by_name.items() if proposer.shares_draft_kv)

    @property
    def traits(self) -> dict[str, Traits]:
        """What control needs of each proposer and of the requests' predictions, by name."""
        made = {
            name: Traits(
                find=partial(self.find, name) if isinstance(proposer, Lookup) else None,
                num_unseen=partial(_num_unseen, name, proposer) if proposer.uses_draft_kv else None,
                is_parallel=proposer.is_parallel,
                most=proposer.most_drafts,
            )
            for name, proposer in self.by_name.items()
        }
        return {**made, PREDICTION: Traits(find=partial(self.find, PREDICTION))}

    def find(self, name: str, sequence: Sequence, k: int) -> Found:
        """Drafts of a lookup or the prediction for the next step, at most `k`; searched once at each length.

        A lookup that fails has none in this step; after three failures in a row it is disabled.
        """
        if name == PREDICTION:
            return Found(sequence.predicted[:k])
        known = self._found.setdefault(sequence, {})
        length, most, found = known.get(name, (0, 0, Found()))
        if length != len(sequence.tokens) or most < k:
            found, lookup = Found(), self.by_name[name]
            assert isinstance(lookup, Lookup), "only lookups are searched"
            if not self._has_given_up(name, [sequence]):
                try:
                    found = lookup.look_up(sequence, k)
                    self._check(found.tokens, k)
                    self._failures_in_a_row[name] = 0
                except Exception as error:  # noqa: BLE001 - the target can go on after any error
                    found = Found()
                    self._failed(name, error)
            known[name] = len(sequence.tokens), k, found
        return found._replace(tokens=found.tokens[:k])

    def find_drafts(self, sequence: Sequence, k: int) -> tuple[int, ...] | None:
        """Drafts already found by the sequence's next proposer, at most `k`; None if it drafts in `propose`."""
        if not sequence.is_predicted and not isinstance(self.by_name.get(sequence.drafter), Lookup):
            return None
        return allowed_prefix(sequence, self.find(sequence.drafter, sequence, k).tokens)

    def propose(self, step: Step) -> Step:
        """The step, with drafts for the sequences that have none yet, each from its proposer."""
        works, forwards = list(step.works), list[Forward]()
        for name, proposer in self.by_name.items():
            asked = [i for i, w in enumerate(works) if w.num_draft and not w.drafts and w.sequence.drafter == name]
            if asked:
                for i, work in zip(asked, self._ask(name, proposer, [works[i] for i in asked], forwards), strict=True):
                    drafts, probs = allowed_prefix(work.sequence, work.drafts), work.draft_probs
                    works[i] = work.with_drafts(drafts, None if probs is None else probs[: len(drafts)])
        return replace(step, works=tuple(works), draft_forwards=tuple(forwards))

    def observe(self, works: Seq[Work], feeds: Seq[Feed]) -> None:
        """Give each observer what the target was just fed of the sequences that it may draft for."""
        first_rows = accumulate((len(feed.tokens) for feed in feeds), initial=0)
        # One row number more than feeds: where the next would begin.
        passed = [Passed(w.sequence, feed, first) for w, feed, first in zip(works, feeds, first_rows, strict=False)]
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

    def _ask(self, name: str, proposer: Proposer, works: list[Work], forwards: list[Forward]) -> list[Work]:
        """A failing proposer costs speed, never output: this step decodes plainly; after three failures all do."""
        sequences, passes = [work.sequence for work in works], list[Forward]()
        if self._has_given_up(name, sequences) or name in self._blind:
            return works
        if proposer.uses_draft_kv:
            for sequence in sequences:
                sequence.turn_to(name)
        known = [sequence.draft.kv_len for sequence in sequences]
        try:
            proposed = proposer.propose(works, passes)
            for work in proposed:
                self._check(work.drafts, work.num_draft)
        except Exception as error:  # noqa: BLE001 - the target can go on after any error
            self._failed(name, error)
            for sequence, kv_len in zip(sequences, known, strict=True):
                sequence.draft.kv_len = kv_len  # what it wrote beyond before it failed is not known
            return works
        self._failures_in_a_row[name] = 0
        forwards += passes
        return proposed

    def _has_given_up(self, name: str, sequences: Seq[Sequence]) -> bool:
        """Whether it failed too often; then another candidate, if there is one, drafts for these from now on."""
        if self._failures_in_a_row[name] < GIVE_UP_AFTER:
            return False
        for sequence in sequences:
            sequence.candidates = tuple(other for other in sequence.candidates if other != name)
            if sequence.choice == name:
                sequence.choice = next(iter(sequence.candidates), name)
        return True

    def _check(self, drafts: Seq[int], k: int) -> None:
        """Drafts go straight into the target's embedding and arena: too many, or no tokens, must not get there."""
        if len(drafts) > k:
            raise ValueError(f"proposed {len(drafts)} drafts where at most {k} were asked for")
        if not all(0 <= token < self._vocab_size for token in drafts):
            raise ValueError(f"proposed {drafts}; token ids are 0 to {self._vocab_size - 1}")

    def _failed(self, name: str, error: Exception) -> None:
        self._num_failures += 1
        self._failures_in_a_row[name] += 1
        log.error("proposer %s failed; this step continues without its drafts", name, exc_info=error)
        if self._failures_in_a_row[name] == GIVE_UP_AFTER:
            log.error("proposer %s failed %d times in a row and is disabled", name, GIVE_UP_AFTER)


def _num_unseen(name: str, proposer: Proposer, sequence: Sequence) -> int:
    return proposer.num_unseen(sequence, sequence.draft_of(name))
