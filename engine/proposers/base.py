"""What a proposer is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from engine.control.goodput import Found
from engine.kv.batch import Feed
from engine.stats import Forward
from engine.step import Work
from engine.types import KVCursor, Sequence


class Proposer:
    """Guesses up to `num_draft` next tokens of each sequence, which has only its newest token to feed.

    This one drafts nothing: plain decoding, the oracle of all others.
    """

    uses_draft_kv = False  # whether sequences need pages in its own arena
    shares_draft_kv = False  # whether these depend only on tokens and positions, so that the prefix cache may keep them
    is_parallel = False  # whether it makes all its drafts in one pass
    most_drafts: int | None = None  # maximum number of drafts per step; None: unlimited

    def propose(self, works: Seq[Work], forwards: list[Forward]) -> list[Work]:
        """Return the works with their drafts, and add each pass of a model to `forwards`.

        Drafts have `draft_probs` if they were drawn for the rejection rule; without, they count as certain. May advance
        the draft cursors, and changes nothing else.
        """
        return [*works]

    def num_unseen(self, sequence: Sequence, cursor: KVCursor) -> int:
        """Tokens that it has to be fed before it can draft, apart from the two that each round feeds."""
        return max(0, len(sequence.tokens) - 2 - cursor.kv_len)


@dataclass(frozen=True, slots=True)
class Passed:
    """What the target has just been fed of one sequence: `feed`, rows `first_row` and on of the flat pass."""

    sequence: Sequence
    feed: Feed
    first_row: int

    def rows_from(self, position: int) -> slice:
        """Rows of the pass that are of this sequence, from `position` on."""
        return slice(self.first_row + position - self.feed.start, self.first_row + len(self.feed.tokens))


@runtime_checkable
class Observer(Protocol):
    """A proposer that reads what the target's pass leaves behind, besides logits."""

    def observe(self, passed: Seq[Passed]) -> None:
        """Called after each pass of the target, before drafts are verified: rows of drafts may turn out to be wrong."""
        ...


class Lookup(Proposer, ABC):
    """Finds drafts in earlier text, which takes no pass of a model: planning knows them before it chooses their number.

    So it is `Proposers.find` that asks it, once for each sequence and step, and not `Proposers.propose`.
    """

    @abstractmethod
    def look_up(self, sequence: Sequence, k: int) -> Found:
        """Those that there are, at most `k`."""

    def propose(self, works: Seq[Work], forwards: list[Forward]) -> list[Work]:
        """The same as any other proposer gives them, for one that wraps this one."""
        return [work.with_drafts(self.look_up(work.sequence, work.num_draft).tokens) for work in works]
