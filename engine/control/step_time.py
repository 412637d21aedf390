"""The time of steps: the only model of it, used by control, the prompt budget and admission.

    seconds of a step = costs of the target's pass + costs of drafting + seconds per token of prompts * such tokens

Costs are learned from steps that read no prompts, the seconds per token from what other steps took beyond those costs.
If the costs have changed, the error goes into the seconds per token, so that the prediction for the next step of that
size is right. Uses no clock: seconds are passed in.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from pilotfish.engine.control.constants import MOST
from pilotfish.engine.control.cost_model import CostModel, Floats, quantities
from pilotfish.engine.params import MAX_NUM_DRAFT
from pilotfish.engine.types import Sequence

_READING = MAX_NUM_DRAFT + 1  # tokens per sequence: a first pass of a draft model that is fed more is reading a prompt


@dataclass(frozen=True, slots=True)
class BatchLoad:
    """What a step feeds the target, and what it is expected to yield."""

    sequences: int
    rows: float
    tokens: float  # expected to be generated
    context: float  # tokens of all sequences
    attended: float  # tokens of context, counted once per row
    seconds: float = 0.0  # of drafting
    prompt_rows: int = 0

    @classmethod
    def of(cls, lengths: Seq[int], num_draft: Seq[int], prompt_rows: int = 0) -> BatchLoad:
        """A step in which sequences of these lengths feed their newest token and their drafts."""
        sequences, context = len(lengths), sum(lengths)
        drafted = sum(length * k for length, k in zip(lengths, num_draft, strict=True))
        rows = sequences + sum(num_draft)
        return cls(sequences, rows, sequences, context, context + drafted, prompt_rows=prompt_rows)

    @property
    def quantities(self) -> Floats:
        """The quantities of the target's pass."""
        context, attended, rows = self.context, self.attended, [self.rows]
        return quantities(passes=1, sequences=self.sequences, context=context, attended=attended, rows=rows)


@dataclass(frozen=True, slots=True)
class StepFeedback:
    """What a step did for the sequences that fed their newest token, and the seconds it took."""

    sequences: Seq[Sequence]
    lengths: Seq[int]  # tokens of each sequence when the step was planned
    asked: Seq[int]
    drafted: Seq[int]
    accepted: Seq[int]
    draft_passes: Seq[tuple[int, int]]  # sequences and tokens of each pass of a draft model
    draft_seconds: float
    other_seconds: float
    chunks: Seq[int] = ()  # tokens of prompts that each other sequence fed in the same pass
    rows: int | None = None  # of the target's pass, if it included padding

    @property
    def seconds(self) -> float:
        return self.draft_seconds + self.other_seconds

    @property
    def load(self) -> BatchLoad:
        """What the target was fed, except prompts."""
        load = BatchLoad.of(self.lengths, self.drafted)
        return load if self.rows is None else replace(load, rows=self.rows)


class StepTime:
    """Costs of the target's passes and of drafting. `lookups`: proposers that look drafts up, without passes."""

    def __init__(self, lookups: Collection[str] = ()) -> None:
        self.target, self.drafting = CostModel(), defaultdict[str, CostModel](CostModel)  # by proposer
        # Seconds per token of a prompt: of the target (None), and of each proposer with a model.
        self.reading: dict[str | None, float] = {}
        self._lookups = frozenset(lookups)

    def plain(self, lengths: Seq[int]) -> float:
        """Seconds of a step in which sequences of these lengths decode without drafts; no sequences count as one."""
        return self.target.of(BatchLoad.of(lengths or [0], [0] * max(1, len(lengths))).quantities)

    def by_batch_size(self, most: int) -> tuple[float, ...]:
        """Seconds of a step without drafts of 1, 2, 4, ... sequences, to the first power of two of at least `most`.

        Empty if no step was measured.
        """
        sizes = 1 << np.arange((most - 1).bit_length() + 1)
        return tuple(self.target.joining(int(sizes[-1])).cumsum()[sizes - 1].tolist()) if self.target.count else ()

    def learn(self, done: StepFeedback) -> None:
        """Learn from one step."""
        tokens, seconds, name = sum(done.chunks), done.seconds, self._drafter_of(done)
        count, fed = done.draft_passes[0] if done.draft_passes and name is not None else (0, 0)
        if fed > _READING * count:
            self._learn_reading(name, fed, done.draft_seconds)
            seconds -= done.draft_seconds * (1 - 2 * count / fed)  # reading by the draft model
        if tokens > 1:  # a step that has no time for prompts reads one token, and shows what decoding costs
            self._learn_reading(None, tokens, seconds, self.plain(done.lengths))
        elif done.sequences or tokens:
            load = replace(done.load, rows=done.load.rows + tokens)
            self.target.learn(load.quantities, done.other_seconds)
        self._learn_drafting(done)

    def _learn_reading(self, who: str | None, tokens: int, seconds: float, beside: float = 0.0) -> None:
        """A step read `tokens` in `seconds`, of which decoding took `beside`. `MOST` limits what a stall does."""
        if math.isfinite(seconds) and seconds > 0:
            each = max(0.0, seconds - beside) / tokens if who in self.reading else seconds / tokens
            self.reading[who] = max(min(each, MOST * self.reading.get(who, math.inf)), 1e-9)

    def _drafter_of(self, done: StepFeedback) -> str | None:
        """The proposer that ran the draft passes of a step; None if several made drafts, or none did."""
        made = {s.drafter for s, k in zip(done.sequences, done.asked, strict=True) if k} - self._lookups
        return made.pop() if len(made) == 1 else None

    def _learn_drafting(self, done: StepFeedback) -> None:
        """Learn from a step in which at most one proposer ran a model. Lookups are taken to cost the usual."""
        asked, name = {s.drafter for s, k in zip(done.sequences, done.asked, strict=True) if k}, self._drafter_of(done)
        if name is None and len(asked) == 1:
            (name,) = asked
        if name is None:
            return
        seconds = done.draft_seconds
        for other in asked - {name}:
            seconds -= self.drafting[other].of(quantities(calls=1, asked=len(_lengths(done, other))))
        lengths, in_passes = _lengths(done, name), sum(count for count, _ in done.draft_passes)
        work = quantities(
            calls=1,
            asked=len(lengths),
            passes=len(done.draft_passes),
            sequences=in_passes,
            context=in_passes * sum(lengths) / len(lengths),
            rows=[tokens for _, tokens in done.draft_passes],
        )
        self.drafting[name].learn(work, seconds)

    def state(self) -> dict[str, Any]:
        """What was learned, as JSON values."""
        drafting = {name: costs.state() for name, costs in self.drafting.items()}
        return {"target": self.target.state(), "drafting": drafting}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Start with a `state`. Raises ValueError, KeyError or TypeError for anything else; half may be restored."""
        self.target = CostModel.of_state(state["target"])
        self.drafting.update({str(name): CostModel.of_state(costs) for name, costs in state["drafting"].items()})


def _lengths(done: StepFeedback, name: str) -> list[int]:
    """Lengths of the sequences for which this proposer drafted."""
    each = zip(done.sequences, done.lengths, done.asked, strict=True)
    return [length for sequence, length, k in each if k and sequence.drafter == name]
