"""How good drafts are at each sequence: not one number but how likely each of several is. Knows no cost and no clock.

Texts differ: one sequence has hardly a wrong draft, the next hardly a right one, and their average describes neither.
So what a proposer's sequences are like is a distribution over rates of acceptance, learned from them (empirical Bayes,
Robbins 1956). A new sequence is one of these, or, now and then, unlike any before. Two or three drafts tell which.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from engine.types import MAX_NUM_DRAFT

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

RATES = np.array([0.01, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99])
_DEPTHS = np.arange(MAX_NUM_DRAFT)
_ANYTHING = RATES * (1.2 - RATES) / (RATES * (1.2 - RATES)).sum()  # 0.6 on average
_UNLIKE = 0.1  # how likely a sequence is to be unlike any before
_OWN_KEEP = 0.97  # of what a sequence's rounds say, per round: texts change
_COMMON_RATE, _COMMON_MOST = 0.15, 0.2  # of the distribution, for each sequence's round, and in one round
_DEEPER = 16.0  # trials at a depth that count for it, beside the rate itself
_DEPTH_KEEP = 0.99


class Beliefs:
    """Of one proposer: what its sequences are like, and what is different at each depth."""

    def __init__(self) -> None:
        self.trials = 0.0  # rounds that this rests on
        self._common = _ANYTHING.copy()
        self._depth_hits, self._depth_expected = np.zeros(MAX_NUM_DRAFT), np.zeros(MAX_NUM_DRAFT)

    @property
    def prior(self) -> Floats:
        """Of a sequence that nothing is known of."""
        found: Floats = (1 - _UNLIKE) * self._common + _UNLIKE * _ANYTHING
        return found

    @property
    def _at_depths(self) -> Floats:
        """Chances of acceptance, given that the depth is reached, `[rate, depth]`."""
        factors = (self._depth_hits + _DEEPER) / (self._depth_expected + _DEEPER)
        return np.minimum(RATES[:, None] * factors, 0.995)

    def weights(self, evidence: Floats) -> Floats:
        """How likely each rate is for each sequence, `[sequences, rate]`, from the log likelihoods of its rounds."""
        likely = self.prior * np.exp(evidence - evidence.max(1, keepdims=True))
        found: Floats = likely / likely.sum(1, keepdims=True)
        return found

    def kept(self, evidence: Floats, depth: int) -> Floats:
        """The chance that draft 1, 2, ... `depth` is kept, `[sequences, depth]`."""
        found: Floats = self.weights(evidence) @ np.cumprod(self._at_depths[:, :depth], 1)
        return found

    def learn(self, evidence: Floats, num_hits: Ints, num_trials: Ints) -> Floats:
        """A round of some sequences: how many depths of each were tried, and were hits. Returns their new evidence."""
        rates, kept = self._at_depths, self.kept(evidence, MAX_NUM_DRAFT)
        hit = num_hits[:, None] > _DEPTHS
        missed = (num_trials[:, None] > _DEPTHS) & ~hit
        evidence = evidence * _OWN_KEEP + hit @ np.log(rates).T + missed @ np.log1p(-rates).T
        self._learn_depths(kept / np.hstack([np.ones((len(kept), 1)), kept[:, :-1]]), hit, hit | missed)
        judged = num_trials > 0
        share = min(_COMMON_MOST, _COMMON_RATE * int(judged.sum()))
        if judged.any():
            self._common += share * (self.weights(evidence)[judged].mean(0) - self._common)
        self.trials = self.trials * (1 - share) + float(judged.sum())
        return evidence

    def _learn_depths(self, expected: Floats, hit: npt.NDArray[np.bool_], tried: npt.NDArray[np.bool_]) -> None:
        keep = np.where(tried.any(0), _DEPTH_KEEP, 1.0)
        self._depth_hits = self._depth_hits * keep + hit.sum(0)
        self._depth_expected = self._depth_expected * keep + (expected * tried).sum(0)
