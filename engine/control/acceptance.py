"""The probability that drafts are accepted, of each sequence and at each depth. Uses no costs and no clock.

Texts differ: one sequence has almost no wrong draft, the next almost no right one, and their average describes neither.
So each source of drafts has a prior: a distribution over rates of acceptance, learned from its sequences (empirical
Bayes, Robbins 1956). A source is a proposer; for a lookup, long matches are another source than short ones. The
posterior of a sequence follows from its own rounds. Two or three drafts change it much; older ones count less.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pilotfish.engine.control.constants import DEPTH_TRIALS, KEEP, SKEW, UNLIKE
from pilotfish.engine.control.cost_model import Floats
from pilotfish.engine.params import MAX_PREDICTED_DRAFTS
from pilotfish.engine.types import Sequence

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

RATES = np.array([0.01, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99])
_UNKNOWN = RATES * (SKEW - RATES) / (RATES * (SKEW - RATES)).sum()  # prior before any sequence: mean 0.6

_DEPTHS = np.arange(MAX_PREDICTED_DRAFTS)


class Source(NamedTuple):
    """Where drafts come from: a proposer, and of a lookup the size of the match that it found (0: a model's drafts).

    The size is the `bit_length` of the length of the match. On the embedded pair the first draft after a match of 2, 3,
    4 to 7, 8 to 15 and 16 tokens is right in 0.59, 0.77, 0.89, 0.90 and 0.99 of the cases.
    """

    proposer: str
    size: int = 0


Pair = tuple[Sequence, Source]


class _Priors:
    """A row for each source: the distribution of the rates of its sequences, and how each depth differs from the rate.

    All sources are one array: the time depends on the number of numpy calls, and little on the sizes of arrays.
    """

    def __init__(self) -> None:
        self.rows: dict[Source, int] = {}
        self.common = np.zeros((0, len(RATES)))
        self.hits, self.expected = np.zeros((0, MAX_PREDICTED_DRAFTS)), np.zeros((0, MAX_PREDICTED_DRAFTS))
        self.weights = self.common  # [source, rate]: prior of a new sequence
        # [source, rate, depth], for the depths that were requested: the probability that a draft is accepted with all
        # before it; and if those before it are, the logarithms of the probabilities that it is, and that it is not.
        self.down_to = self.log_hit = self.log_miss = np.zeros((0, len(RATES), 1))

    def of(self, sources: Seq[Source], depth: int) -> Ints:
        """Rows of these sources; adds missing sources, and extends the tables to `depth`."""
        for source in sources:
            if source not in self.rows:
                self.know(source, _UNKNOWN, np.zeros(MAX_PREDICTED_DRAFTS), np.zeros(MAX_PREDICTED_DRAFTS))
        if depth > self.down_to.shape[2]:
            self._tabulate(depth)
        return np.array([self.rows[source] for source in sources])

    def know(self, source: Source, common: Floats, hits: Floats, expected: Floats) -> None:
        """Set the prior of a source; by depth, accepted drafts and the number that the rates alone predicted."""
        if source not in self.rows:
            self.rows[source] = len(self.rows)
            self.common, self.hits, self.expected = (
                np.vstack([old, np.zeros(old.shape[1])]) for old in (self.common, self.hits, self.expected)
            )
        row = self.rows[source]
        self.common[row], self.hits[row], self.expected[row] = common, hits, expected
        self._tabulate(self.down_to.shape[2])

    def _tabulate(self, depth: int) -> None:
        everyone = np.arange(len(self.rows))
        self.weights = np.empty_like(self.common)
        self.down_to, self.log_hit, self.log_miss = np.empty((3, len(everyone), len(RATES), depth))
        self._refresh(everyone)

    def _refresh(self, rows: Ints) -> None:
        """Recompute the tables of these rows."""
        depth = self.down_to.shape[2]
        self.weights[rows] = (1 - UNLIKE) * self.common[rows] + UNLIKE * _UNKNOWN
        factors = (self.hits[rows, :depth] + DEPTH_TRIALS) / (self.expected[rows, :depth] + DEPTH_TRIALS)
        rates = np.minimum(RATES[:, None] * factors[:, None], RATES[-1])
        self.down_to[rows], self.log_hit[rows], self.log_miss[rows] = rates.cumprod(2), np.log(rates), np.log1p(-rates)

    def learn(self, rows: Ints, posterior: Floats, hit: Bools, tried: Bools, expected: Floats) -> None:
        """Update from a step: rows and posteriors `[sequences, rate]` of sequences; by depth, hits, trials, chances."""
        these, depth = np.array(sorted(set(rows.tolist()))), hit.shape[1]
        of = (rows == these[:, None]).astype(float)  # [source, sequence]
        counts = of.sum(1, keepdims=True)
        share = np.minimum(1.0, UNLIKE * counts)
        self.common[these] += share * (of @ posterior / counts - self.common[these])
        self.hits[these, :depth] += of @ hit
        self.expected[these, :depth] += of @ (expected * tried)
        self._refresh(these)


class Acceptance:
    """One posterior for each live sequence and source, from the prior of the source."""

    def __init__(self) -> None:
        self._priors = _Priors()
        # By sequence and source: the log likelihood of each rate, and the step in which it was last updated.
        self._evidence = defaultdict[Sequence, dict[Source, tuple[Floats, int]]](dict)
        self._step = 0

    def kept(self, pairs: Seq[Pair], depth: int, hope: float | None = None) -> Floats:
        """The probability that draft 1, 2, ... `depth` is accepted, `[pairs, depth]`.

        With `hope`, for the rate that is this quantile of the posterior of a sequence unlike any before.
        """
        rows = self._priors.of([source for _, source in pairs], depth)
        evidence, down_to = self._evidences(pairs), self._priors.down_to[rows, :, :depth]
        if hope is None:
            found: Floats = np.matmul(_posterior(self._priors.weights[rows], evidence)[:, None], down_to)[:, 0]
            return found
        ranks = (_posterior(_UNKNOWN, evidence).cumsum(1) < hope).sum(1)
        return down_to[np.arange(len(pairs)), np.minimum(ranks, len(RATES) - 1)]  # type: ignore[no-any-return]

    def learn(self, pairs: Seq[Pair], drafted: Ints, accepted: Ints) -> None:
        """Update from the numbers of drafts of a step and of those that were right, verified by the target or not."""
        self._step += 1
        if not pairs:
            return
        depth = int(drafted.max())
        rows, priors = self._priors.of([source for _, source in pairs], depth), self._priors
        evidence, weights = self._evidences(pairs), priors.weights[rows]
        hit = accepted[:, None] > _DEPTHS[:depth]
        tried = np.minimum(accepted + 1, drafted)[:, None] > _DEPTHS[:depth]
        expected = np.matmul(_posterior(weights, evidence)[:, None], priors.down_to[rows, :, :depth])[:, 0]
        expected[:, 1:] /= expected[:, :-1].copy()
        evidence += np.matmul(priors.log_hit[rows, :, :depth], hit[..., None])[..., 0]
        evidence += np.matmul(priors.log_miss[rows, :, :depth], (tried & ~hit)[..., None])[..., 0]
        for (sequence, source), own in zip(pairs, evidence, strict=True):
            self._evidence[sequence][source] = own, self._step
        priors.learn(rows, _posterior(weights, evidence), hit, tried, expected)

    def forget(self, sequence: Sequence) -> None:
        self._evidence.pop(sequence, None)

    def state(self) -> list[dict[str, Any]]:
        """The priors, as JSON values."""
        p = self._priors
        named = {"common": p.common, "hits": p.hits, "expected": p.expected}
        return [
            {**source._asdict(), **{name: values[row].tolist() for name, values in named.items()}}
            for source, row in p.rows.items()
        ]

    def restore(self, state: Seq[Mapping[str, Any]]) -> None:
        """Start with the priors of a `state`."""
        for one in state:
            hits, expected = (floats(one[name], _DEPTHS.shape) for name in ("hits", "expected"))
            source = Source(str(one["proposer"]), int(one["size"]))
            self._priors.know(source, floats(one["common"], RATES.shape), hits, expected)

    def _evidences(self, pairs: Seq[Pair]) -> Floats:
        """Log likelihoods `[pairs, rate]`, faded by the steps since their last update; zeros where there are none."""
        found = [self._evidence.get(sequence, {}).get(source, _NO_EVIDENCE) for sequence, source in pairs]
        left = np.array([KEEP ** (self._step - step) for _, step in found])
        return np.array([evidence for evidence, _ in found]) * left[:, None]  # type: ignore[no-any-return]


_NO_EVIDENCE = np.zeros(len(RATES)), 0


def _posterior(prior: Floats, evidence: Floats) -> Floats:
    likely = prior * np.exp(evidence - evidence.max(1, keepdims=True))
    found: Floats = likely / likely.sum(1, keepdims=True)
    return found


def floats(values: object, shape: tuple[int, ...]) -> Floats:
    """An array of this shape from a file. Raises ValueError for another shape, and for negative or infinite numbers."""
    found = np.array(values, float)
    if found.shape != shape or not np.isfinite(found).all() or (found < 0).any():
        raise ValueError(f"expected {shape} numbers of at least 0")
    return found
