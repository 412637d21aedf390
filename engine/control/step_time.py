"""How long steps take: the one model of their time, which control, the prompt budget and admission ask.

    seconds of a step = costs of the target's pass + costs of drafting + seconds per token of prompts * such tokens

Costs are known from steps that read nothing, the seconds per token from what the others took beyond them. Where costs
are not what they were, those are wrong by just as much as makes the next step of that size right all the same. Knows
no clock: seconds are passed in.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from engine.control.constants import MOST
from engine.control.cost_model import CostModel, Floats, quantities
from engine.params import MAX_NUM_DRAFT
from engine.types import Sequence

_FEW = 2  # tokens of prompts beside which costs are learned: where decoding alone is too long, no step reads more
_READING = MAX_NUM_DRAFT + 1  # tokens per sequence: a first pass of a draft model that is fed more reads a prompt


@dataclass(frozen=True, slots=True)
class BatchLoad:
    """What a step feeds the target, and what is expected of it."""

    sequences: int
    rows: float
    tokens: float  # expected to come of it
    context: float  # tokens of all sequences
    attended: float  # the same, once per row
    seconds: float = 0.0  # of drafting
    prompt_rows: int = 0

    @classmethod
    def of(cls, lengths: Seq[int], num_draft: Seq[int], prompt_rows: int = 0) -> BatchLoad:
        """A step of sequences that are so long and feed their newest token and so many drafts."""
        sequences, context = len(lengths), sum(lengths)
        drafted = sum(length * k for length, k in zip(lengths, num_draft, strict=True))
        rows = sequences + sum(num_draft)
        return cls(sequences, rows, sequences, context, context + drafted, prompt_rows=prompt_rows)

    @property
    def quantities(self) -> Floats:
        """Of the target's pass."""
        context, attended, rows = self.context, self.attended, [self.rows]
        return quantities(passes=1, sequences=self.sequences, context=context, attended=attended, rows=rows)


@dataclass(frozen=True, slots=True)
class StepFeedback:
    """What a step did for sequences that fed their newest token, and the seconds it took."""

    sequences: Seq[Sequence]
    lengths: Seq[int]  # tokens of each sequence when the step was planned
    asked: Seq[int]
    drafted: Seq[int]
    accepted: Seq[int]
    draft_passes: Seq[tuple[int, int]]  # sequences and tokens of each pass of a draft model
    draft_seconds: float
    other_seconds: float
    chunks: Seq[int] = ()  # tokens of prompts that other sequences fed in the same pass, of each
    rows: int | None = None  # of the target's pass, where it had rows of no sequence

    @property
    def seconds(self) -> float:
        return self.draft_seconds + self.other_seconds

    @property
    def load(self) -> BatchLoad:
        """What the target was fed, without prompts."""
        load = BatchLoad.of(self.lengths, self.drafted)
        return load if self.rows is None else replace(load, rows=self.rows)


class StepTime:
    """Costs of the target's passes and of drafting. `lookups`: proposers that look drafts up and make none."""

    def __init__(self, lookups: Collection[str] = ()) -> None:
        self.target, self.drafting = CostModel(), defaultdict[str, CostModel](CostModel)  # by proposer
        # Seconds per token of a prompt: of the target (None), and of each proposer that reads.
        self.reading: dict[str | None, float] = {}
        self._lookups = frozenset(lookups)

    def plain(self, lengths: Seq[int]) -> float:
        """Seconds of a step in which sequences of these lengths decode without drafts; of none, as of one."""
        return self.target.of(BatchLoad.of(lengths or [0], [0] * max(1, len(lengths))).quantities)

    def by_batch_size(self, most: int) -> tuple[float, ...]:
        """Seconds of such a step of 1, 2, 4, ... sequences, to the first power of two that is at least `most`.

        Empty where no step was measured.
        """
        sizes = 1 << np.arange((most - 1).bit_length() + 1)
        return tuple(self.target.joining(int(sizes[-1])).cumsum()[sizes - 1].tolist()) if self.target.count else ()

    def learn(self, done: StepFeedback) -> None:
        """One step."""
        tokens, seconds, name = sum(done.chunks), done.seconds, self._drafter_of(done)
        count, fed = done.draft_passes[0] if done.draft_passes and name is not None else (0, 0)
        if fed > _READING * count:
            self._learn_reading(name, fed, done.draft_seconds)
            seconds -= done.draft_seconds * (1 - 2 * count / fed)  # that was not the target's reading
        if tokens > _FEW:
            self._learn_reading(None, tokens, seconds, self.plain(done.lengths))
        elif done.sequences or tokens:
            load = replace(done.load, rows=done.load.rows + tokens)
            self.target.learn(load.quantities, done.other_seconds)
        self._learn_drafting(done)

    def _learn_reading(self, who: str | None, tokens: int, seconds: float, beside: float = 0.0) -> None:
        """So many tokens took so long, with `beside` seconds of decoding. One stall is no new machine."""
        if math.isfinite(seconds) and seconds > 0:
            each = max(0.0, seconds - beside) / tokens if who in self.reading else seconds / tokens
            self.reading[who] = max(min(each, MOST * self.reading.get(who, math.inf)), 1e-9)

    def _drafter_of(self, done: StepFeedback) -> str | None:
        """The proposer whose passes a step's passes of a draft model are; None if several made drafts, or none did."""
        made = {s.drafter for s, k in zip(done.sequences, done.asked, strict=True) if k} - self._lookups
        return made.pop() if len(made) == 1 else None

    def _learn_drafting(self, done: StepFeedback) -> None:
        """From a step in which at most one proposer made drafts; those that looked some up took what they always do."""
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
        """All that is known, as JSON can hold it."""
        drafting = {name: costs.state() for name, costs in self.drafting.items()}
        return {"target": self.target.state(), "drafting": drafting}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Start with a `state`. Raises ValueError, KeyError or TypeError for anything else; half may be restored."""
        self.target = CostModel.of_state(state["target"])
        self.drafting.update({str(name): CostModel.of_state(costs) for name, costs in state["drafting"].items()})


def _lengths(done: StepFeedback, name: str) -> list[int]:
    """Of the sequences for which this proposer was asked."""
    each = zip(done.sequences, done.lengths, done.asked, strict=True)
    return [length for sequence, length, k in each if k and sequence.drafter == name]
