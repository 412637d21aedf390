"""How likely drafts are to be kept, of each sequence and at each depth. Knows no cost and no clock.

Texts differ: one sequence has hardly a wrong draft, the next hardly a right one, and their average describes neither.
So what the sequences of a source of drafts are like is a distribution over rates of acceptance, learned from them
(empirical Bayes, Robbins 1956): the prior of the next one. A source is a proposer; of one that looks drafts up, its
long matches are another source than its short ones. A sequence's own posterior follows from its rounds; two or three
drafts tell much, and what they told is forgotten as the text goes on.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from engine.control.cost_model import Floats
from engine.params import MAX_PREDICTED_DRAFTS
from engine.types import Sequence

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

RATES = np.array([0.01, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99])
ANYTHING = RATES * (1.2 - RATES) / (RATES * (1.2 - RATES)).sum()  # of a sequence unlike any before: 0.6 on average

_UNLIKE = 0.1  # share of sequences that are unlike any before
_KEEP = 0.97  # of what a sequence's rounds say, per step: half of it is forgotten in 23 steps, because texts change
_COMMON_RATE = 0.15  # of the prior, for each round of a sequence
_DEPTH_TRIALS = 16.0  # drafts at a depth that count as much as the rate itself
_DEPTHS = np.arange(MAX_PREDICTED_DRAFTS)


class Source(NamedTuple):
    """Where drafts come from: a proposer, and the size of the match where they were found in a text (0: they were not).

    Sizes count doublings. On the embedded pair the first draft after a match of 2, 3, 4 to 7, 8 to 15 and 16 tokens is
    right in 0.59, 0.77, 0.89, 0.90 and 0.99 of the cases.
    """

    proposer: str
    size: int = 0

    @classmethod
    def found(cls, proposer: str, match: int) -> Source:
        """Of drafts that came after so many equal tokens."""
        return cls(proposer, match.bit_length())


Pair = tuple[Sequence, Source]


class _Prior:
    """Of one source: what its sequences are like, and how each depth differs from the rate."""

    def __init__(self) -> None:
        self._depth = 1  # the deepest that was asked about: tables go no deeper
        self.know(ANYTHING.copy(), np.zeros(MAX_PREDICTED_DRAFTS), np.zeros(MAX_PREDICTED_DRAFTS))

    def know(self, common: Floats, hits: Floats, expected: Floats) -> None:
        """What its sequences are like; by depth, hits and what was expected of the rates."""
        self.common, self.hits, self.expected = common, hits, expected
        # How likely each rate is for a sequence of which nothing is known.
        self._weights: Floats = (1 - _UNLIKE) * common + _UNLIKE * ANYTHING
        self._tabulate(self._depth)

    def _tabulate(self, depth: int) -> None:
        """The chances that a draft is kept whose predecessors are, and that it is with all of them: `[rate, depth]`."""
        factors = (self.hits[:depth] + _DEPTH_TRIALS) / (self.expected[:depth] + _DEPTH_TRIALS)
        rates = np.minimum(RATES[:, None] * factors, 0.995)
        self._depth, self._down_to = depth, rates.cumprod(1)
        self._log_hit, self._log_miss = np.log(rates), np.log1p(-rates)

    def kept(self, evidence: Floats, depth: int, hope: float | None) -> Floats:
        """As `Acceptance.kept`, of its sequences, of which this is the evidence `[sequences, rate]`."""
        if depth > self._depth:
            self._tabulate(depth)
        down_to = self._down_to[:, :depth]
        if hope is None:
            found: Floats = _posterior(self._weights, evidence) @ down_to
            return found
        ranks = (_posterior(ANYTHING, evidence).cumsum(1) < hope).sum(1)
        return down_to[np.minimum(ranks, len(RATES) - 1)]  # type: ignore[no-any-return]

    def learn(self, evidence: Floats, drafted: Ints, accepted: Ints) -> Floats:
        """A round of its sequences; returns their new evidence."""
        depth = int(drafted.max())
        kept = self.kept(evidence, depth, None)
        hit = accepted[:, None] > _DEPTHS[:depth]
        tried = np.minimum(accepted + 1, drafted)[:, None] > _DEPTHS[:depth]
        found: Floats = evidence + hit @ self._log_hit[:, :depth].T + (tried & ~hit) @ self._log_miss[:, :depth].T
        chances = kept.copy()
        chances[:, 1:] /= kept[:, :-1]
        hits, expected, keep = self.hits.copy(), self.expected.copy(), np.where(tried.any(0), 0.99, 1.0)
        hits[:depth] = hits[:depth] * keep + hit.sum(0)
        expected[:depth] = expected[:depth] * keep + (chances * tried).sum(0)
        share = min(0.2, _COMMON_RATE * len(evidence))
        common = self.common + share * (_posterior(self._weights, found).mean(0) - self.common)
        self.know(common, hits, expected)
        return found


class Acceptance:
    """One posterior for each live sequence and source, under a prior for each source."""

    def __init__(self) -> None:
        self._priors = defaultdict[Source, _Prior](_Prior)
        # Of each sequence, by source: the log likelihood of each rate, and in which step that was.
        self._evidence = defaultdict[Sequence, dict[Source, tuple[Floats, int]]](dict)
        self._step = 0

    def kept(self, pairs: Seq[Pair], depth: int, hope: float | None = None) -> Floats:
        """The chance that draft 1, 2, ... `depth` is kept, `[pairs, depth]`.

        With `hope`, that of the rate which is this quantile if each sequence is taken for one unlike any before.
        """
        found = np.empty((len(pairs), depth))
        for source, mine in _by_source(pairs).items():
            found[mine] = self._priors[source].kept(self._evidences(pairs, mine), depth, hope)
        return found

    def learn(self, pairs: Seq[Pair], drafted: Ints, accepted: Ints) -> None:
        """What came of the drafts of a step, some of which may have been compared with the text alone."""
        self._step += 1
        for source, mine in _by_source(pairs).items():
            after = self._priors[source].learn(self._evidences(pairs, mine), drafted[mine], accepted[mine])
            for i, own in zip(mine, after, strict=True):
                self._evidence[pairs[i][0]][source] = own, self._step

    def forget(self, sequence: Sequence) -> None:
        """The sequence is over."""
        self._evidence.pop(sequence, None)

    def state(self) -> list[dict[str, Any]]:
        """The priors, as JSON can hold them."""
        return [
            {**source._asdict(), "common": p.common.tolist(), "hits": p.hits.tolist(), "expected": p.expected.tolist()}
            for source, p in self._priors.items()
        ]

    def restore(self, state: Seq[Mapping[str, Any]]) -> None:
        """Begin with the priors of a `state`."""
        for one in state:
            hits, expected = (floats(one[name], _DEPTHS.shape) for name in ("hits", "expected"))
            prior = self._priors[Source(str(one["proposer"]), int(one["size"]))]
            prior.know(floats(one["common"], RATES.shape), hits, expected)

    def _evidences(self, pairs: Seq[Pair], which: Seq[int]) -> Floats:
        """What is left of the log likelihoods of some pairs, `[which, rate]`; of what is nothing, zeros."""
        found = [self._evidence.get(pairs[i][0], _NOTHING).get(pairs[i][1], _NO_EVIDENCE) for i in which]
        left = np.array([_KEEP ** (self._step - step) for _, step in found])
        return np.array([evidence for evidence, _ in found]) * left[:, None]  # type: ignore[no-any-return]


_NOTHING: dict[Source, tuple[Floats, int]] = {}
_NO_EVIDENCE = np.zeros(len(RATES)), 0


def _by_source(pairs: Seq[Pair]) -> dict[Source, list[int]]:
    """Which pairs are of each source."""
    found = defaultdict[Source, list[int]](list)
    for i, (_, source) in enumerate(pairs):
        found[source].append(i)
    return found


def _posterior(prior: Floats, evidence: Floats) -> Floats:
    likely = prior * np.exp(evidence - evidence.max(1, keepdims=True))
    found: Floats = likely / likely.sum(1, keepdims=True)
    return found


def floats(values: object, shape: tuple[int, ...]) -> Floats:
    """Numbers from a file, if they are as many as they should be and none is negative; else ValueError."""
    found = np.array(values, float)
    if found.shape != shape or not np.isfinite(found).all() or (found < 0).any():
        raise ValueError(f"expected {shape} numbers of at least 0")
    return found
