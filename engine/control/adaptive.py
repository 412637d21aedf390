"""How many drafts each sequence gets in each step, and of which proposer, from measured costs and observed acceptance.

One cost model, one posterior of acceptance per sequence and source, one rule: the most expected tokens per expected
second. It chooses the proposer of a sequence of `auto`, then the numbers of drafts (`goodput.py`).
Where an optimistic estimate of acceptance says that another choice would be better, a budget of time pays for finding
out. Knows no model and no clock: seconds are passed in. No choice changes a token.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np

from engine.control import goodput
from engine.control.acceptance import Acceptance, Ints, Source
from engine.control.controller import Control, Speedup, within
from engine.control.cost_model import ATTENDED, CALL, Floats
from engine.control.goodput import Bids, Choice, Found, Offer, Traits
from engine.control.step_time import BatchLoad, StepFeedback, StepTime
from engine.params import SpeculationMode
from engine.types import Sequence

SHARE = 0.015  # of the time of plain steps may be lost to exploration

_MARGIN = 0.03  # least expected speed-up beyond 1: costs are measured on noisy steps
_SAVED, _DEBT = 4.0, 4.0  # bounds of the budget, in plain steps: most that is saved, most debt that is paid back
_HOPE = 0.8  # quantile of a sequence's acceptance rate at which drafts must pay, or they are not explored
_REST = 8  # steps without drafts before the choice is computed again
_PLAIN_SHARE = 0.02  # most of the speed-up that plain steps for comparison may cost
_PLAIN_EVERY = 4, 128  # least and most steps between them
_HORIZON = 128  # most further tokens that an output is expected to have


@dataclass(slots=True)
class _Budget:
    """Seconds that exploration may lose. The budget grows with time; every step with drafts is charged its loss."""

    seconds: float = 0.0
    wanted: float = 0.0  # cost of the cheapest exploration that could not be afforded

    def charge(self, loss: float, plain: float) -> None:
        """Charge a step of AUTO its loss against plain steps. A step that gained pays debts but saves nothing."""
        after = self.seconds - loss
        after = after if loss > 0 else max(self.seconds, min(0.0, after))
        self.seconds = min(max(after, -_DEBT * plain) + SHARE * plain, max(_SAVED * plain, self.wanted))


class AdaptiveK(Control):
    """AUTO: as many drafts as pay, down to none; and of the proposer that pays best where several may draft."""

    def __init__(self, traits: Mapping[str, Traits] = MappingProxyType({})) -> None:
        super().__init__(StepTime({name for name, trait in traits.items() if trait.find is not None}))
        self.acceptance = Acceptance()
        self._traits = defaultdict(Traits, traits)  # by proposer
        # What was picked in the last few steps, by what had been found in the text of a sequence then.
        self._picked: dict[tuple[Sequence, Hashable], str] = {}
        # Drafts that were found in the text, by sequence and proposer, and the length of the sequence then.
        self._found: dict[tuple[Sequence, str], tuple[int, Found]] = {}
        self._budget = _Budget()
        self._num_steps = self._since_plain = self._rows = 0  # rows: budget of the latest step
        self._expected = 1.5  # speed-up expected of the latest step with drafts
        # Number of sequences, the newest of them, and until which step.
        self._resting: tuple[int, Sequence | None, int] = (0, None, 0)

    # ---------------------------------------------------------------------------------------------------- choosing

    def choose(self, sequences: Seq[Sequence], limits: Seq[int], budget: int, prompt_rows: int) -> list[int]:
        """AUTO gets what pays, FIXED its own K; now and then a plain step for comparison, or an exploration."""
        self.is_exploring, self._rows = False, budget
        if budget <= 0 or self._is_resting(sequences):
            return [0] * len(sequences)
        free = [
            limit and s.speculation.mode is SpeculationMode.AUTO for s, limit in zip(sequences, limits, strict=True)
        ]
        chosen = within([0 if f else limit for f, limit in zip(free, limits, strict=True)], budget)
        is_plain = self._is_plain_due()
        if is_plain and not prompt_rows:
            self._since_plain = 0  # here already: of a round on the device nothing is learned before the next choice
        mine = [i for i, limit in enumerate(limits) if limit and not (free[i] and is_plain)]
        self._look_up([sequences[i] for i in mine], [limits[i] for i in mine])
        if not mine or not self.times.target.count:
            return chosen
        load = BatchLoad.of([len(s.tokens) for s in sequences], chosen, prompt_rows)
        several = [i for i in mine if len(sequences[i].candidates) > 1 and not _is_settled(sequences[i])]
        if several:
            self._pick([sequences[i] for i in several], [limits[i] for i in several], load)
        budget -= sum(chosen)
        for name in sorted({sequences[i].drafter for i in mine if free[i]}):
            members = [i for i in mine if free[i] and sequences[i].drafter == name]
            most = [self._most(sequences[i], name, limits[i]) for i in members]
            found = self._choose_for(name, [sequences[i] for i in members], np.array(most), load, budget)
            if found is not None:
                load, budget = found.load, budget - int(found.num_draft.sum())
                for i, k in zip(members, found.num_draft.tolist(), strict=True):
                    chosen[i] = k
        may_return = any(s.most_predicted for s in sequences)  # to its prediction, in any step
        is_over = self._found or not any(trait.find for trait in self._traits.values())
        if not is_plain and all(free) and not any(chosen) and is_over and not may_return:
            self._resting = len(sequences), sequences[-1], self._num_steps + _REST
        return chosen

    def _is_resting(self, sequences: Seq[Sequence]) -> bool:
        """Whether drafts were found not to pay for the same sequences a few steps ago: the choice itself takes time."""
        count, newest, until = self._resting
        return self._num_steps < until and bool(sequences) and (len(sequences), sequences[-1]) == (count, newest)

    def _is_plain_due(self) -> bool:
        """Whether a plain step for comparison is due. It loses the speed-up of drafting: hardly any near break-even."""
        least, most = _PLAIN_EVERY
        loss = 1 - 1 / max(1.0, self._expected)
        return self._since_plain >= min(max(loss / _PLAIN_SHARE, least), most)

    def _look_up(self, sequences: Seq[Sequence], limits: Seq[int]) -> None:
        """Note the drafts that are found in texts, of proposers that may be asked for them."""
        self._found.clear()
        for sequence, limit in zip(sequences, limits, strict=True):
            for name in (sequence.drafter,) if _is_settled(sequence) else sequence.drafters:
                find = self._traits[name].find
                found = find(sequence, limit) if find is not None else None
                if found is not None and found.tokens:
                    self._found[sequence, name] = len(sequence.tokens), found

    def _most(self, sequence: Sequence, name: str, limit: int) -> int:
        """Most drafts of a proposer: as many as it can make, and of one that looks them up as many as it has found."""
        traits = self._traits[name]
        if traits.find is None:
            return limit if traits.most is None else min(limit, traits.most)
        _, found = self._found.get((sequence, name), (0, Found()))
        return min(limit, len(found.tokens))

    def _source(self, sequence: Sequence, name: str) -> Source:
        _, found = self._found.get((sequence, name), (0, Found()))
        return Source(name, found.match.bit_length())

    def _pick(self, sequences: list[Sequence], limits: list[int], load: BatchLoad) -> None:
        """Let each sequence of `auto` draft with what is worth most.

        Working it out takes time, and what it hangs on changes slowly but for what is found: a pick holds for the same
        findings until the next of every few steps.
        """
        if self._num_steps % _REST == 0:
            self._picked.clear()
        keys = list[tuple[Sequence, Hashable]]()
        for sequence, limit in zip(sequences, limits, strict=True):
            finds = [name for name in sequence.candidates if self._traits[name].find is not None]
            found = tuple((self._most(sequence, name, limit), self._source(sequence, name)) for name in finds)
            keys.append((sequence, (sequence.candidates, limit, found)))
        if all(key in self._picked for key in keys):
            for sequence, key in zip(sequences, keys, strict=True):
                sequence.choice = self._picked[key]
            return
        names = list(dict.fromkeys(name for s in sequences for name in s.candidates))
        bids = self._bids(names, sequences, limits, load)
        makers, seconds = (
            [(self.times.drafting[n], self._traits[n]) for n in names],
            max(self.times.target.of(load.quantities), 1e-9),
        )
        best = goodput.pick(bids, makers, load.context / load.sequences, load.tokens, seconds)
        for sequence, key, i in zip(sequences, keys, best.tolist(), strict=True):
            # Where nothing pays, what comes nearest to it may be explored.
            sequence.choice = self._picked[key] = names[i]

    def _bids(self, names: list[str], sequences: list[Sequence], limits: list[int], load: BatchLoad) -> Bids:
        """What each candidate offers each sequence."""
        both = list(zip(sequences, limits, strict=True))
        most = np.array([[self._most(s, name, k) if name in s.candidates else 0 for s, k in both] for name in names])
        count, depth = len(sequences), max(1, int(most.max()))
        kept = self.acceptance.kept([(s, self._source(s, name)) for name in names for s in sequences], depth)
        per_row, contexts = self.times.target.price(ATTENDED), np.array([len(s.tokens) for s in sequences], float)
        rows = goodput.more_rows(self.times.target, load.rows / count, count, depth) + per_row * contexts[:, None]
        first = np.zeros(most.shape)
        for c, name in enumerate(names):
            unseen = np.array([self._unseen(name, s) for s in sequences], float)
            if unseen.any():
                first[c] = goodput.catching_up(self.times.drafting[name], unseen) / self._rounds(sequences, unseen)
        is_fixed = np.array([s.speculation.mode is not SpeculationMode.AUTO for s in sequences])
        return Bids(kept.reshape(len(names), count, depth), most, first, rows, is_fixed)

    def _choose_for(
        self, name: str, sequences: list[Sequence], limits: Ints, load: BatchLoad, budget: int
    ) -> Choice | None:
        if not limits.any():
            return None
        best = self._offer(name, sequences, limits).best(load, self.times.target, budget)
        if best.gain > 1 + _MARGIN:
            self._expected = best.gain
            return best
        return None if load.prompt_rows else self._explore(name, sequences, limits, load, budget)

    def _explore(
        self, name: str, sequences: list[Sequence], limits: Ints, load: BatchLoad, budget: int
    ) -> Choice | None:
        """One draft each for as many sequences as the budget affords, if an optimistic estimate says it pays."""
        if self._budget.seconds <= 0 or self._traits[name].find is not None:
            return None
        hopeful = self._offer(name, sequences, limits, hope=_HOPE).best(load, self.times.target, budget)
        these = hopeful.num_draft > 0
        if hopeful.gain <= 1 + _MARGIN:
            return None
        offer, count = self._offer(name, sequences, limits, spread=False), int(these.sum())
        self._budget.wanted = 0.0
        while count:
            choice = offer.shallow(these, count).best(load, self.times.target, budget, all_of=True)
            if choice.loss <= self._budget.seconds:
                self.is_exploring = True
                return choice
            self._budget.wanted = choice.loss
            count //= 2
        return None

    def _offer(
        self, name: str, sequences: list[Sequence], limits: Ints, hope: float | None = None, *, spread: bool = True
    ) -> Offer:
        """The drafts on offer. With `spread`, the cost of catching up is shared by the rounds still to come."""
        costs = self.times.drafting[name]
        pairs = [(s, self._source(s, name)) for s in sequences]
        kept = self.acceptance.kept(pairs, int(limits.max()), hope=hope)
        contexts = np.array([len(s.tokens) for s in sequences], float)
        unseen = np.array([self._unseen(name, s) for s in sequences], float)
        rounds = self._rounds(sequences, unseen) if spread else np.ones(len(sequences))
        seconds = goodput.drafting_seconds(costs, kept, contexts, unseen, rounds, self._traits[name])
        return Offer(limits, kept, seconds, costs.price(CALL), contexts)

    def _rounds(self, sequences: Seq[Sequence], unseen: Floats) -> Floats:
        """Rounds that each sequence is expected to have yet, once `unseen` tokens of it have been read."""
        rooms = np.array([min(s.max_len - len(s.tokens), _HORIZON) for s in sequences], float)
        # Tokens that are decoded while the draft model catches up for all of them with half of each step's budget.
        rounds: Floats = np.maximum((rooms - 2 * unseen.sum() / max(self._rows, 1)) / 2, 1)
        return rounds

    def _unseen(self, name: str, sequence: Sequence) -> int:
        """Tokens that the draft model has to be fed before it can draft, apart from the two that each round feeds."""
        num_unseen = self._traits[name].num_unseen
        return 0 if num_unseen is None else num_unseen(sequence)

    # ---------------------------------------------------------------------------------------------------- learning

    def learn(self, done: StepFeedback) -> None:
        """Update costs, acceptance, speed-up and budget from one step."""
        asked = {s.drafter for s, k in zip(done.sequences, done.asked, strict=True) if k}
        self._learn_acceptance(done)
        self.times.learn(done)
        if done.chunks or not done.sequences:
            return
        self._num_steps += 1
        plain = self.times.plain(done.lengths) if asked else done.seconds
        self._since_plain = self._since_plain + 1 if asked else 0
        self.gain.add(done.sequences, [accepted + 1 for accepted in done.accepted], done.seconds, plain)
        tokens = 1 + sum(done.accepted) / len(done.sequences)
        self._budget.charge(done.seconds - plain * tokens if asked else 0.0, plain)

    def _learn_acceptance(self, done: StepFeedback) -> None:
        """From the drafts that were verified, and from those that were found and not used: the tokens show which hit.

        Found drafts are compared with what came in their place, so they are judged without being fed.
        """
        pairs, drafted, accepted = [], [], []
        for sequence, num_drafted, num_accepted in zip(done.sequences, done.drafted, done.accepted, strict=True):
            if num_drafted:
                pairs.append((sequence, self._source(sequence, sequence.drafter)))
                drafted.append(num_drafted)
                accepted.append(num_accepted)
                self._found.pop((sequence, sequence.drafter), None)
        for (sequence, name), (length, found) in self._found.items():
            came = sequence.tokens[length : length + len(found.tokens)]
            if came:
                pairs.append((sequence, Source(name, found.match.bit_length())))
                drafted.append(len(came))
                hits = (i for i, (a, b) in enumerate(zip(found.tokens, came, strict=False)) if a != b)
                accepted.append(next(hits, len(came)))
        self._found.clear()
        self.acceptance.learn(pairs, np.array(drafted), np.array(accepted))

    @contextmanager
    def practising(self) -> Iterator[None]:
        kept = self.gain, self._budget, self._since_plain, self._expected
        self.gain, self._budget = Speedup(), _Budget()
        try:
            yield
        finally:
            self.gain, self._budget, self._since_plain, self._expected = kept

    def forget(self, sequence: Sequence) -> None:
        self.acceptance.forget(sequence)
        self.gain.forget(sequence)
        self._picked = {key: name for key, name in self._picked.items() if key[0] is not sequence}

    # ------------------------------------------------------------------------------------- from one start to the next

    def state(self) -> dict[str, Any]:
        return self.times.state() | {"acceptance": self.acceptance.state()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Start with a `state`. Raises ValueError, KeyError or TypeError for anything else; half may be restored."""
        self.times.restore(state)
        self.acceptance.restore(state["acceptance"])


def _is_settled(sequence: Sequence) -> bool:
    """Whether there is nothing to choose: it follows its prediction, or decodes where one proposer alone drafts."""
    return sequence.is_predicted or sequence.on_device
