"""A step as data: what the scheduler plans for each sequence, with its drafts, and what verification makes of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from engine.stats import Forward
from engine.types import Logprob, Sequence

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Work:
    """One sequence's part in a step: the target is fed its tokens at `span`, then its drafts.

    Planning sets `num_draft`, and `drafts` where they are looked up or predicted. Proposing sets all others.
    """

    sequence: Sequence
    span: range  # positions kv_len .. stop
    length: int  # tokens of the sequence when this was planned
    num_draft: int = 0  # maximum number of drafts
    drafts: tuple[int, ...] = ()
    draft_probs: Tensor | None = None  # float64 [len(drafts), vocab] that they were drawn from; None: they were not

    @classmethod
    def feeding(cls, sequence: Sequence, num_tokens: int) -> Work:
        """Feed the next `num_tokens` that the target has not been fed."""
        start = sequence.target.kv_len
        return cls(sequence, range(start, start + num_tokens), len(sequence.tokens))

    @property
    def reaches_end(self) -> bool:
        """Whether the newest token is fed, so that the pass yields the next one."""
        return self.span.stop == self.length

    @property
    def decodes(self) -> bool:
        """Whether nothing but the newest token and drafts are fed; else a prompt, or what is computed again."""
        return len(self.span) == 1 and self.reaches_end

    @property
    def num_rows(self) -> int:
        """Rows of logits that decide tokens: one after the newest token and one after each draft."""
        return len(self.drafts) + 1 if self.reaches_end else 0


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What the next step does, one entry per sequence that takes part."""

    works: tuple[Work, ...] = ()
    on_device: tuple[Work, ...] = ()  # of the sequences that decode in a round on the device
    counts: Mapping[str, int] = field(default_factory=dict)  # since the plan before; by their names in `StepStats`
    draft_forwards: tuple[Forward, ...] = ()  # passes of the models that made drafts


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a step for one sequence: tokens, and a problem if the output cannot continue after them.

    Plain decoding would meet `problem` only after these tokens, and never if one of them ends the output.
    """

    work: Work
    num_draft: int  # that were verified
    tokens: tuple[int, ...]  # accepted drafts, then the target's own token
    num_accepted: int
    problem: str | None = None
    logprobs: tuple[Logprob, ...] = ()  # of `tokens`, where asked for

    @property
    def sequence(self) -> Sequence:
        return self.work.sequence
