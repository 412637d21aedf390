"""What a proposer is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from pilotfish.engine.control.goodput import Found
from pilotfish.engine.kv.batch import Feed
from pilotfish.engine.stats import Forward
from pilotfish.engine.step import Work
from pilotfish.engine.types import KVCursor, Sequence


class Proposer:
    """Drafts up to `num_draft` next tokens of each sequence, which has only its newest token to feed.

    The base class drafts nothing: plain decoding, the reference of all others.
    """

    uses_draft_kv = False  # whether sequences need pages in its own arena
    shares_draft_kv = False  # whether these depend only on tokens and positions, so that the prefix cache may keep them
    is_parallel = False  # whether it makes all its drafts in one pass
    most_drafts: int | None = None  # maximum number of drafts per step; None: unlimited

    def propose(self, works: Seq[Work], forwards: list[Forward]) -> list[Work]:
        """Return the works with drafts, and append each pass of a model to `forwards`.

        Drafts have `draft_probs` if they were drawn for the rejection rule; otherwise their probability is 1. Only the
        draft cursors of sequences may change.
        """
        return [*works]

    def num_unseen(self, sequence: Sequence, cursor: KVCursor) -> int:
        """Number of tokens to feed before it can draft, without the two that each round feeds."""
        return max(0, len(sequence.tokens) - 2 - cursor.kv_len)


@dataclass(frozen=True, slots=True)
class Passed:
    """What the target was just fed of one sequence: `feed`, from row `first_row` of the flat pass."""

    sequence: Sequence
    feed: Feed
    first_row: int

    def rows_from(self, position: int) -> slice:
        """The sequence's rows of the pass, from `position` on."""
        return slice(self.first_row + position - self.feed.start, self.first_row + len(self.feed.tokens))


@runtime_checkable
class Observer(Protocol):
    """A proposer that reads hidden states or other results of the target's pass, besides logits."""

    def observe(self, passed: Seq[Passed]) -> None:
        """Called after each pass of the target, before drafts are verified: rows of drafts may turn out to be wrong."""
        ...


class Lookup(Proposer, ABC):
    """Finds drafts in earlier text without a pass of a model: planning has them before it chooses their number.

    `Proposers.find` calls it, once for each sequence and step; `Proposers.propose` does not.
    """

    @abstractmethod
    def look_up(self, sequence: Sequence, k: int) -> Found:
        """The drafts found, at most `k`."""

    def propose(self, works: Seq[Work], forwards: list[Forward]) -> list[Work]:
        """The same drafts in the form of other proposers, for a proposer that wraps this one."""
        return [work.with_drafts(self.look_up(work.sequence, work.num_draft).tokens) for work in works]
