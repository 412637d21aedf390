"""Which drafts are worth their time: expected tokens per expected second. Pure arithmetic; knows no clock.

Draft slots are ranked by their chance of being kept and taken from the top, as many as make the rate highest. All
counts are tried, not up to the first loss: the first draft at a new depth costs a whole pass of the draft model, and
those of its batch mates at the same depth hardly anything.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from engine.control.acceptance import Bools, Ints
from engine.control.cost_model import CostModel, Floats, quantities, with_rows
from engine.types import Sequence


class Found(NamedTuple):
    """Drafts that were looked up in earlier text, and the length of the match that led to them, in tokens."""

    tokens: tuple[int, ...] = ()
    match: int = 0


class Traits(NamedTuple):
    """What control knows of one proposer."""

    find: Callable[[Sequence, int], Found] | None = None  # the drafts that it has looked up; None: it makes them
    num_unseen: Callable[[Sequence], int] | None = None  # tokens that it must read before it drafts; None: none
    is_parallel: bool = False  # all its drafts come of one pass
    most: int | None = None  # drafts that it can make in a step; None: any number


@dataclass(frozen=True, slots=True)
class BatchLoad:
    """What a step does already, before more drafts are added."""

    sequences: int
    rows: float
    tokens: float  # expected to come of it
    context: float  # tokens of all sequences
    attended: float  # the same, once per row
    seconds: float = 0.0  # of drafting
    prompt_rows: int = 0

    @classmethod
    def of(cls, lengths: Seq[int], num_draft: Seq[int], prompt_rows: int = 0) -> BatchLoad:
        """A step of sequences that are so long and feed their newest token and so many drafts."""
        sequences, context = len(lengths), sum(lengths)
        drafted = sum(length * k for length, k in zip(lengths, num_draft, strict=True))
        rows = sequences + sum(num_draft)
        return cls(sequences, rows, sequences, context, context + drafted, prompt_rows=prompt_rows)

    @property
    def quantities(self) -> Floats:
        """Of the target's pass."""
        work = quantities(passes=1, sequences=self.sequences, context=self.context, attended=self.attended)
        return with_rows(work, [self.rows])


