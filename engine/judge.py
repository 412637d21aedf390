"""Brings ragged logits before the rule that each sequence asked for. The rules themselves are in `verify.py`."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from engine import noise, sampling
from engine.noise import Stream
from engine.sampling import Row, RowParams
from engine.types import Sequence, Verification
from engine.verify import NO_DRAFT, Verdict, coupled, rejection


@dataclass(frozen=True, slots=True)
class Drafted:
    """A sequence whose newest token was fed, with its drafts and the law they came from (None: certainty)."""

    sequence: Sequence
    drafts: tuple[int, ...]
    law: Tensor | None = None

    def rows(self, stream: Stream) -> list[Row]:
        """The positions that its logits speak of: one after the newest token and after each draft."""
        first = len(self.sequence.tokens)
        return [Row(self.sequence, first + i, stream) for i in range(len(self.drafts) + 1)]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one sequence gets from one step."""

    num_accepted: int
    next_token: int


def judge(drafted: Seq[Drafted], logits: Tensor) -> list[Outcome]:
    """Decide all sequences; `logits` `[sum of (K_i + 1), vocab]` in their order."""
    outcomes: list[Outcome | None] = [None] * len(drafted)
    first_rows = _offsets([len(d.drafts) + 1 for d in drafted])
    for rule, decide in _RULES.items():
        mine = [i for i, d in enumerate(drafted) if d.sequence.speculation.verification is rule]
        if mine:
            rows = [row for i in mine for row in range(first_rows[i], first_rows[i + 1])]
            part = logits if len(mine) == len(drafted) else logits[torch.tensor(rows, device=logits.device)]
            verdict = decide([drafted[i] for i in mine], part)
            both = torch.stack([verdict.num_accepted, verdict.next_token], 1).tolist()  # the step's one wait
            for i, (num_accepted, next_token) in zip(mine, both, strict=True):
                outcomes[i] = Outcome(num_accepted, next_token)
    return [outcome for outcome in outcomes if outcome is not None]


def _coupled(drafted: Seq[Drafted], logits: Tensor) -> Verdict:
    params = _params(drafted, logits, Stream.COUPLED)
    tokens = sampling.choose(logits, params)
    return coupled(tokens[_padded_rows(drafted, logits.device)], _padded_drafts(drafted, logits.device))


def _rejection(drafted: Seq[Drafted], logits: Tensor) -> Verdict:
    params = _params(drafted, logits, Stream.RESAMPLE)
    vocab = logits.shape[1]
    rows, drafts = _padded_rows(drafted, logits.device), _padded_drafts(drafted, logits.device)
    resample = noise.gumbel(params.seed, params.position, params.stream, vocab).double()
    accept = noise.uniform(params.seed, params.position, Stream.ACCEPT)
    p = sampling.probabilities(logits, params)
    return rejection(p[rows], _padded_laws(drafted, drafts, vocab), drafts, accept[rows[:, :-1]], resample[rows])


_RULES: dict[Verification, Callable[[Seq[Drafted], Tensor], Verdict]] = {
    Verification.COUPLED: _coupled,
    Verification.REJECTION: _rejection,
}


def _params(drafted: Seq[Drafted], logits: Tensor, stream: Stream) -> RowParams:
    return RowParams.of([row for d in drafted for row in d.rows(stream)], logits.shape[1], logits.device)


def _padded_rows(drafted: Seq[Drafted], device: torch.device) -> Tensor:
    """Row of each position, `[B, K + 1]`; K_i [1, 0] -> [[0, 1], [2, 2]]: padding repeats the last, never read."""
    first_rows = _offsets([len(d.drafts) + 1 for d in drafted])
    widest = max(len(d.drafts) for d in drafted) + 1
    rows = [[min(first + i, stop - 1) for i in range(widest)] for first, stop in pairwise(first_rows)]
    return torch.tensor(rows, device=device)


def _padded_drafts(drafted: Seq[Drafted], device: torch.device) -> Tensor:
    """Drafts `[B, K]`, `NO_DRAFT` where a sequence has fewer."""
    widest = max(len(d.drafts) for d in drafted)
    padded = [[*d.drafts, *[NO_DRAFT] * (widest - len(d.drafts))] for d in drafted]
    return torch.tensor(padded, dtype=torch.int64, device=device)


def _padded_laws(drafted: Seq[Drafted], drafts: Tensor, vocab: int) -> Tensor:
    """The laws that the drafts came from, float64 `[B, K, vocab]`: 0 for a missing draft, one-hot for a certain one."""
    laws = torch.zeros((*drafts.shape, vocab), dtype=torch.float64, device=drafts.device)
    for i, d in enumerate(drafted):
        if d.law is not None:
            laws[i, : len(d.drafts)] = d.law
        elif d.drafts:
            laws[i, : len(d.drafts)].scatter_(1, drafts[i, : len(d.drafts), None], 1.0)
    return laws


def _offsets(lengths: Seq[int]) -> list[int]:
    """[2, 1, 3] -> [0, 2, 3, 6]."""
    offsets = [0]
    for length in lengths:
        offsets.append(offsets[-1] + length)
    return offsets
