"""What a proposer is."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor

from engine.control.goodput import Found
from engine.kv.batch import Feed
from engine.stats import Forward
from engine.types import Sequence


@dataclass(frozen=True, slots=True)
class Proposal:
    """Ragged drafts: `tokens[i]` are the guesses for sequence i, at most as many as were asked for.

    `draft_probs[i]` is the law that `tokens[i]` were drawn from, float64 `[len(tokens[i]), vocab]`; only sequences
    under the rejection rule have one. None means certainty: the law that puts everything on the proposed token.
    """

    tokens: tuple[tuple[int, ...], ...]
    draft_probs: tuple[Tensor | None, ...]
    forwards: tuple[Forward, ...] = ()

    @classmethod
    def certain(cls, tokens: Seq[Seq[int]]) -> Proposal:
        """Drafts that were looked up, not drawn."""
        return cls(tuple(tuple(t) for t in tokens), (None,) * len(tokens))


class Proposer(Protocol):
    """Guesses up to `k_each[i]` next tokens of `sequences[i]`, each of which has only its newest token to feed.

    One that makes all its drafts in one pass, whatever their number, has an attribute `is_parallel` that is true; one
    that can make so many in a step and no more has that number as `most_drafts`.
    """

    @property
    def uses_draft_kv(self) -> bool:
        """Whether sequences need pages in the draft model's arena."""
        ...

    @property
    def shares_draft_kv(self) -> bool:
        """Whether those pages depend on tokens and positions alone, so that the prefix cache may keep them."""
        ...

    def propose(self, sequences: Seq[Sequence], k_each: Seq[int]) -> Proposal:
        """Guess; may advance the draft cursors, may change nothing else."""
        ...


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


@runtime_checkable
class Finder(Protocol):
    """A proposer that looks drafts up, so that it can say which there are before it is known whether they pay."""

    def find(self, sequence: Sequence, k: int) -> Found:
        """Those that there are, at most `k`."""
        ...


@runtime_checkable
class CatchesUp(Protocol):
    """A proposer with a draft K/V that knows better than lengths what it has to be fed."""

    def num_unseen(self, sequence: Sequence) -> int:
        """Tokens that it has to be fed before it can draft, apart from the two that each round feeds."""
        ...


class NoProposer:
    """Proposes nothing: plain decoding, the oracle that all others are held against."""

    uses_draft_kv = False
    shares_draft_kv = False

    def propose(self, sequences: Seq[Sequence], k_each: Seq[int]) -> Proposal:
        """No drafts for anyone."""
        return Proposal.certain([()] * len(sequences))


class PredictionProposer:
    """Proposes what the request's prediction has next (`engine/request/prediction.py`), where the output follows it."""

    uses_draft_kv = False
    shares_draft_kv = False

    def find(self, sequence: Sequence, k: int) -> Found:
        """The drafts that there are."""
        assert sequence.alignment is not None, "asked of a sequence without a prediction"
        return Found(sequence.alignment.drafts(k))

    def propose(self, sequences: Seq[Sequence], k_each: Seq[int]) -> Proposal:
        """Look each sequence up in its prediction."""
        return Proposal.certain([self.find(s, k).tokens for s, k in zip(sequences, k_each, strict=True)])
