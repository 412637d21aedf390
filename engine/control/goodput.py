"""Which drafts are worth their time: expected tokens per expected second. Pure arithmetic; uses no clock.

Draft slots are ranked by their probability of acceptance and taken from the top; the number that makes the rate highest
is chosen. All numbers are tried, not up to the first loss: the first draft at a new depth costs a whole pass of the
draft model, and further drafts at that depth cost little.

Of several proposers that may draft for a sequence, the one whose drafts are worth most is chosen. A draft is worth its
probability of acceptance, less the tokens that the step would make in its seconds: seconds times the rate of the step,
in tokens per second. What maximises the sum of worths at the rate that it leads to also maximises that rate. Choosing
and computing the rate in turn raises it until this is so (Dinkelbach 1967).
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from pilotfish.engine.control.acceptance import Bools, Ints
from pilotfish.engine.control.cost_model import ASKED, ATTENDED, CONTEXT, CostModel, Floats, quantities
from pilotfish.engine.control.step_time import BatchLoad
from pilotfish.engine.types import Sequence


class Found(NamedTuple):
    """Drafts that were looked up in earlier text, and the length of the match that led to them, in tokens."""

    tokens: tuple[int, ...] = ()
    match: int = 0


class Traits(NamedTuple):
    """What control uses of one proposer."""

    find: Callable[[Sequence, int], Found] | None = None  # of a lookup: finds up to that many drafts
    num_unseen: Callable[[Sequence], int] | None = None  # tokens that it must read before it drafts; None: never any
    is_parallel: bool = False  # one pass makes all its drafts
    most: int | None = None  # maximum number of drafts in a step; None: any number


@dataclass(frozen=True, slots=True)
class Offer:
    """The drafts that one proposer could make, `[sequences, depth]` each; `limits`: maximum depth of each sequence."""

    limits: Ints  # [sequences]
    tokens: Floats  # probability that it is accepted
    seconds: Floats  # that making it adds
    a_call: float  # seconds of a call of the proposer
    contexts: Floats  # [sequences]
    unseen: Floats  # [sequences]: tokens that have to be read before the first draft

    def best(self, load: BatchLoad, target: CostModel, budget: int, *, all_of: bool = False) -> Choice:
        """Choose the number of slots, likeliest first, that makes the rate highest; or all, whether they pay or not."""
        depth = self.tokens.shape[1]
        allowed = np.arange(depth) < self.limits[:, None]
        most = max(0, min(budget, int(allowed.sum())))
        order = np.argsort(np.where(allowed, -self.tokens, 1.0), None, "stable")[:most]
        # Each of these is for steps with the first 0, 1, 2, ... slots.
        tokens = _growing(load.tokens, self.tokens.ravel()[order])
        attended = _growing(load.attended, self.contexts[order // depth])
        drafting = _growing(load.seconds, self.seconds.ravel()[order])
        drafting[1:] += self.a_call
        rows = load.rows + np.arange(most + 1.0)
        fixed = target.of(quantities(passes=1, sequences=load.sequences, context=load.context))
        beside = fixed + target.price(ATTENDED) * attended + drafting
        seconds = np.maximum(beside + target.rows(rows), 1e-9)
        rates = tokens / seconds
        count = int(rates.argmax()) if not all_of else most
        gain = float(rates[count] / rates[0])
        if load.prompt_rows and count and not all_of:
            # Beside prompts a second is worth the tokens of a step without prompts; rows cost what they add.
            value = tokens - rates[count] * (beside + target.rows(rows + load.prompt_rows))
            count = int(value.argmax())
        of_rows, of_tokens, of_attended, of_drafting = (float(x[count]) for x in (rows, tokens, attended, drafting))
        after = replace(load, rows=of_rows, tokens=of_tokens, attended=of_attended, seconds=of_drafting)
        num_draft = np.bincount(order[:count] // depth, minlength=len(self.limits))
        return Choice(num_draft, after, gain, float(seconds[count] - seconds[0] * tokens[count] / tokens[0]))

    def shallow(self, these: Bools, count: int) -> Offer:
        """The offer of one draft each, for the `count` of these sequences that cost least to draft for."""
        limits = np.zeros_like(self.limits)
        order = np.argsort(np.where(these, self.seconds[:, 0], np.inf), kind="stable")[: min(count, int(these.sum()))]
        limits[order] = np.minimum(self.limits[order], 1)
        return replace(self, limits=limits)


@dataclass(frozen=True, slots=True)
class Choice:
    """The number of drafts for each sequence of an offer, and its consequences."""

    num_draft: Ints  # [sequences]
    load: BatchLoad
    gain: float  # of the best number of drafts over none, in tokens per second, without prompts
    loss: float  # seconds that this number takes beyond what its tokens would take without


def _growing(first: float, added: Floats) -> Floats:
    """1, [2, 3] -> [1, 3, 6]."""
    return np.concatenate(([first], first + np.cumsum(added)))


def drafting_seconds(
    prices: CostModel, chances: Floats, contexts: Floats, unseen: Floats, rounds: Floats, traits: Traits,
    *, is_even: bool = False,
) -> Floats:  # fmt: skip
    """What making each draft adds, `[sequences, depth]`, in the order in which `Offer.best` takes them.

    A draft at depth d joins the d-th pass of the draft model, whose price counts for the first draft that needs it. If
    one pass makes all drafts, the first draft of a sequence joins it, and the others add a row each. Lookups need no
    pass. With `is_even` all pay the same for passes. `unseen` tokens have to be fed before the first draft; their
    seconds are spread over `rounds`.
    """
    count, depth = chances.shape
    seconds = np.zeros_like(chances)
    if traits.find is None:
        ranks = np.argsort(np.argsort(-chances, 0, "stable"), 0, "stable")
        joining, per_token = prices.joining(count), prices.price(CONTEXT)
        joining = np.full(count, joining.mean()) if is_even else joining
        if traits.is_parallel:
            seconds += more_rows(prices, 1, count, depth)
            seconds[:, 0] += joining[ranks[:, 0]] + per_token * contexts
        else:
            seconds += joining[ranks] + (per_token * contexts)[:, None]
    seconds[:, 0] += prices.price(ASKED)
    if unseen.any():
        seconds[:, 0] += (prices.rows(1 + unseen) - prices.rows(np.ones(1))) / rounds
    return seconds


def more_rows(prices: CostModel, rows: float, count: int, depth: int) -> Floats:
    """Seconds per sequence of the first, second, ... additional row of each of `count` with `rows` each, `[depth]`."""
    found: Floats = np.diff(prices.rows(count * (rows + np.arange(depth + 1.0)))) / count
    return found


def pick(
    kept: Floats, spent: Floats, limits: Ints, is_fixed: Bools, is_found: Seq[bool], tokens: float, seconds: float
) -> Ints:
    """Choose a candidate for each sequence, `[sequences]`.

    `kept`, `spent` `[candidates, sequences, depth]`: tokens expected of the drafts up to each, and their seconds.
    `limits` `[candidates, sequences]`: maximum numbers of drafts. `is_fixed` `[sequences]`: exactly that many.
    `is_found` `[candidates]`: lookups. They are chosen only where they pay: they need no trial, as their drafts are
    compared with the text whether they are used or not. Without drafts the step makes `tokens` tokens in `seconds`.
    """
    numbers, each, rate = np.arange(1, kept.shape[2] + 1), np.arange(kept.shape[1]), 0.0
    is_out = (numbers > limits[..., None]) | (is_fixed[:, None] & (numbers < limits[..., None]))
    is_modest = np.array(is_found)[:, None] & ~is_fixed
    while True:
        values = np.where(is_out, -np.inf, kept - rate * spent)
        worths = values.max(2)
        choice: Ints = np.where(is_modest & (worths <= 0), -np.inf, worths).argmax(0)
        best, taken = values[choice, each].argmax(1), (worths[choice, each] > 0) | is_fixed & (limits[choice, each] > 0)
        chosen = choice[taken], each[taken], best[taken]
        last, rate = rate, (tokens + float(kept[chosen].sum())) / (seconds + float(spent[chosen].sum()))
        if not rate > last:
            return choice
