"""How many drafts each sequence gets, step by step, from what steps were measured to cost and to bring.

One cost model, one posterior of acceptance for each sequence, one rule: the most expected tokens per expected second.
Where that is no drafts at all, a budget of time pays for single drafts, if a hopeful view of their sequences says that
they could pay. Knows no model and no clock: seconds are told to it. Whatever it chooses, the tokens are the same.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from engine.control.acceptance import Acceptance, Bools, Ints, Source
from engine.control.controller import StepFeedback, within
from engine.control.cost_model import CostModel, quantities, with_rows
from engine.control.goodput import BatchLoad, Choice, Offer, drafting_seconds
from engine.control.speedup import Speedup
from engine.params import SpeculationMode
from engine.types import Sequence

Find = Callable[[Sequence, int], tuple[int, ...] | None]

SHARE = 0.015  # of the time of plain steps, which may be lost to drafts of which no gain is expected

_MARGIN = 0.03  # what a gain must exceed, since costs are known from noisy steps
_SAVED, _DEBT = 4.0, 4.0  # plain steps' worth of the budget that is saved up; and that is paid back
_HOPE = 0.8  # quantile of a sequence's rates at which drafts would have to pay, or they are not tried
_HOLD = 4  # steps for which a trial goes on, whatever it costs: what the draft model had to read first is used
_REST = 8  # steps without drafts after which it is asked again whether they would pay
_PLAIN_SHARE, _PLAIN_EVERY = 0.02, (4, 128)  # of what drafting gains, for plain steps to compare with; in steps
_HORIZON = 128  # tokens for which an output is expected to go on at most


@dataclass(slots=True)
class _Budget:
    """Seconds that trials may lose. It grows with time, and the loss of every step with drafts is charged to it."""

    seconds: float = 0.0
    wanted: float = 0.0  # what the cheapest trial would take that there was not enough for
    held: dict[Sequence, int] = field(default_factory=dict)  # for how many steps more each is tried

    def charge(self, loss: float, plain: float) -> None:
        """A step of AUTO and what it lost against plain steps. A gain pays debts and saves up nothing."""
        after = self.seconds - loss
        after = after if loss > 0 else max(self.seconds, min(0.0, after))
        self.seconds = min(max(after, -_DEBT * plain) + SHARE * plain, max(_SAVED * plain, self.wanted))


class _Group(NamedTuple):
    """The sequences of one step that one proposer may draft for."""

    name: str
    sequences: Seq[Sequence]
    limits: Ints
    is_found: Bools  # their drafts were found in the text; the limit is how many


class AdaptiveK:
    """As many as pay, down to none."""

    def __init__(
        self, draft_kv_users: frozenset[str] = frozenset(), finders: Mapping[str, Find] = MappingProxyType({})
    ) -> None:
        self.gain, self.acceptance, self.target = Speedup(), Acceptance(), CostModel()
        self.is_exploring = False  # the latest choice is a trial
        self._drafting = defaultdict[str, CostModel](CostModel)  # by proposer
        self._draft_kv_users = draft_kv_users  # names of the proposers whose sequences may have to catch up
        self._finders = finders  # by proposer: the drafts that the text holds, or None where a model would draft
        self._found: dict[Sequence, tuple[int, tuple[int, ...]]] = {}  # drafts from the text, and at which length
        self._budget = _Budget()
        self._num_steps = self._since_plain = self._rows = 0  # rows: what the latest step had room for
        self._expected = 1.5  # gain of the latest step with drafts
        self._resting: tuple[int, Sequence | None, int] = (0, None, 0)  # how many, the newest, and until which step

    # ---------------------------------------------------------------------------------------------------- choosing

    def choose(self, sequences: Seq[Sequence], limits: Seq[int], budget: int, prompt_rows: int) -> list[int]:
        """AUTO gets what pays, FIXED what it asked for; now and then a step without drafts, or a trial."""
        self.is_exploring, self._rows = False, budget
        if self._is_resting(sequences):
            return [0] * len(sequences)
        free = [
            limit and s.speculation.mode is SpeculationMode.AUTO for s, limit in zip(sequences, limits, strict=True)
        ]
        chosen = within([0 if f else limit for f, limit in zip(free, limits, strict=True)], budget)
        self._look_back()
        if not any(free) or not self.target.count or self._is_plain_due():
            return chosen
        load = BatchLoad.of([len(s.tokens) for s in sequences], chosen, prompt_rows)
        budget -= sum(chosen)
        for name in sorted({s.speculation.proposer for s, f in zip(sequences, free, strict=True) if f}):
            mine = [i for i, s in enumerate(sequences) if free[i] and s.speculation.proposer == name]
            group = self._group(name, [sequences[i] for i in mine], [limits[i] for i in mine])
            found = self._choose_for(group, load, budget)
            if found is not None:
                load, budget = found.load, budget - int(found.num_draft.sum())
                for i, k in zip(mine, found.num_draft.tolist(), strict=True):
                    chosen[i] = k
        if all(free) and not any(chosen) and (self._found or not self._finders):
            self._resting = len(sequences), sequences[-1], self._num_steps + _REST
        return chosen

    def _is_resting(self, sequences: Seq[Sequence]) -> bool:
        """The same sequences were found not worth drafting for a moment ago: asking again would cost time."""
        count, newest, until = self._resting
        return self._num_steps < until and bool(sequences) and (len(sequences), sequences[-1]) == (count, newest)

    def _is_plain_due(self) -> bool:
        """A plain step loses what drafting would have gained: near break-even, where it matters, hardly anything."""
        least, most = _PLAIN_EVERY
        loss = 1 - 1 / max(1.0, self._expected)
        return self._since_plain >= min(max(loss / _PLAIN_SHARE, least), most)

    def _group(self, name: str, sequences: Seq[Sequence], limits: Seq[int]) -> _Group:
        find = self._finders.get(name)
        found = [None if find is None else find(s, k) for s, k in zip(sequences, limits, strict=True)]
        self._found.update({s: (len(s.tokens), drafts) for s, drafts in zip(sequences, found, strict=True) if drafts})
        most = [k if drafts is None else min(k, len(drafts)) for k, drafts in zip(limits, found, strict=True)]
        return _Group(name, sequences, np.array(most), np.array([drafts is not None for drafts in found]))

    def _look_back(self) -> None:
        """What was found and not asked for costs nothing to judge: the tokens that came instead are there now."""
        for sequence, (length, drafts) in self._found.items():
            came = sequence.tokens[length : length + len(drafts)]
            if came:
                kept = next((i for i, (a, b) in enumerate(zip(drafts, came, strict=False)) if a != b), len(came))
                source = Source(sequence.speculation.proposer, is_found=True)
                self.acceptance.learn([sequence], source, np.array([len(came)]), np.array([kept]))
        self._found.clear()

    def _choose_for(self, group: _Group, load: BatchLoad, budget: int) -> Choice | None:
        if not group.limits.any():
            return None
        best = self._offer(group).best(load, self.target, budget)
        if best.gain > 1 + _MARGIN:
            self._expected = best.gain
            return best
        return None if load.prompt_rows else self._try(group, load, budget)

    def _try(self, group: _Group, load: BatchLoad, budget: int) -> Choice | None:
        """One draft each for some, as many as the budget pays for, if they could pay at all."""
        held = self._budget.held
        these = np.array([s in held for s in group.sequences]) & (group.limits > 0)
        if these.any():
            offer = self._offer(group, spread=False)
            for sequence in group.sequences:  # reading a prompt is no trial yet
                held[sequence] = held.get(sequence, 0) - (self._unseen(group.name, sequence) == 0)
            self._budget.held = {s: left for s, left in held.items() if left > 0}
            return self._tried(offer.shallow(these, int(these.sum())).all_of(load, self.target, budget))
        if self._budget.seconds <= 0:
            return None
        hopeful = self._offer(group, hope=_HOPE).best(load, self.target, budget)
        these = hopeful.num_draft > 0
        if hopeful.gain <= 1 + _MARGIN:
            return None
        offer, count = self._offer(group, spread=False), int(these.sum())
        self._budget.wanted = 0.0
        while count:
            choice = offer.shallow(these, count).all_of(load, self.target, budget)
            if choice.loss <= self._budget.seconds:
                self._budget.held = {s: _HOLD for s, k in zip(group.sequences, choice.num_draft, strict=True) if k}
                return self._tried(choice)
            self._budget.wanted = choice.loss
            count //= 2
        return None

    def _tried(self, choice: Choice) -> Choice:
        self.is_exploring = True
        return choice

    def _offer(self, group: _Group, hope: float | None = None, *, spread: bool = True) -> Offer:
        """What could be drafted. What is invested in catching up comes back in later rounds, where it is `spread`."""
        sequences, depth = group.sequences, int(group.limits.max())
        kept = np.zeros((len(sequences), depth))
        for is_found in {*group.is_found.tolist()}:
            mine = np.flatnonzero(group.is_found == is_found)
            members = [sequences[i] for i in mine.tolist()]
            kept[mine] = self.acceptance.kept(members, Source(group.name, is_found), depth, hope=hope)
        contexts = np.array([len(s.tokens) for s in sequences], float)
        rooms = np.array([min(s.max_len - len(s.tokens), _HORIZON) for s in sequences], float)
        unseen = np.array([self._unseen(group.name, s) for s in sequences], float)
        # What goes by while the draft model reads for all of them, if it gets half of a step's room.
        rooms = rooms - 2 * unseen.sum() / max(self._rows, 1)
        rounds = np.maximum(rooms / 2, 1) if spread else np.ones(len(sequences))
        prices = self._drafting[group.name]
        seconds = drafting_seconds(prices, kept, contexts, unseen, rounds, group.is_found)
        return Offer(group.limits, kept, seconds, prices.a_call, contexts)

    def _unseen(self, name: str, sequence: Sequence) -> int:
        """Tokens that a draft model has to be fed before it can draft, beside the two that it is always fed."""
        return max(0, len(sequence.tokens) - 2 - sequence.draft.kv_len) if name in self._draft_kv_users else 0

    # ---------------------------------------------------------------------------------------------------- learning

    def learn(self, done: StepFeedback) -> None:
        """Prices, chances and gain, from one step."""
        asked = sorted({s.speculation.proposer for s, k in zip(done.sequences, done.asked, strict=True) if k})
        self._learn_chances(done)
        if len(asked) == 1:
            self._learn_drafting(self._drafting[asked[0]], done)
        if done.has_prompts or not done.sequences:
            return
        self._num_steps += 1
        self.target.learn(done.load.quantities, done.other_seconds)
        plain = (
            self.target.of(BatchLoad.of(done.lengths, [0] * len(done.lengths)).quantities) if asked else done.seconds
        )
        self._since_plain = self._since_plain + 1 if asked else 0
        self.gain.add(done.sequences, [accepted + 1 for accepted in done.accepted], done.seconds, plain)
        tokens = 1 + sum(done.accepted) / len(done.sequences)
        self._budget.charge(done.seconds - plain * tokens if asked else 0.0, plain)

    def _learn_chances(self, done: StepFeedback) -> None:
        groups = defaultdict[Source, list[int]](list)
        for i, sequence in enumerate(done.sequences):
            if done.drafted[i]:
                is_found = self._found.pop(sequence, None) is not None or not done.draft_passes
                groups[Source(sequence.speculation.proposer, is_found)].append(i)
        drafted, accepted = np.array(done.drafted), np.array(done.accepted)
        for source, mine in groups.items():
            self.acceptance.learn([done.sequences[i] for i in mine], source, drafted[mine], accepted[mine])

    @staticmethod
    def _learn_drafting(prices: CostModel, done: StepFeedback) -> None:
        lengths = [length for length, k in zip(done.lengths, done.asked, strict=True) if k]
        in_passes = sum(count for count, _ in done.draft_passes)
        work = quantities(
            calls=1,
            asked=len(lengths),
            passes=len(done.draft_passes),
            sequences=in_passes,
            context=in_passes * sum(lengths) / len(lengths),
        )
        prices.learn(with_rows(work, [tokens for _, tokens in done.draft_passes]), done.draft_seconds)

    def begin(self) -> None:
        """What was learned so far was practice: its costs and its priors stay, its gain does not."""
        self.gain, self._budget = Speedup(), _Budget()
        self._since_plain, self._expected = 0, 1.5

    def forget(self, sequence: Sequence) -> None:
        """The sequence is over."""
        self.acceptance.forget(sequence)
        self.gain.forget(sequence)
        self._budget.held.pop(sequence, None)
        self._found.pop(sequence, None)

    # ------------------------------------------------------------------------------------- from one start to the next

    def state(self) -> dict[str, Any]:
        """What outlives the process, as JSON can hold it."""
        drafting = {name: prices.state() for name, prices in self._drafting.items()}
        return {"target": self.target.state(), "drafting": drafting, "acceptance": self.acceptance.state()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Begin with a `state`. Raises ValueError, KeyError or TypeError where it is none, and may be half restored."""
        self.target = CostModel.of_state(state["target"])
        self._drafting.update({str(name): CostModel.of_state(prices) for name, prices in state["drafting"].items()})
        self.acceptance.restore(state["acceptance"])
