"""How many drafts each sequence gets in each step, from measured costs and observed acceptance.

One cost model, one posterior of acceptance per sequence, one rule: the most expected tokens per expected second. Where
the best choice is no drafts, a budget of time pays for exploration: single drafts for sequences that could gain by an
optimistic estimate of their acceptance. Knows no model and no clock: seconds are passed in. No choice changes a token.
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

SHARE = 0.015  # of the time of plain steps may be lost to exploration

_MARGIN = 0.03  # least expected speed-up beyond 1: costs are measured on noisy steps
_SAVED, _DEBT = 4.0, 4.0  # bounds of the budget, in plain steps: most that is saved, most debt that is paid back
_HOPE = 0.8  # quantile of a sequence's acceptance rate at which drafts must pay, or they are not explored
_HOLD = 4  # steps for which exploration goes on whatever it costs, so that a prefill of the draft model is used
_REST = 8  # steps without drafts before the choice is computed again
_PLAIN_SHARE, _PLAIN_EVERY = (
    0.02,
    (4, 128),
)  # most of the speed-up that plain steps for comparison may cost; least and most steps between them
_HORIZON = 128  # most further tokens that an output is expected to have


@dataclass(slots=True)
class _Budget:
    """Seconds that exploration may lose. The budget grows with time; every step with drafts is charged its loss."""

    seconds: float = 0.0
    wanted: float = 0.0  # cost of the cheapest exploration that could not be afforded
    held: dict[Sequence, int] = field(default_factory=dict)  # for how many more steps each sequence is explored

    def charge(self, loss: float, plain: float) -> None:
        """Charge a step of AUTO its loss against plain steps. A step that gained pays debts but saves nothing."""
        after = self.seconds - loss
        after = after if loss > 0 else max(self.seconds, min(0.0, after))
        self.seconds = min(max(after, -_DEBT * plain) + SHARE * plain, max(_SAVED * plain, self.wanted))


class _Group(NamedTuple):
    """The sequences of one step that one proposer may draft for."""

    name: str
    sequences: Seq[Sequence]
    limits: Ints
    is_found: Bools  # whether their drafts were found in the text; `limits` then counts those


class AdaptiveK:
    """AUTO: as many drafts as pay, down to none."""

    def __init__(
        self, draft_kv_users: frozenset[str] = frozenset(), finders: Mapping[str, Find] = MappingProxyType({})
    ) -> None:
        self.gain, self.acceptance, self.target = Speedup(), Acceptance(), CostModel()
        self.is_exploring = False  # whether the latest choice is an exploration
        self._drafting = defaultdict[str, CostModel](CostModel)  # by proposer
        self._draft_kv_users = draft_kv_users  # names of the proposers with a draft K/V that may have to catch up
        self._finders = finders  # by proposer: drafts found in the text, or None where a model would draft
        self._found: dict[
            Sequence, tuple[str, int, tuple[int, ...]]
        ] = {}  # drafts found in the text, by what, and the length of the sequence then
        self._budget = _Budget()
        self._num_steps = self._since_plain = self._rows = 0  # rows: budget of the latest step
        self._expected = 1.5  # speed-up expected of the latest step with drafts
        self._resting: tuple[int, Sequence | None, int] = (
            0,
            None,
            0,
        )  # number of sequences, the newest of them, and until which step

    # ---------------------------------------------------------------------------------------------------- choosing

    def choose(self, sequences: Seq[Sequence], limits: Seq[int], budget: int, prompt_rows: int) -> list[int]:
        """AUTO gets what pays, FIXED its own K; now and then a plain step for comparison, or an exploration."""
        self.is_exploring, self._rows = False, budget
        if self._is_resting(sequences):
            return [0] * len(sequences)
        free = [
            limit and s.speculation.mode is SpeculationMode.AUTO for s, limit in zip(sequences, limits, strict=True)
        ]
        chosen = within([0 if f else limit for f, limit in zip(free, limits, strict=True)], budget)
        self._learn_from_unused()
        if not any(free) or not self.target.count or self._is_plain_due():
            return chosen
        load = BatchLoad.of([len(s.tokens) for s in sequences], chosen, prompt_rows)
        budget -= sum(chosen)
        for name in sorted({s.drafter for s, f in zip(sequences, free, strict=True) if f}):
            mine = [i for i, s in enumerate(sequences) if free[i] and s.drafter == name]
            group = self._group(name, [sequences[i] for i in mine], [limits[i] for i in mine])
            found = self._choose_for(group, load, budget)
            if found is not None:
                load, budget = found.load, budget - int(found.num_draft.sum())
                for i, k in zip(mine, found.num_draft.tolist(), strict=True):
                    chosen[i] = k
        may_return = any(s.most_predicted for s in sequences)  # to its prediction, in any step
        if all(free) and not any(chosen) and (self._found or not self._finders) and not may_return:
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

    def _group(self, name: str, sequences: Seq[Sequence], limits: Seq[int]) -> _Group:
        find = self._finders.get(name)
        found = [None if find is None else find(s, k) for s, k in zip(sequences, limits, strict=True)]
        self._found.update(
            {s: (name, len(s.tokens), drafts) for s, drafts in zip(sequences, found, strict=True) if drafts}
        )
        most = [k if drafts is None else min(k, len(drafts)) for k, drafts in zip(limits, found, strict=True)]
        return _Group(name, sequences, np.array(most), np.array([drafts is not None for drafts in found]))

    def _learn_from_unused(self) -> None:
        """Learn from drafts that were found in the text and not used: the tokens show now which were right."""
        for sequence, (drafter, length, drafts) in self._found.items():
            came = sequence.tokens[length : length + len(drafts)]
            if came:
                kept = next((i for i, (a, b) in enumerate(zip(drafts, came, strict=False)) if a != b), len(came))
                source = Source(drafter, is_found=True)
                self.acceptance.learn([sequence], source, np.array([len(came)]), np.array([kept]))
        self._found.clear()

    def _choose_for(self, group: _Group, load: BatchLoad, budget: int) -> Choice | None:
        if not group.limits.any():
            return None
        best = self._offer(group).best(load, self.target, budget)
        if best.gain > 1 + _MARGIN:
            self._expected = best.gain
            return best
        return None if load.prompt_rows else self._explore(group, load, budget)

    def _explore(self, group: _Group, load: BatchLoad, budget: int) -> Choice | None:
        """One draft each for as many sequences as the budget affords, if an optimistic estimate says it pays."""
        held = self._budget.held
        these = np.array([s in held for s in group.sequences]) & (group.limits > 0)
        if these.any():
            offer = self._offer(group, spread=False)
            for sequence in group.sequences:  # a prefill of the draft model is no exploration yet
                held[sequence] = held.get(sequence, 0) - (self._unseen(group.name, sequence) == 0)
            self._budget.held = {s: left for s, left in held.items() if left > 0}
            return self._exploring(offer.shallow(these, int(these.sum())).all_of(load, self.target, budget))
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
                return self._exploring(choice)
            self._budget.wanted = choice.loss
            count //= 2
        return None

    def _exploring(self, choice: Choice) -> Choice:
        self.is_exploring = True
        return choice

    def _offer(self, group: _Group, hope: float | None = None, *, spread: bool = True) -> Offer:
        """The drafts on offer. With `spread`, the cost of catching up is shared by the rounds still to come."""
        sequences, depth = group.sequences, int(group.limits.max())
        kept = np.zeros((len(sequences), depth))
        for is_found in {*group.is_found.tolist()}:
            mine = np.flatnonzero(group.is_found == is_found)
            members = [sequences[i] for i in mine.tolist()]
            kept[mine] = self.acceptance.kept(members, Source(group.name, is_found), depth, hope=hope)
        contexts = np.array([len(s.tokens) for s in sequences], float)
        rooms = np.array([min(s.max_len - len(s.tokens), _HORIZON) for s in sequences], float)
        unseen = np.array([self._unseen(group.name, s) for s in sequences], float)
        # Tokens that are decoded while the draft model catches up for all of them with half of each step's budget.
        rooms = rooms - 2 * unseen.sum() / max(self._rows, 1)
        rounds = np.maximum(rooms / 2, 1) if spread else np.ones(len(sequences))
        costs = self._drafting[group.name]
        seconds = drafting_seconds(costs, kept, contexts, unseen, rounds, group.is_found)
        return Offer(group.limits, kept, seconds, costs.a_call, contexts)

    def _unseen(self, name: str, sequence: Sequence) -> int:
        """Tokens that the draft model has to be fed before it can draft, apart from the two that each round feeds."""
        return max(0, len(sequence.tokens) - 2 - sequence.draft.kv_len) if name in self._draft_kv_users else 0

    # ---------------------------------------------------------------------------------------------------- learning

    def learn(self, done: StepFeedback) -> None:
        """Update costs, acceptance, speed-up and budget from one step."""
        asked = sorted({s.drafter for s, k in zip(done.sequences, done.asked, strict=True) if k})
        self._learn_acceptance(done)
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

    def _learn_acceptance(self, done: StepFeedback) -> None:
        groups = defaultdict[Source, list[int]](list)
        for i, sequence in enumerate(done.sequences):
            if done.drafted[i]:
                is_found = self._found.pop(sequence, None) is not None or not done.draft_passes
                groups[Source(sequence.drafter, is_found)].append(i)
        drafted, accepted = np.array(done.drafted), np.array(done.accepted)
        for source, mine in groups.items():
            self.acceptance.learn([done.sequences[i] for i in mine], source, drafted[mine], accepted[mine])

    @staticmethod
    def _learn_drafting(costs: CostModel, done: StepFeedback) -> None:
        lengths = [length for length, k in zip(done.lengths, done.asked, strict=True) if k]
        in_passes = sum(count for count, _ in done.draft_passes)
        work = quantities(
            calls=1,
            asked=len(lengths),
            passes=len(done.draft_passes),
            sequences=in_passes,
            context=in_passes * sum(lengths) / len(lengths),
        )
        costs.learn(with_rows(work, [tokens for _, tokens in done.draft_passes]), done.draft_seconds)

    def begin(self) -> None:
        """End calibration: keep costs and acceptance priors, discard the speed-up and the budget."""
        self.gain, self._budget = Speedup(), _Budget()
        self._since_plain, self._expected = 0, 1.5

    def forget(self, sequence: Sequence) -> None:
        """Drop what is known of a sequence that has ended."""
        self.acceptance.forget(sequence)
        self.gain.forget(sequence)
        self._budget.held.pop(sequence, None)
        self._found.pop(sequence, None)

    # ------------------------------------------------------------------------------------- from one start to the next

    def state(self) -> dict[str, Any]:
        """What a later process can start with, as JSON values."""
        drafting = {name: costs.state() for name, costs in self._drafting.items()}
        return {"target": self.target.state(), "drafting": drafting, "acceptance": self.acceptance.state()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Start with a `state`. Raises ValueError, KeyError or TypeError for anything else; half may be restored."""
        self.target = CostModel.of_state(state["target"])
        self._drafting.update({str(name): CostModel.of_state(costs) for name, costs in state["drafting"].items()})
        self.acceptance.restore(state["acceptance"])
