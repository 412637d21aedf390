"""How likely drafts are to be kept, of each sequence and at each depth. Knows no cost and no clock.

Texts differ: one sequence has hardly a wrong draft, the next hardly a right one, and their average describes neither.
So what the sequences of a source of drafts are like is a distribution over rates of acceptance, learned from them
(empirical Bayes, Robbins 1956): the prior of the next one. One source is a proposer's model, another what the same
proposer finds in the text. A sequence's own posterior follows from its rounds; two or three drafts tell much.
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
from engine.types import PREDICTION, Sequence

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

RATES = np.array([0.01, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99])
ANYTHING = RATES * (1.2 - RATES) / (RATES * (1.2 - RATES)).sum()  # of a sequence unlike any before: 0.6 on average

_UNLIKE = 0.1  # share of sequences that are unlike any before
_KEEP = 0.97  # of what a sequence's rounds say, per round: half of it is forgotten in 23 rounds, because texts change
_COMMON_RATE = 0.15  # of the prior, for each round of a sequence
_DEPTH_TRIALS = 16.0  # drafts at a depth that count as much as the rate itself
_DEPTHS = np.arange(MAX_PREDICTED_DRAFTS)


class Source(NamedTuple):
    """Where drafts come from: a proposer, and whether it found them in the text or a model made them."""

    proposer: str
    is_found: bool


class _Prior:
    """Of one source: what its sequences are like, and how each depth differs from the rate."""

    def __init__(self) -> None:
        self.know(ANYTHING.copy(), np.zeros(MAX_PREDICTED_DRAFTS), np.zeros(MAX_PREDICTED_DRAFTS))

    def know(self, common: Floats, hits: Floats, expected: Floats) -> None:
        """What its sequences are like; by depth, hits and what was expected of the rates. Asked for in every step."""
        self.common, self.hits, self.expected = common, hits, expected
        # How likely each rate is for a sequence of which nothing is known.
        self.weights: Floats = (1 - _UNLIKE) * common + _UNLIKE * ANYTHING
        # The chances that a draft is kept whose predecessors are, and that it is with all of them: [rate, depth].
        factors = (hits + _DEPTH_TRIALS) / (expected + _DEPTH_TRIALS)
        self.at_depths: Floats = np.minimum(RATES[:, None] * factors, 0.995)
        self.down_to: Floats = self.at_depths.cumprod(1)

    def learn(self, posterior: Floats, hit: Bools, tried: Bools, expected: Floats) -> None:
        """A round: the posteriors `[sequences, rate]`; by depth, hits, trials and the chances that those had."""
        share = min(0.2, _COMMON_RATE * len(posterior))
        common = self.common + share * (posterior.mean(0) - self.common)
        keep = np.where(tried.any(0), 0.99, 1.0)
        self.know(common, self.hits * keep + hit.sum(0), self.expected * keep + (expected * tried).sum(0))


class Acceptance:
    """One posterior for each live sequence and source, under a prior for each source."""

    def __init__(self) -> None:
        self._priors = defaultdict[Source, _Prior](_Prior)
        self._evidence: dict[tuple[Sequence, Source], Floats] = {}  # log likelihood of each rate

    def kept(self, sequences: Seq[Sequence], source: Source, depth: int, hope: float | None = None) -> Floats:
        """The chance that draft 1, 2, ... `depth` is kept, `[sequences, depth]`.

        With `hope`, that of the rate which is this quantile if each sequence is taken for one unlike any before.
        """
        evidence, prior = self._log_likelihoods(sequences, source), self._priors[source]
        powers = prior.down_to[:, :depth]
        if hope is None:
            found: Floats = _posterior(prior.weights, evidence) @ powers
            return found
        ranks = (_posterior(ANYTHING, evidence).cumsum(1) < hope).sum(1)
        return powers[np.minimum(ranks, len(RATES) - 1)]  # type: ignore[no-any-return]

    def learn(self, sequences: Seq[Sequence], source: Source, drafted: Ints, accepted: Ints) -> None:
        """A round of sequences that had drafts of this source."""
        prior, evidence = self._priors[source], self._log_likelihoods(sequences, source)
        rates = prior.at_depths
        hit = accepted[:, None] > _DEPTHS
        tried = np.minimum(accepted + 1, drafted)[:, None] > _DEPTHS
        kept = _posterior(prior.weights, evidence) @ prior.down_to
        expected = kept / np.hstack([np.ones((len(kept), 1)), kept[:, :-1]])
        evidence = _KEEP * evidence + hit @ np.log(rates).T + (tried & ~hit) @ np.log1p(-rates).T
        for sequence, own in zip(sequences, evidence, strict=True):
            self._evidence[sequence, source] = own
        prior.learn(_posterior(prior.weights, evidence), hit, tried, expected)

    def forget(self, sequence: Sequence) -> None:
        """The sequence is over."""
        for name in (sequence.speculation.proposer, PREDICTION):
            for is_found in (False, True):
                self._evidence.pop((sequence, Source(name, is_found)), None)

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
            prior = self._priors[Source(str(one["proposer"]), bool(one["is_found"]))]
            prior.know(floats(one["common"], RATES.shape), hits, expected)

    def _log_likelihoods(self, sequences: Seq[Sequence], source: Source) -> Floats:
        nothing = np.zeros(len(RATES))
        return np.array([self._evidence.get((sequence, source), nothing) for sequence in sequences])


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
