"""A step as data, from the scheduler's plan to the verified tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from pilotfish.engine.stats import Forward
from pilotfish.engine.types import Logprob, Sequence

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Work:
    """One sequence's part in a step: the target is fed its tokens at `span`, then its drafts.

    Planning sets `num_draft`, and `drafts` where they are looked up or predicted. Proposing sets the other drafts.
    Verification sets the rest: the new tokens, and a problem if the output cannot continue after them. Plain decoding
    would meet `problem` only after these tokens, and never if one of them ends the output.
    """

    sequence: Sequence
    span: range  # positions kv_len .. stop
    length: int  # tokens of the sequence when this was planned
    num_draft: int = 0  # maximum number of drafts
    drafts: tuple[int, ...] = ()
    draft_probs: Tensor | None = None  # float64 [len(drafts), vocab] that they were drawn from; None: they were not
    num_verified: int = 0  # drafts that were verified
    num_accepted: int = 0
    tokens: tuple[int, ...] = ()  # accepted drafts, then the target's own token
    logprobs: tuple[Logprob, ...] = ()  # of `tokens`, if requested
    problem: str | None = None

    @classmethod
    def feeding(cls, sequence: Sequence, num_tokens: int) -> Work:
        """Feed the next `num_tokens` that the target has not been fed."""
        start = sequence.target.kv_len
        return cls(sequence, range(start, start + num_tokens), len(sequence.tokens))

    def with_drafts(self, drafts: tuple[int, ...], probs: Tensor | None = None) -> Work:
        return replace(self, drafts=drafts, draft_probs=probs)

    @property
    def reaches_end(self) -> bool:
        """Whether the newest token is fed, so that the pass yields the next one."""
        return self.span.stop == self.length

    @property
    def decodes(self) -> bool:
        """Whether only the newest token and drafts are fed; otherwise a prompt, or tokens computed again."""
        return len(self.span) == 1 and self.reaches_end

    @property
    def num_rows(self) -> int:
        """Rows of logits that decide tokens: one after the newest token and one after each draft."""
        return len(self.drafts) + 1 if self.reaches_end else 0


@dataclass(frozen=True, slots=True)
class Step:
    """One step, with an entry for each sequence that takes part. Each stage returns it with its additions."""

    works: tuple[Work, ...] = ()
    on_device: tuple[Work, ...] = ()  # of the sequences that decode in a round on the device
    counts: Mapping[str, int] = field(default_factory=dict)  # since the previous plan; by their names in `StepStats`
    draft_forwards: tuple[Forward, ...] = ()  # passes of the models that made drafts
    faulty: tuple[Sequence, ...] = ()  # failed in the target's pass when fed alone; they have no entry any more
    error: Exception | None = None  # of the pass for all; then each was fed alone, and the time is not a measurement

    @property
    def decided(self) -> tuple[Work, ...]:
        """Those whose newest token is fed, so that the pass decides what comes next."""
        return tuple(work for work in self.works if work.reaches_end)
