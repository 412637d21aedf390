"""Which of several proposers drafts for a sequence: the one whose drafts are worth most. Pure arithmetic, no clock.

A draft is worth its chance of being kept, less the tokens that its seconds would bring elsewhere: seconds times the
rate of the step, in tokens per second. What maximises the sum of worths at the rate that it leads to also
maximises that rate (Dinkelbach 1967), so a few rounds of choosing and computing the rate anew find it.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np

from engine.control.acceptance import Bools, Ints
from engine.control.cost_model import CostModel, Floats
from engine.control.goodput import Traits, more_rows

_ROUNDS = 4  # at most; nearly always the choice is settled after two


def draft_seconds(prices: CostModel, traits: Traits, users: int, depth: int, context: float) -> Floats:
    """Seconds of making draft 1, 2, ... `depth` of one sequence, `[depth]`, if `users` sequences share the passes."""
    seconds, (per_token, _) = np.zeros(depth), prices.context
    if traits.is_parallel:
        seconds += more_rows(prices, 1, users, depth)
        seconds[0] += prices.joining(users).mean() + per_token * context
    elif traits.find is None:
        seconds += prices.joining(users).mean() + per_token * context
    seconds[0] += prices.an_asked_one + prices.a_call / users
    return seconds


@dataclass(frozen=True, slots=True)
class Bids:
    """What the candidates offer the sequences of a step."""

    kept: Floats  # [candidates, sequences, depth]: chance that a draft is kept
    limits: Ints  # [candidates, sequences]: most drafts
    first: Floats  # [candidates, sequences]: seconds of the first draft, beside making it
    rows: Floats  # [sequences, depth]: seconds of a draft's row in the target's pass
    is_fixed: Bools  # [sequences]: as many drafts as the limit says, whatever they are worth

    def seconds(self, prices: Floats) -> Floats:
        """Of all drafts up to each, `[candidates, sequences, depth]`; `prices` `[candidates, depth]` of making each."""
        each = prices[:, None] + self.rows
        each[:, :, 0] += self.first
        return each.cumsum(2)

    def worths(self, seconds: Floats, rate: float) -> tuple[Floats, Ints]:
        """What the best number of drafts is worth, and that number, `[candidates, sequences]`.

        `seconds` as above; `rate`: tokens that a second is worth.
        """
        sums = np.zeros((*self.limits.shape, seconds.shape[2] + 1))
        np.subtract(self.kept.cumsum(2), rate * seconds, out=sums[:, :, 1:])
        numbers, limits = np.arange(sums.shape[2]), self.limits[..., None]
        sums[(numbers > limits) | (self.is_fixed[:, None] & (numbers < limits))] = -np.inf
        best = sums.argmax(2)
        worths = np.take_along_axis(sums, best[..., None], 2)[..., 0]
        worths[(self.limits == 0) & self.is_fixed] = -np.inf  # with a fixed number of drafts none is no choice
        return worths, best


@dataclass(frozen=True, slots=True)
class Picked:
    """The best candidate of each sequence, and what led to it."""

    choice: Ints  # [sequences]
    worths: Floats  # [candidates, sequences]
    seconds: Floats  # [candidates, sequences, depth]
    rate: float  # tokens per second


def pick(bids: Bids, makers: Seq[tuple[CostModel, Traits]], context: float, tokens: float, seconds: float) -> Picked:
    """Choose a candidate for each sequence; without drafts the step makes `tokens` tokens in `seconds` seconds.

    At first passes are priced as if all sequences shared them, then as those do that chose them. `makers`: cost
    model and traits of each candidate; `context`: mean length of the sequences, in tokens.
    """
    candidates, sequences, depth = bids.kept.shape
    each, choice, users, rate = np.arange(sequences), np.full(sequences, -1), [sequences] * candidates, tokens / seconds
    spent = _spent(bids, makers, users, context)
    worths, numbers = bids.worths(spent, rate)
    for _ in range(_ROUNDS):
        before, choice = choice, worths.argmax(0)
        if (choice == before).all():
            break
        taken = numbers[choice, each]
        has, drafts = np.flatnonzero(taken), np.arange(depth) < taken[:, None]
        kept = float((bids.kept[choice, each] * drafts).sum())
        rate = (tokens + kept) / (seconds + float(spent[choice[has], has, taken[has] - 1].sum()))
        shared, users = users, np.maximum(np.bincount(choice[has], minlength=candidates), 1).tolist()
        if users != shared:
            spent = _spent(bids, makers, users, context)
        worths, numbers = bids.worths(spent, rate)
    return Picked(choice, worths, spent, rate)


def _spent(bids: Bids, makers: Seq[tuple[CostModel, Traits]], users: Seq[int], context: float) -> Floats:
    depth = bids.kept.shape[2]
    prices = [draft_seconds(*maker, n, depth, context) for maker, n in zip(makers, users, strict=True)]
    return bids.seconds(np.array(prices))
