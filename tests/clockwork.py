"""A machine whose costs are known in closed form, run by the engine's own scheduler and control on a virtual clock.

There is no model: what a step costs is a function of what it feeds, whether a draft is kept is a coin. Control is told
noisy times, and the books are kept in true ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from pilotfish.engine.control.adaptive import AdaptiveK
from pilotfish.engine.control.goodput import Found, Traits
from pilotfish.engine.control.step_time import StepFeedback
from pilotfish.engine.kv.pages import PagePool
from pilotfish.engine.params import SpeculationMode
from pilotfish.engine.scheduler import Scheduler
from pilotfish.engine.startup.calibrate import SHAPES
from pilotfish.engine.step import Work
from pilotfish.engine.types import Sequence
from tests import fakes

MOST = 8
READS = Traits(num_unseen=lambda sequence: max(0, len(sequence.tokens) - 2 - sequence.draft.kv_len))  # a draft model
BUDGET = 512  # tokens of one pass


@dataclass(frozen=True)
class Costs:
    """Seconds of a pass of each model: sequences, rows, tokens of context, tokens attended."""

    target: Callable[[int, float, float, float], float]
    draft: Callable[[int, float, float, float], float]
    overhead: float = 0.0005


COSTS = {
    "int8 on CPU: flat, then by the row": Costs(
        lambda n, rows, context, attended: 0.040 + 0.0012 * max(0, rows - 16) + 2e-7 * context + 1e-7 * attended,
        lambda n, rows, context, attended: 0.006 + 0.00015 * rows + 2e-8 * attended,
    ),
    "small model: by the row": Costs(
        lambda n, rows, context, attended: 0.0015 + 0.0012 * rows + 5e-8 * attended,
        lambda n, rows, context, attended: 0.0006 + 0.00015 * rows + 1e-8 * attended,
    ),
    "GPU: flat": Costs(
        lambda n, rows, context, attended: 0.0035 + 0.000004 * rows + 2e-8 * context,
        lambda n, rows, context, attended: 0.0006 + 0.000001 * rows + 2e-9 * context,
    ),
}


@dataclass
class Books:
    """What was made and what it took, without noise; and what other ways would have taken for the same."""

    tokens: float = 0.0
    seconds: float = 0.0
    fixed: np.ndarray = field(default_factory=lambda: np.zeros(MOST + 1))  # seconds by K
    trial_seconds: float = 0.0  # lost to trials

    @property
    def against_plain(self) -> float:
        return float(self.fixed[0] / self.seconds)

    @property
    def against_best(self) -> float:
        return float(self.fixed.min() / self.seconds)


class Machine:
    """A server that is kept busy: whoever ends is followed by another."""

    def __init__(
        self,
        costs: Costs,
        *,
        batch: int,
        acceptance: float,
        prompt: int,
        output: int = 128,
        noise: float = 0.2,
        outliers: float = 0.02,
        mode: SpeculationMode = SpeculationMode.AUTO,
        looks_up: bool = False,
        hits: float = 1.0,
        seed: int = 0,
    ) -> None:
        self.costs, self.batch, self.acceptance, self.prompt, self.output = costs, batch, acceptance, prompt, output
        self.noise, self.outliers, self.mode, self.looks_up, self.hits = noise, outliers, mode, looks_up, hits
        looks = Traits(find=lambda sequence, k: Found(self._find(sequence, k)))
        self.control = AdaptiveK({"model": looks if looks_up else READS})
        pools = [PagePool(64 * 200, 32, prefix_cache=False) for _ in range(2)]
        self.schedule = Scheduler(pools[0], 64, BUDGET, {} if looks_up else {"model": pools[1]}, control=self.control)
        self.random = np.random.default_rng(seed)
        self.books = Books()
        self.chosen: list[list[int]] = []
        self._finds: dict[Sequence, tuple[int, int, bool]] = {}  # at which length, how many right, if anything at all
        self._count = 0
        self._seen: set[Sequence] = set()

    def run(self, steps: int) -> Books:
        """Books of these steps alone."""
        self.books = Books()
        for _ in range(steps):
            self.step()
        return self.books

    def step(self) -> None:
        while len(self.schedule.running) + len(self.schedule.waiting) < self.batch:
            self.schedule.add(self._sequence())
        self.schedule.admit()
        plan = self.schedule.plan()
        steady = [w for w in plan.works if len(w.span) == 1 and w.reaches_end]
        others = [w for w in plan.works if len(w.span) > 1 or not w.reaches_end]
        drafted, passes, draft_seconds = self._propose(steady)
        accepted = [self._kept(w, k) for w, k in zip(steady, drafted, strict=True)]
        rows = sum(drafted) + len(steady) + sum(len(w.span) for w in others)
        context = sum(w.length for w in plan.works)
        attended = sum(w.length * (1 + k) for w, k in zip(steady, drafted, strict=True))
        attended += sum(len(w.span) * w.span.stop / 2 for w in others)
        target_seconds = self._target(len(plan.works), rows, context, attended)
        if steady and not others:
            self._account(steady, drafted, draft_seconds + target_seconds)
        done = StepFeedback(
            sequences=[w.sequence for w in steady],
            lengths=[w.length for w in steady],
            asked=[w.num_draft for w in steady],
            drafted=drafted,
            accepted=accepted,
            draft_passes=passes,
            draft_seconds=self.measured(draft_seconds),
            other_seconds=self.measured(target_seconds),
            chunks=[len(w.span) for w in others],
        )
        none = [0] * len(others)
        self._commit([*steady, *others], drafted + none, accepted + none)
        self.control.learn(done)
        self.chosen.append([w.num_draft for w in steady])

    def warm_up(self) -> None:
        """What the server does before it takes requests, with text of its own, of which six drafts in ten are kept."""
        with self.control.practising():
            for shape in SHAPES:
                lengths, ks = [shape.prompt] * shape.batch, [shape.num_draft] * shape.batch
                sequences = [self._sequence() for _ in lengths]
                context, rows = float(sum(lengths)), shape.batch * (1 + shape.num_draft)
                for step in range(shape.steps):
                    tokens = [shape.batch] * shape.num_draft
                    if step == 0 and shape.num_draft:  # the draft model reads the prompts first
                        tokens[0] = min(shape.batch * shape.prompt, BUDGET)
                    drafting = sum(self.costs.draft(shape.batch, n, context, context) for n in tokens)
                    target = self._target(shape.batch, rows, context, shape.prompt * rows)
                    passes = [(shape.batch, n) for n in tokens]
                    kept = [min(self._coin(0.6), shape.num_draft) for _ in sequences]
                    done = [self.measured(seconds) for seconds in (drafting, target)]
                    self.control.learn(StepFeedback(sequences, lengths, ks, ks, kept, passes, *done))
                for sequence in sequences:
                    self.control.forget(sequence)

    def _sequence(self) -> Sequence:
        self._count += 1
        # The first ones end one after another, not all at once.
        output = self.output if self._count > self.batch else 1 + self.output * self._count // self.batch
        most = 0 if self.mode is SpeculationMode.OFF else MOST
        max_len = self.prompt + output + 1
        return fakes.sequence([1] * self.prompt, name=str(self._count), k=most, mode=self.mode, max_len=max_len)

    def _coin(self, chance: float) -> int:
        """Hits in a row."""
        return int(self.random.geometric(1 - chance)) - 1 if chance < 1 else MOST

    def _kept(self, work: Work, k: int) -> int:
        return sum(self._find(work.sequence, k)) if self.looks_up else min(self._coin(self.acceptance), k)

    def _propose(self, works: list[Work]) -> tuple[list[int], list[tuple[int, int]], float]:
        if self.looks_up:
            found = [len(self._find(w.sequence, w.num_draft)) for w in works]
            return found, [], 0.00003 * sum(w.num_draft > 0 for w in works)
        passes, seconds, made = [], 0.0, {id(w): 0 for w in works}
        now = [w for w in works if w.num_draft]
        while now:
            budget, fed, grown = BUDGET, [], []
            for w in now:
                unseen = w.length + made[id(w)] - w.sequence.draft.kv_len
                fed.append(min(unseen, budget))
                budget -= fed[-1]
                w.sequence.draft.advance(w.sequence.draft.kv_len + fed[-1])
                if fed[-1] == unseen:
                    made[id(w)] += 1
                    grown.append(w)
            context = sum(w.length for w in now)
            attended = sum(w.length * u for w, u in zip(now, fed, strict=True))
            cost = self.costs.draft(len(now), sum(fed), context, attended)
            passes.append((len(now), sum(fed)))
            seconds += cost
            now = [w for w in grown if made[id(w)] < w.num_draft]
        return [made[id(w)] for w in works], passes, seconds

    def _find(self, sequence: Sequence, k: int) -> tuple[int, ...]:
        """All or nothing, and the same whenever it is asked at one place; every token of a text is 1."""
        length = len(sequence.tokens)
        if self._finds.get(sequence, (0, 0, False))[0] != length:
            self._finds[sequence] = length, self._coin(self.acceptance), bool(self.random.random() < self.hits)
        _, right, any_at_all = self._finds[sequence]
        return tuple(int(i < right) for i in range(k)) if any_at_all else ()

    def _target(self, n: int, rows: float, context: float, attended: float) -> float:
        return self.costs.overhead + self.costs.target(n, rows, context, attended)

    def measured(self, seconds: float) -> float:
        noisy = seconds * self.random.lognormal(0, self.noise)
        return noisy * (5 if self.random.random() < self.outliers else 1)

    def _commit(self, works: list[Work], drafted: list[int], accepted: list[int]) -> None:
        for work, k, kept in zip(works, drafted, accepted, strict=True):
            sequence = work.sequence
            sequence.target.advance(work.span.stop + k)
            if work.reaches_end:
                sequence.tokens += [1] * (kept + 1)
                sequence.rollback(len(sequence.tokens))
                if len(sequence.tokens) >= sequence.max_len - 1:
                    self.schedule.remove(sequence)

    def _account(self, works: list[Work], drafted: list[int], seconds: float) -> None:
        books, n = self.books, len(works)
        lengths = np.array([w.length for w in works])
        context = float(lengths.sum())
        tokens = sum(expected(self.acceptance, k) for k in drafted)
        books.tokens += tokens
        books.seconds += seconds
        fresh = [w.length for w in works if w.sequence not in self._seen]
        self._seen.update(w.sequence for w in works)
        first_reading = 0.0 if self.looks_up else sum(self.costs.draft(1, n, n, n * n / 2) for n in fresh)
        plain = self._target(n, n, context, context)
        for k in range(MOST + 1):
            if self.looks_up:
                drafting, fed = 0.00003 * n * (k > 0), 1 + k * self.hits
            else:
                drafting, fed = k * self.costs.draft(n, n, context, context), 1 + k
            step = self._target(n, n * fed, context, context * fed) + drafting
            books.fixed[k] += tokens * step / (n * expected(self.acceptance, k, self.hits))
            books.fixed[k] += first_reading if k else 0.0
        if self.control.is_exploring:
            books.trial_seconds += seconds - plain * tokens / n


def expected(acceptance: float, k: int, hits: float = 1.0) -> float:
    """Tokens of a round with k drafts, each kept with this chance if all before it were."""
    if math.isclose(acceptance, 1):
        return 1 + k * hits
    return 1 + hits * ((1 - acceptance ** (k + 1)) / (1 - acceptance) - 1)
