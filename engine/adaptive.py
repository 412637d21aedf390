"""How many drafts each sequence gets, step by step, from what steps were measured to cost and to bring.

Knows no model and no clock: seconds are told to it. Whatever it chooses, the tokens are the same; only time differs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from engine.acceptance import Acceptance
from engine.beliefs import Ints
from engine.control import Round, within
from engine.gain import Gain
from engine.goodput import Choice, Load, Offer, drafting_seconds
from engine.prices import Prices, quantities, with_rows
from engine.probing import Probing
from engine.types import MAX_NUM_DRAFT, Sequence, SpeculationMode

PLAIN_SHARE = 0.02  # of what drafting gains, for plain steps, to know what it is compared with
PLAIN_EVERY = (4, 128)  # steps: not more often than that, and not more seldom

_MARGIN, _DOUBT = 0.03, 0.3  # what a gain must exceed, and how much more for want of measured plain steps
_HYSTERESIS = 0.5  # of that is enough to stay, where it was exceeded before
_STEP, _STRIDE = 4, 1.5  # more rows, or times as many, as were ever measured, at most: nobody knows what more cost
_SMOOTH = 0.2  # weight of the newest expected gain in what is compared with those
_PROBE_DEPTH = 1
_WORTH = 0.7  # of the chance of a sequence of which nothing is known: others' drafts are not asked for
_PROBE_ALL_EVERY = 4  # probes
_YOUTH, _LATE = 0.25, 2.0  # of an output; then a probe pays less, and must be worth so many times its price
_HOPE = 0.95  # a chance of each draft at which a proposer would have to pay, or it is not even tried
_PLENTY, _PLAIN_SAMPLE = 100, 4  # measurements, after which every fourth plain step is enough
_LOOK_AGAIN = 8, 16  # steps without drafts, at least and at most, before it is asked again whether they would pay
_TRY_MORE_EVERY, _MODESTY = 16, 0.95  # steps; then as many drafts as reach this share of the best rate
_TRIALS = 4  # rounds after which a proposer is known about as well as not
_HORIZON = 128  # tokens: nobody knows whether an output goes on for longer


@dataclass(slots=True)
class _Proposer:
    """What is known of one proposer."""

    prices: Prices = field(default_factory=Prices)
    share: float = 1.0  # of its sequences that need the draft model: the others are looked up
    is_on: bool = True
    expected_gain: float = 1.0 + _MARGIN
    skipped: int = 0  # steps since the last decision in which it was not asked, as nothing had changed

    def decide(self, gain: float, margin: float) -> bool:
        """Whether it drafts, after a step in which this much was expected of it, and so in those that were skipped."""
        self.expected_gain += (1 - (1 - _SMOOTH) ** (1 + self.skipped)) * (gain - self.expected_gain)
        self.skipped = 0
        self.is_on = self.expected_gain > 1 + margin * (_HYSTERESIS if self.is_on else 1)
        return self.is_on


class _Group(NamedTuple):
    """The sequences of one step that one proposer may draft for."""

    name: str
    proposer: _Proposer
    sequences: Seq[Sequence]
    limits: Seq[int]

    def only(self, these: Seq[bool]) -> _Group:
        """The same, where none but these may have drafts."""
        return self._replace(limits=[limit * this for limit, this in zip(self.limits, these, strict=True)])


def _margin(num_plain: int) -> float:
    """How far above 1 an expected gain must be, where so many plain steps were measured to compare with."""
    return _MARGIN + _DOUBT / math.sqrt(1 + num_plain)


def _is_young(sequence: Sequence) -> bool:
    """Most of its output is still to come."""
    return sequence.num_generated <= _YOUTH * (sequence.num_generated + sequence.max_len - len(sequence.tokens))


class AdaptiveK:
    """As many as pay, down to none."""

    def __init__(self, draft_kv_users: frozenset[str] = frozenset()) -> None:
        self.gain, self.acceptance, self.target = Gain(), Acceptance(), Prices()
        self._draft_kv_users = draft_kv_users  # names of the proposers whose sequences may have to catch up
        self._proposers: dict[str, _Proposer] = {}
        self.probing = Probing()
        self._since_plain = self._num_steps = 0
        self._quiet: tuple[int, Sequence | None, int] = (0, None, 0)  # how many, the newest, and until which step
        self._num_plain: dict[int, int] = {}  # plain steps measured, by the number of sequences, doubling

    # ---------------------------------------------------------------------------------------------------- choosing

    def choose(self, sequences: Seq[Sequence], limits: Seq[int], budget: int, prompt_rows: int) -> list[int]:
        """AUTO gets what pays, FIXED what it asked for; now and then a step without drafts, or a probe."""
        self.probing.next_step(sequences)
        if self._is_quiet(sequences):
            for proposer in self._proposers.values():
                proposer.skipped += 1
            return [0] * len(sequences)
        free = [
            limit and s.speculation.mode is SpeculationMode.AUTO for s, limit in zip(sequences, limits, strict=True)
        ]
        chosen = within([0 if f else limit for f, limit in zip(free, limits, strict=True)], budget)
        if not any(free) or not self.target.count or self._is_plain_due():
            return chosen
        load = Load.of([len(s.tokens) for s in sequences], chosen, prompt_rows)
        budget -= sum(chosen)
        self.probing.wanted = math.inf
        for name in sorted({s.speculation.proposer for s, f in zip(sequences, free, strict=True) if f}):
            mine = [i for i, s in enumerate(sequences) if free[i] and s.speculation.proposer == name]
            proposer = self._proposers.setdefault(name, _Proposer())
            group = _Group(name, proposer, [sequences[i] for i in mine], [limits[i] for i in mine])
            found = self._choose_for(group, load, budget)
            if found is not None:
                load, budget = found.load, budget - int(found.num_draft.sum())
                for i, k in zip(mine, found.num_draft.tolist(), strict=True):
                    chosen[i] = k
        if all(free) and not any(chosen) and not any(p.is_on for p in self._proposers.values()):
            self._quiet = len(sequences), sequences[-1], self._num_steps + self.probing.rest(*_LOOK_AGAIN)
        return chosen

    def _is_quiet(self, sequences: Seq[Sequence]) -> bool:
        """The same sequences were found not worth drafting for, and no probe is due: asking again would cost time."""
        count, newest, until = self._quiet
        same = bool(sequences) and (len(sequences), sequences[-1]) == (count, newest)
        return same and not self.probing.tries and self._num_steps < until

    def _is_plain_due(self) -> bool:
        """A plain step loses what drafting would have gained: near break-even, where it matters, hardly anything."""
        least, most = PLAIN_EVERY
        loss = 1 - 1 / max(1.0, self.gain.ratio)
        return self._since_plain >= min(max(loss / PLAIN_SHARE, least), most)

    def _choose_for(self, group: _Group, load: Load, budget: int) -> Choice | None:
        proposer, count = group.proposer, len(group.sequences)
        trials = self.acceptance.trials(group.name)
        offer = self._offer(group, trials / (trials + _TRIALS))
        if trials < _TRIALS:  # a stranger: let it show what it can with a few
            offer = offer.cheapest(1 + count // 8, MAX_NUM_DRAFT)
        known = min(budget, max(_STEP, int(_STRIDE * self.target.most_rows - load.rows)))
        modesty = _MODESTY if proposer.is_on and self._num_steps % _TRY_MORE_EVERY == 0 else 1.0
        best = offer.best(load, self.target, known, modesty=modesty)
        if load.prompt_rows:  # a step out of the ordinary decides for itself alone
            return best if proposer.is_on else None
        if proposer.decide(best.gain, _margin(self._plain_steps_like(load.sequences))):
            return best
        return self._probe(group, load, budget)

    def _plain_steps_like(self, sequences: int) -> int:
        """How many were measured with about as many sequences."""
        size = sequences.bit_length()
        return max(self._num_plain.get(size + i, 0) for i in (-1, 0, 1))

    def _offer(self, group: _Group, trust: float) -> Offer:
        """What could be drafted. What is invested in catching up comes back in later rounds: in `trust` of them."""
        sequences = group.sequences
        rows, tokens = self.acceptance.chances(sequences, group.name, max(group.limits))
        contexts = np.array([len(s.tokens) for s in sequences], float)
        rooms = np.array([min(s.max_len - len(s.tokens), _HORIZON) for s in sequences], float)
        unseen = np.zeros(len(sequences))
        if group.name in self._draft_kv_users:
            unseen = np.array([max(0, len(s.tokens) - 2 - s.draft.kv_len) for s in sequences], float)
        prices, rounds = group.proposer.prices, np.maximum(rooms / 2 * trust, 1)
        seconds = drafting_seconds(prices, tokens, contexts, unseen, rounds, group.proposer.share)
        return Offer(np.array(group.limits), rows, tokens, seconds, prices.a_call, contexts)

    def _probe(self, group: _Group, load: Load, budget: int) -> Choice | None:
        """A few drafts for a few sequences, if they could pay at all and the time set aside for this allows it."""
        probing = self.probing
        allowance, worth = probing.allowance, self._worth_asking(group)
        if probing.tries and probing.tried in group.sequences:
            if worth[group.sequences.index(probing.tried)]:
                allowance, worth = math.inf, [s is probing.tried for s in group.sequences]
            else:
                probing.tries = 0
        if not any(worth):
            return None
        if allowance <= 0:
            probing.wanted = 0.0
            return None
        if self._offer(group, 1.0).hoping(_HOPE).best(load, self.target, budget).gain < 1 + _MARGIN:
            return None
        group = group.only(worth)
        offer = self._offer(group, 0.0)
        # A few tell how well drafts do; all of them, now and then, what so many rows cost.
        most = sum(worth) if probing.count % _PROBE_ALL_EVERY == 0 else 1 + sum(worth) // 4
        for count in sorted({most, 1}, reverse=True):
            probe = offer.cheapest(count, _PROBE_DEPTH).all_of(load, self.target, budget)
            tried = group.sequences[int(probe.num_draft.argmax())]
            price = probe.extra_seconds * (1 if _is_young(tried) else _LATE)
            if price <= allowance:
                probing.begin(tried)
                return probe
            probing.wanted = min(probing.wanted, price)
        return None

    def _worth_asking(self, group: _Group) -> list[bool]:
        """Of whose drafts little is known, or something good."""
        doubts = self.acceptance.doubts(group.sequences, group.name, _WORTH)
        return [bool(limit and not doubt) for limit, doubt in zip(group.limits, doubts, strict=True)]

    # ---------------------------------------------------------------------------------------------------- learning

    def learn(self, done: Round) -> None:
        """Prices, chances and gain, from one step."""
        asked = sorted({s.speculation.proposer for s, k in zip(done.sequences, done.asked, strict=True) if k})
        if asked:
            self._learn_chances(done)
        else:
            self.acceptance.wait({s.speculation.proposer for s in done.sequences})
        if len(asked) == 1:
            self._learn_drafting(self._proposers.setdefault(asked[0], _Proposer()), done)
        if done.has_prompts or not done.sequences:
            return
        self._num_steps += 1
        if asked or self.target.count < _PLENTY or self._num_steps % _PLAIN_SAMPLE == 0:
            self.target.learn(done.load.quantities, done.other_seconds)
        if not asked:
            size = len(done.sequences).bit_length()
            self._num_plain[size] = self._num_plain.get(size, 0) + 1
        self._account(done, is_plain=not asked)

    def _account(self, done: Round, *, is_plain: bool) -> None:
        plain = done.seconds
        if not is_plain:
            plain = self.target.of(Load.of(done.lengths, [0] * len(done.lengths)).quantities)
        self._since_plain = 0 if is_plain else self._since_plain + 1
        gained = plain * sum(done.accepted) / len(done.sequences)
        has_read = any(tokens > 2 * sequences for sequences, tokens in done.draft_passes)
        self.probing.account(plain, done.seconds, gained, was_hit=any(done.accepted), has_read=has_read)
        self.gain.add(done.sequences, [accepted + 1 for accepted in done.accepted], done.seconds, plain)

    def _learn_drafting(self, proposer: _Proposer, done: Round) -> None:
        num_asked = sum(k > 0 for k in done.asked)
        lengths = [length for length, k in zip(done.lengths, done.asked, strict=True) if k]
        mean = sum(lengths) / num_asked
        passes = done.draft_passes
        in_passes, tokens = sum(n for n, _ in passes), [tokens for _, tokens in passes]
        needed = min(1.0, passes[0][0] / num_asked) if passes else 0.0
        proposer.share += (needed - proposer.share) * (1.0 if not proposer.prices.count else 0.05)
        work = quantities(
            calls=1,
            asked=num_asked,
            passes=len(passes),
            sequences=in_passes,
            context=in_passes * mean,
        )
        proposer.prices.learn(with_rows(work, tokens), done.draft_seconds)

    def _learn_chances(self, done: Round) -> None:
        by_proposer: dict[str, list[int]] = {}
        for i, sequence in enumerate(done.sequences):
            if sequence.speculation.num_draft_tokens:
                by_proposer.setdefault(sequence.speculation.proposer, []).append(i)
        asked, drafted, accepted = (np.array(x, np.int64) for x in (done.asked, done.drafted, done.accepted))
        if done.draft_passes:
            asked = np.where(drafted > 0, asked, self._without_catching_up(done, asked))
        for name, mine in by_proposer.items():
            sequences = [done.sequences[i] for i in mine]
            self.acceptance.learn(sequences, name, asked[mine], drafted[mine], accepted[mine])

    def _without_catching_up(self, done: Round, asked: Ints) -> Ints:
        """Whose draft model had too much to read to get to a draft was not refused one: as if it had not been asked."""
        users = [sequence.speculation.proposer in self._draft_kv_users for sequence in done.sequences]
        return np.where(users, 0, asked)

    def begin(self) -> None:
        """What was learned so far was practice: its costs are true, its drafts and its gain are not."""
        self.gain, self.acceptance = Gain(), Acceptance()
        self.probing = Probing()
        for proposer in self._proposers.values():
            proposer.is_on, proposer.expected_gain = True, 1.0 + _MARGIN

    def forget(self, sequence: Sequence) -> None:
        """The sequence is over."""
        self.acceptance.forget(sequence)
        self.gain.forget(sequence)
