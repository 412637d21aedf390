"""Decoding recorded texts with a policy, under prices: tokens per second without running a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.trees.policies import DraftPlans, DraftPolicy
from benchmarks.trees.prices import StepPrices
from benchmarks.trees.record import DEPTH, Guesses

Move = tuple[int, int, tuple[int, ...]]  # drafts, tokens made, rows of each pass of the drafter
Moves = list[list[Move]]  # of each text, of each of its places


@dataclass(frozen=True)
class ReplayedSpeed:
    """What a replay came to."""

    tokens: int
    steps: int  # of sequences: each is verified once in a step of the batch
    seconds: float

    def __add__(self, other: ReplayedSpeed) -> ReplayedSpeed:
        """Return both, one after the other."""
        return ReplayedSpeed(self.tokens + other.tokens, self.steps + other.steps, self.seconds + other.seconds)

    @property
    def rate(self) -> float:
        """Return tokens per second."""
        return self.tokens / self.seconds

    @property
    def length(self) -> float:
        """Return tokens per sequence and step."""
        return self.tokens / self.steps


def moves(policy: DraftPolicy, texts: Sequence[Guesses], *, with_lookups: bool = False) -> Moves:
    """Return what the policy does at each place; with lookups as `auto`, which drafts what a lookup finds."""
    plans = [policy.plans(guesses) for guesses in texts]
    if with_lookups:
        plans = [own.after_lookup(guesses) for own, guesses in zip(plans, texts, strict=True)]
    return [_moves(own) for own in plans]


def _moves(plans: DraftPlans) -> list[Move]:
    rows = [tuple(row[: row.index(0) if 0 in row else DEPTH]) for row in plans.rows.tolist()]
    return list(zip(plans.drafts.tolist(), (plans.gained + 1).tolist(), rows, strict=True))


def replay(texts: Moves, prices: StepPrices, drafter: str, batch: int) -> ReplayedSpeed:
    """Decode in `batch` streams that step together; each goes through all texts, beginning with another one."""
    target, draft = prices.target[batch].tolist(), prices.draft[drafter][batch].tolist()
    firsts = [i * len(texts) // batch for i in range(batch)]
    streams = [_stream(texts[first:] + texts[:first]) for first in firsts]
    tokens, seconds = 0, 0.0
    for together in zip(*streams, strict=True):
        tokens += sum(move[1] for move in together)
        seconds += target[batch + sum(move[0] for move in together)]
        for depth in range(max(len(move[2]) for move in together)):
            seconds += draft[sum(move[2][depth] for move in together if depth < len(move[2]))]
    return ReplayedSpeed(tokens, sum(map(len, streams)), seconds)


def _stream(texts: Moves) -> list[Move]:
    """Return the steps of texts one after another: from each place to the one behind what was made."""
    made = []
    for places in texts:
        at = 0
        while at < len(places):
            made.append(places[at])
            at += places[at][1]
    return made