@dataclass(frozen=True, slots=True)
class Offer:
    """The drafts that one proposer could make, `[sequences, depth]` each; `limits` says how deep each may go."""

    limits: Ints  # [sequences]
    tokens: Floats  # chance that it is kept
    seconds: Floats  # what making it adds
    a_call: float  # seconds of asking at all
    contexts: Floats  # [sequences]

    def best(self, load: BatchLoad, target: CostModel, budget: int) -> Choice:
        """As many slots, from the likeliest on, as make the rate highest."""
        sums = self._sums(load, budget)
        steady = np.maximum(_pass_seconds(target, load, sums) + sums.seconds, 1e-9)
        rates = sums.tokens / steady
        count = int(rates.argmax())
        gain = float(rates[count] / rates[0])
        if load.prompt_rows and count:
            # Beside prompts a second is worth what it would bring in a step without them; rows cost what they add.
            beside = replace(sums, rows=sums.rows + load.prompt_rows)
            value = sums.tokens - rates[count] * (_pass_seconds(target, load, beside) + sums.seconds)
            count = int(value.argmax())
        return self._choice(load, sums, count, gain, steady)

    def all_of(self, load: BatchLoad, target: CostModel, budget: int) -> Choice:
        """Every slot, whether it pays or not."""
        sums = self._sums(load, budget)
        seconds = np.maximum(_pass_seconds(target, load, sums) + sums.seconds, 1e-9)
        return self._choice(load, sums, len(sums.order), 1.0, seconds)

    def shallow(self, these: Bools, count: int) -> Offer:
        """One draft each alone, for those `count` of these sequences that cost least to draft for."""
        limits = np.zeros_like(self.limits)
        order = np.argsort(np.where(these, self.seconds[:, 0], np.inf), kind="stable")[:count]
        limits[order] = np.minimum(self.limits[order], 1)
        return replace(self, limits=limits)

    def _sums(self, load: BatchLoad, budget: int) -> _Sums:
        """What the first 0, 1, 2, ... slots come to."""
        allowed = np.arange(self.tokens.shape[1]) < self.limits[:, None]
        most = max(0, min(budget, int(allowed.sum())))
        order = np.argsort(np.where(allowed, -self.tokens, 1.0), None, "stable")[:most]
        seconds = _growing(load.seconds, self.seconds.ravel()[order])
        seconds[1:] += self.a_call
        return _Sums(
            order=order,
            tokens=_growing(load.tokens, self.tokens.ravel()[order]),
            rows=load.rows + np.arange(len(order) + 1.0),
            attended=_growing(load.attended, self.contexts[order // self.tokens.shape[1]]),
            seconds=seconds,
        )

    def _choice(self, load: BatchLoad, sums: _Sums, count: int, gain: float, seconds: Floats) -> Choice:
        after = replace(
            load,
            rows=float(sums.rows[count]),
            tokens=float(sums.tokens[count]),
            attended=float(sums.attended[count]),
            seconds=float(sums.seconds[count]),
        )
        num_draft = np.bincount(sums.order[:count] // self.tokens.shape[1], minlength=len(self.limits))
        loss = seconds[count] - seconds[0] * sums.tokens[count] / sums.tokens[0]
        return Choice(num_draft, after, gain, float(loss))


@dataclass(frozen=True, slots=True)
class _Sums:
    """A step with the first 0, 1, 2, ... slots of `order`; `seconds` are of drafting."""

    order: Ints
    tokens: Floats
    rows: Floats
    attended: Floats
    seconds: Floats


@dataclass(frozen=True, slots=True)
class Choice:
    """How many drafts for each sequence of an offer, and what that comes to."""

    num_draft: Ints  # [sequences]
    load: BatchLoad
    gain: float  # of the best number of drafts over none, in tokens per second, without prompts
    loss: float  # seconds that this number takes beyond what its tokens would take without


def _pass_seconds(target: CostModel, load: BatchLoad, sums: _Sums) -> Floats:
    """Of the target's pass."""
    each, per_row = target.context
    fixed = target.a_pass + target.a_sequence * load.sequences + each * load.context
    return fixed + per_row * sums.attended + target.rows(sums.rows)


def _growing(first: float, added: Floats) -> Floats:
    """1, [2, 3] -> [1, 3, 6]."""
    return np.concatenate(([first], first + np.cumsum(added)))


def drafting_seconds(
    prices: CostModel, chances: Floats, contexts: Floats, unseen: Floats, rounds: Floats, traits: Traits
) -> Floats:
    """What making each draft adds, `[sequences, depth]`, in the order in which `Offer.best` takes them.

    A draft at depth d joins the d-th pass of the draft model, which is paid for by the first to need it; where all come
    of one pass, the first draft joins that and the others add a row to it. Drafts that were found need no pass.
    `unseen` tokens have to be fed before the first draft; that is an investment, spread over so many `rounds`.
    """
    count, depth = chances.shape
    seconds = np.zeros_like(chances)
    if traits.find is None:
        ranks = np.argsort(np.argsort(-chances, 0, "stable"), 0, "stable")
        joining, (per_token, _) = prices.joining(count), prices.context
        if traits.is_parallel:
            seconds += more_rows(prices, 1, count, depth)
            seconds[:, 0] += joining[ranks[:, 0]] + per_token * contexts
        else:
            seconds += joining[ranks] + (per_token * contexts)[:, None]
    seconds[:, 0] += prices.an_asked_one
    if unseen.any():
        seconds[:, 0] += catching_up(prices, unseen) / rounds
    return seconds


def more_rows(prices: CostModel, rows: float, count: int, depth: int) -> Floats:
    """Seconds, per sequence, of a first, second, ... more row of each of `count` that have `rows` each, `[depth]`."""
    found: Floats = np.diff(prices.rows(count * (rows + np.arange(depth + 1.0)))) / count
    return found


def catching_up(prices: CostModel, unseen: Floats) -> Floats:
    """Seconds of so many more rows in a pass that feeds one."""
    return prices.rows(1 + unseen) - prices.rows(np.ones(1))
