"""Which drafts are worth their time: expected tokens per expected second. Pure arithmetic; knows no clock.

Draft slots are ranked by their chance of being kept and taken from the top, as many as make the rate highest. All
counts are tried, not up to the first loss: the first draft at a new depth costs a whole pass of the draft model, and
those of its batch mates at the same depth hardly anything.

Where several proposers may draft for a sequence, the one does whose drafts are worth most to it. A draft is worth its
chance of being kept, less the tokens that its seconds would bring elsewhere: seconds times the rate of the step, in
tokens per second. What maximises the sum of worths at the rate that it leads to also maximises that rate (Dinkelbach
1967), so a few rounds of choosing and computing the rate anew find it.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from engine.control.acceptance import Bools, Ints
from engine.control.cost_model import ASKED, ATTENDED, CALL, CONTEXT, CostModel, Floats, quantities
from engine.control.step_time import BatchLoad
from engine.types import Sequence

_ROUNDS = 4  # at most; nearly always the choice is settled after two


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
class Offer:
    """The drafts that one proposer could make, `[sequences, depth]` each; `limits` says how deep each may go."""

    limits: Ints  # [sequences]
    tokens: Floats  # chance that it is kept
    seconds: Floats  # what making it adds
    a_call: float  # seconds of asking at all
    contexts: Floats  # [sequences]

    def best(self, load: BatchLoad, target: CostModel, budget: int, *, all_of: bool = False) -> Choice:
        """As many slots, from the likeliest on, as make the rate highest; or all of them, whether they pay or not."""
        depth = self.tokens.shape[1]
        allowed = np.arange(depth) < self.limits[:, None]
        most = max(0, min(budget, int(allowed.sum())))
        order = np.argsort(np.where(allowed, -self.tokens, 1.0), None, "stable")[:most]
        # Each of these is of a step with the first 0, 1, 2, ... slots.
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
            # Beside prompts a second is worth what it would bring in a step without them; rows cost what they add.
            value = tokens - rates[count] * (beside + target.rows(rows + load.prompt_rows))
            count = int(value.argmax())
        of_rows, of_tokens, of_attended, of_drafting = (float(x[count]) for x in (rows, tokens, attended, drafting))
        after = replace(load, rows=of_rows, tokens=of_tokens, attended=of_attended, seconds=of_drafting)
        num_draft = np.bincount(order[:count] // depth, minlength=len(self.limits))
        return Choice(num_draft, after, gain, float(seconds[count] - seconds[0] * tokens[count] / tokens[0]))

    def shallow(self, these: Bools, count: int) -> Offer:
        """One draft each alone, for those `count` of these sequences that cost least to draft for."""
        limits = np.zeros_like(self.limits)
        order = np.argsort(np.where(these, self.seconds[:, 0], np.inf), kind="stable")[:count]
        limits[order] = np.minimum(self.limits[order], 1)
        return replace(self, limits=limits)


@dataclass(frozen=True, slots=True)
class Choice:
    """How many drafts for each sequence of an offer, and what that comes to."""

    num_draft: Ints  # [sequences]
    load: BatchLoad
    gain: float  # of the best number of drafts over none, in tokens per second, without prompts
    loss: float  # seconds that this number takes beyond what its tokens would take without


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
        joining, per_token = prices.joining(count), prices.price(CONTEXT)
        if traits.is_parallel:
            seconds += more_rows(prices, 1, count, depth)
            seconds[:, 0] += joining[ranks[:, 0]] + per_token * contexts
        else:
            seconds += joining[ranks] + (per_token * contexts)[:, None]
    seconds[:, 0] += prices.price(ASKED)
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


# ------------------------------------------------------------------------------ of several proposers, the best for each


def draft_seconds(prices: CostModel, traits: Traits, users: int, depth: int, context: float) -> Floats:
    """Seconds of making draft 1, 2, ... `depth` of one sequence, `[depth]`, if `users` sequences share the passes."""
    seconds, per_token = np.zeros(depth), prices.price(CONTEXT)
    if traits.is_parallel:
        seconds += more_rows(prices, 1, users, depth)
        seconds[0] += prices.joining(users).mean() + per_token * context
    elif traits.find is None:
        seconds += prices.joining(users).mean() + per_token * context
    seconds[0] += prices.price(ASKED) + prices.price(CALL) / users
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
        """What the best number of drafts is worth, and that number, `[candidates, sequences]`; none if nothing pays.

        `seconds` as above; `rate`: tokens that a second is worth. Where there is no draft, it is worth less than any.
        """
        sums = self.kept.cumsum(2) - rate * seconds
        numbers, limits = np.arange(1, sums.shape[2] + 1), self.limits[..., None]
        sums[(numbers > limits) | (self.is_fixed[:, None] & (numbers < limits))] = -np.inf
        worths = sums.max(2)
        return worths, np.where((worths > 0) | (self.is_fixed & (self.limits > 0)), sums.argmax(2) + 1, 0)


def pick(
    bids: Bids, makers: Seq[tuple[CostModel, Traits]], context: float, tokens: float, seconds: float
) -> Ints:
    """Choose a candidate for each sequence.

    Without drafts the step makes `tokens` tokens in `seconds` seconds. At first passes are priced as if all sequences
    shared them, then as those do that chose them. `makers`: cost model and traits of each candidate; `context`: mean
    length of the sequences, in tokens.
    """
    candidates, sequences, depth = bids.kept.shape
    each, choice, users, rate = np.arange(sequences), np.full(sequences, -1), [sequences] * candidates, tokens / seconds
    spent = _spent(bids, makers, users, context)
    # What was found is judged by the text, used or not: it is chosen where it pays alone.
    is_found = np.array([traits.find is not None for _, traits in makers])[:, None] & ~bids.is_fixed
    worths, numbers = bids.worths(spent, rate)
    for _ in range(_ROUNDS):
        before, choice = choice, np.where(is_found & (worths <= 0), -np.inf, worths).argmax(0)
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
    return choice


def _spent(bids: Bids, makers: Seq[tuple[CostModel, Traits]], users: Seq[int], context: float) -> Floats:
    depth = bids.kept.shape[2]
    prices = [draft_seconds(*maker, n, depth, context) for maker, n in zip(makers, users, strict=True)]
    return bids.seconds(np.array(prices))
