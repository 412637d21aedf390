"""How many drafts each sequence gets in each step, and from which proposer, by measured costs and observed acceptance.

One cost model, one posterior of acceptance per sequence and source, one rule: maximise expected tokens per expected
second. It chooses the proposer of a sequence of `auto`, then the numbers of drafts (`goodput.py`).
Where drafts are expected not to pay, a budget of time pays for exploration: a draft that shows whether they would.
Uses no model and no clock: seconds are passed in. No choice changes a token.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np

from pilotfish.engine.control import goodput
from pilotfish.engine.control.acceptance import Acceptance, Ints, Source
from pilotfish.engine.control.constants import COMPARING, EXPLORING, HOPE, KEEP, MARGIN, REST
from pilotfish.engine.control.controller import Control, Speedup, within
from pilotfish.engine.control.cost_model import ATTENDED, CALL, Floats
from pilotfish.engine.control.goodput import Choice, Found, Offer, Traits
from pilotfish.engine.control.step_time import BatchLoad, StepFeedback, StepTime
from pilotfish.engine.params import SpeculationMode
from pilotfish.engine.types import Sequence


@dataclass(slots=True)
class _Budget:
    """Seconds that exploration may lose. It grows with time; every step with drafts is charged what it lost."""

    seconds: float = 0.0
    wanted: float = 0.0  # cost of the cheapest exploration that could not be afforded

    def charge(self, loss: float, plain: float) -> None:
        """Charge a step of AUTO its loss against plain steps. A step that gained pays off debt but saves nothing."""
        after = self.seconds - loss
        after = after if loss > 0 else max(self.seconds, min(0.0, after))
        self.seconds = min(max(after, -plain) + EXPLORING * plain, max(plain, self.wanted))


class AdaptiveK(Control):
    """AUTO: as many drafts as pay, down to none; and from the proposer that pays best where several may draft."""

    def __init__(self, traits: Mapping[str, Traits] = MappingProxyType({})) -> None:
        super().__init__(StepTime({name for name, trait in traits.items() if trait.find is not None}))
        self.acceptance = Acceptance()
        self._traits = defaultdict(Traits, traits)  # by proposer
        # The proposers that were chosen in the last few steps, by sequence and by what its lookups had found.
        self._picked: dict[tuple[Sequence, Hashable], str] = {}
        # By sequence and lookup: the length of the sequence, and the drafts that were found in this step.
        self._found: dict[tuple[Sequence, str], tuple[int, Found]] = {}
        self._budget = _Budget()
        self._explored: set[Sequence] = set()  # sequences that a draft model has begun to read for a trial
        self._num_steps = self._since_plain = self._rows = 0  # rows: budget of the latest step
        self._ended = 0.0, 0.0  # tokens of the outputs that have ended, and their number; earlier ones count less
        self._loss = 1.0  # share of the speed of the latest step with drafts that a plain step would lose
        # A batch for which drafts do not pay: number of sequences, the newest one, and the step until which it rests.
        self._resting: tuple[int, Sequence | None, int] = (0, None, 0)

    # ---------------------------------------------------------------------------------------------------- choosing

    def choose(self, sequences: Seq[Sequence], limits: Seq[int], budget: int, prompt_rows: int) -> list[int]:
        """AUTO gets what pays, FIXED its own K; some steps are plain, for comparison, or explore."""
        self.is_exploring, self._rows = False, budget
        if budget <= 0 or self._is_resting(sequences):
            return [0] * len(sequences)
        free = [
            limit and s.speculation.mode is SpeculationMode.AUTO for s, limit in zip(sequences, limits, strict=True)
        ]
        chosen = within([0 if f else limit for f, limit in zip(free, limits, strict=True)], budget)
        # Near break-even, where the comparison matters, a plain step loses little, and they come often.
        is_plain = self._since_plain * COMPARING >= self._loss
        if is_plain and not prompt_rows:
            self._since_plain = 0  # now: a round on the device is learned from only after the next choice
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
        may_return = any(s.most_predicted for s in sequences)  # to its prediction, whose drafts are free
        is_over = self._found or not any(trait.find for trait in self._traits.values())
        if not is_plain and all(free) and not any(chosen) and is_over and not may_return:
            self._resting = len(sequences), sequences[-1], self._num_steps + REST
        return chosen

    def _is_resting(self, sequences: Seq[Sequence]) -> bool:
        """Whether drafts did not pay for the same sequences a few steps ago: choosing takes time too."""
        count, newest, until = self._resting
        return self._num_steps < until and bool(sequences) and (len(sequences), sequences[-1]) == (count, newest)

    def _look_up(self, sequences: Seq[Sequence], limits: Seq[int]) -> None:
        """Look up drafts for these sequences, with each lookup that may draft for them."""
        self._found.clear()
        for sequence, limit in zip(sequences, limits, strict=True):
            for name in (sequence.drafter,) if _is_settled(sequence) else sequence.drafters:
                find = self._traits[name].find
                found = find(sequence, limit) if find is not None else None
                if found is not None and found.tokens:
                    self._found[sequence, name] = len(sequence.tokens), found

    def _most(self, sequence: Sequence, name: str, limit: int) -> int:
        """Maximum number of drafts of a proposer: what it can make, or of a lookup what it has found."""
        traits = self._traits[name]
        if traits.find is None:
            return limit if traits.most is None else min(limit, traits.most)
        _, found = self._found.get((sequence, name), (0, Found()))
        return min(limit, len(found.tokens))

    def _source(self, sequence: Sequence, name: str) -> Source:
        _, found = self._found.get((sequence, name), (0, Found()))
        return Source(name, found.match.bit_length())

    def _pick(self, sequences: list[Sequence], limits: list[int], load: BatchLoad) -> None:
        """Choose the proposer of each sequence of `auto`.

        Choosing takes time, and apart from what lookups find, its inputs change slowly. So a choice is used again for
        a few steps where the same was found.
        """
        if self._num_steps % REST == 0:
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
        best = self._best_of(names, sequences, limits, load).tolist()
        for sequence, key, i in zip(sequences, keys, best, strict=True):
            # Where nothing pays, the proposer that comes nearest to it may explore.
            sequence.choice = self._picked[key] = names[i]

    def _best_of(self, names: list[str], sequences: list[Sequence], limits: list[int], load: BatchLoad) -> Ints:
        """The candidate that is worth most to each sequence."""
        both, count, target = list(zip(sequences, limits, strict=True)), len(sequences), self.times.target
        most = np.array([[self._most(s, name, k) if name in s.candidates else 0 for s, k in both] for name in names])
        depth = max(1, int(most.max()))
        kept = self._kept(names, sequences, depth)
        offers = [self._offer(name, sequences, most[i], kept[i], is_even=True) for i, name in enumerate(names)]
        seconds = np.stack([offer.seconds for offer in offers])
        seconds[..., 0] += np.array([[offer.a_call / count] for offer in offers])
        seconds += goodput.more_rows(target, load.rows / count, count, depth)
        seconds += target.price(ATTENDED) * offers[0].contexts[:, None]
        is_fixed = np.array([s.speculation.mode is not SpeculationMode.AUTO for s in sequences])
        is_found, plain = [self._traits[n].find is not None for n in names], max(target.of(load.quantities), 1e-9)
        return goodput.pick(kept.cumsum(2), seconds.cumsum(2), most, is_fixed, is_found, load.tokens, plain)

    def _kept(self, names: Seq[str], sequences: Seq[Sequence], depth: int, hope: float | None = None) -> Floats:
        """The probability that each draft is accepted, `[names, sequences, depth]`."""
        pairs = [(s, self._source(s, name)) for name in names for s in sequences]
        return self.acceptance.kept(pairs, depth, hope).reshape(len(names), len(sequences), depth)

    def _choose_for(
        self, name: str, sequences: list[Sequence], limits: Ints, load: BatchLoad, budget: int
    ) -> Choice | None:
        if not limits.any():
            return None
        (kept,) = self._kept([name], sequences, int(limits.max()))
        best = self._offer(name, sequences, limits, kept).best(load, self.times.target, budget)
        if best.gain > 1 + MARGIN:
            self._loss = 1 - 1 / best.gain
            return best
        return None if load.prompt_rows else self._explore(name, sequences, limits, kept, load, budget)

    def _explore(
        self, name: str, sequences: list[Sequence], limits: Ints, kept: Floats, load: BatchLoad, budget: int
    ) -> Choice | None:
        """One draft each for as many sequences as the budget affords, if drafts pay by an optimistic estimate."""
        going_on = np.array([s in self._explored for s in sequences]) & (limits > 0)
        if going_on.any():
            self.is_exploring = True
            offer = self._offer(name, sequences, limits, kept, spread=False)
            self._explored -= {s for s, unseen in zip(sequences, offer.unseen, strict=True) if not unseen}
            return offer.shallow(going_on, len(sequences)).best(load, self.times.target, budget, all_of=True)
        if self._budget.seconds <= 0 or self._traits[name].find is not None:
            return None
        (hoped,) = self._kept([name], sequences, kept.shape[1], HOPE)
        hopeful = self._offer(name, sequences, limits, hoped).best(load, self.times.target, budget)
        these = hopeful.num_draft > 0
        if hopeful.gain <= 1 + MARGIN:
            return None
        offer, count = self._offer(name, sequences, limits, kept, spread=False), int(these.sum())
        self._budget.wanted = 0.0
        while count:
            choice = offer.shallow(these, count).best(load, self.times.target, budget, all_of=True)
            if choice.loss <= self._budget.seconds:
                self.is_exploring = True
                self._explored |= {s for s, k in zip(sequences, choice.num_draft, strict=True) if k}
                return choice
            self._budget.wanted = choice.loss
            count //= 2
        return None

    def _offer(
        self, name: str, sequences: list[Sequence], limits: Ints, kept: Floats, *, spread: bool = True,
        is_even: bool = False,
    ) -> Offer:  # fmt: skip
        """The drafts that a proposer could make. With `spread`, the rounds to come share the cost of reading."""
        costs, traits = self.times.drafting[name], self._traits[name]
        contexts = np.array([len(s.tokens) for s in sequences], float)
        unseen = np.array([traits.num_unseen(s) if traits.num_unseen else 0 for s in sequences], float)
        rounds = self._rounds(sequences, unseen, kept[:, 0]) if spread else np.ones(len(sequences))
        seconds = goodput.drafting_seconds(costs, kept, contexts, unseen, rounds, traits, is_even=is_even)
        return Offer(limits, kept, seconds, costs.price(CALL), contexts, unseen)

    def _rounds(self, sequences: Seq[Sequence], unseen: Floats, kept: Floats) -> Floats:
        """Rounds with one draft that each sequence is expected to have yet, once `unseen` tokens have been read.

        An output is expected to go on for as long as earlier ones were on average, but not beyond its limit.
        """
        tokens, count = self._ended
        mean = tokens / count if count else math.inf
        rooms = np.array([min(s.max_len - len(s.tokens), mean) for s in sequences], float)
        # Tokens that are decoded while the draft model reads for all of them, with half of each step's budget.
        rounds: Floats = np.maximum((rooms - 2 * unseen.sum() / max(self._rows, 1)) / (1 + kept), 1)
        return rounds

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
        """Learn from drafts that were verified, and from drafts that lookups found and the step did not use.

        The latter are compared with the tokens that were generated in their place.
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
        kept = self.gain, self._budget, self._since_plain, self._loss, self._ended
        self.gain, self._budget = Speedup(), _Budget()
        try:
            yield
        finally:
            self.gain, self._budget, self._since_plain, self._loss, self._ended = kept

    def end(self, sequence: Sequence) -> None:
        if sequence.num_generated:
            tokens, count = self._ended
            self._ended = KEEP * tokens + sequence.num_generated, KEEP * count + 1
        super().end(sequence)

    def forget(self, sequence: Sequence) -> None:
        self.acceptance.forget(sequence)
        self.gain.forget(sequence)
        self._explored.discard(sequence)
        self._picked = {key: name for key, name in self._picked.items() if key[0] is not sequence}

    # ------------------------------------------------------------------------------------- from one start to the next

    def state(self) -> dict[str, Any]:
        return self.times.state() | {"acceptance": self.acceptance.state()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Start with a `state`. Raises ValueError, KeyError or TypeError for anything else; half may be restored."""
        self.times.restore(state)
        self.acceptance.restore(state["acceptance"])


def _is_settled(sequence: Sequence) -> bool:
    """Whether its proposer is settled: its prediction, or the only one that drafts on the device."""
    return sequence.is_predicted or sequence.on_device
