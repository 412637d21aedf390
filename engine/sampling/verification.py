"""Applies to ragged logits the verification rule of each sequence. The rules themselves are in `verify.py`."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from engine.kernels.paging import send
from engine.params import Verification
from engine.sampling import distribution, noise
from engine.sampling.distribution import Kind, RowParams, signed
from engine.sampling.logprobs import token_logprobs
from engine.sampling.noise import LogitsRow, Stream
from engine.sampling.processors import process
from engine.types import Logprob, Sequence
from engine.verify import NO_DRAFT, Verdict, coupled, leading_run, rejection


@dataclass(frozen=True, slots=True)
class VerifyInput:
    """A sequence whose newest token was fed, with its drafts and their distributions (None: probability 1 each)."""

    sequence: Sequence
    drafts: tuple[int, ...]
    draft_probs: Tensor | None = None  # [len(drafts), vocab], float64

    @property
    def num_rows(self) -> int:
        """The number of rows of logits: one after the newest token and one after each draft."""
        return len(self.drafts) + 1

    def rows(self, stream: Stream) -> list[LogitsRow]:
        """The positions of these rows."""
        return [LogitsRow(self.sequence, self.drafts[:i], stream) for i in range(self.num_rows)]


@dataclass(frozen=True, slots=True)
class VerifyOutput:
    """The result of one step for one sequence: tokens, and a problem if the output cannot continue after them.

    Plain decoding would meet `problem` only after these tokens, and never if one of them ends the output.
    """

    sequence: Sequence
    num_draft: int  # that were verified
    tokens: tuple[int, ...]  # accepted drafts, then the target's own token
    num_accepted: int
    problem: str | None = None
    logprobs: tuple[Logprob, ...] = ()  # of `tokens`, where asked for


def verify_rows(fed: Seq[VerifyInput], logits: Tensor) -> list[VerifyOutput]:
    """Verify the drafts of all sequences; `logits` `[sum of (K_i + 1), vocab]` are in the same order."""
    outcomes, first_rows = dict[int, VerifyOutput](), _offsets(fed)
    for rule, decide in _RULES.items():
        mine = [i for i, f in enumerate(fed) if f.sequence.speculation.verification is rule]
        if mine:
            rows = [row for i in mine for row in range(first_rows[i], first_rows[i + 1])]
            part = logits if len(mine) == len(fed) else logits[send(torch.tensor(rows), logits.device)]
            outcomes |= zip(mine, _decide(decide, [fed[i] for i in mine], part), strict=True)
    return [outcomes[i] for i in range(len(fed))]


Decide = Callable[[Seq[VerifyInput], Tensor, Tensor], Verdict]


def _decide(decide: Decide, fed: Seq[VerifyInput], logits: Tensor) -> list[VerifyOutput]:
    """Apply one rule to the sequences that use it."""
    processed = process(logits, [row for f in fed for row in f.rows(Stream.COUPLED)])
    rows = _padded_rows(fed, logits.device)
    verdict = decide(fed, processed, rows)
    # A result depends on the rows up to the one of the next token, so these must be finite; a NaN becomes the maximum.
    num_sound = leading_run(logits.amax(-1).isfinite()[rows])
    num_open = num_sound if processed is logits else leading_run(processed.amax(-1).isfinite()[rows])
    columns = [verdict.num_accepted, verdict.next_token, num_sound, num_open]
    answers = torch.stack(columns, 1).tolist()  # the only place where a step waits for the device
    outcomes = [_outcome(f, *answer) for f, answer in zip(fed, answers, strict=True)]
    return _with_logprobs(fed, logits, outcomes)


def _outcome(fed: VerifyInput, num_accepted: int, next_token: int, num_sound: int, num_open: int) -> VerifyOutput:
    made, tokens = partial(VerifyOutput, fed.sequence, len(fed.drafts)), (*fed.drafts[:num_accepted], next_token)
    if num_sound < len(tokens) and num_sound <= num_open:
        return made(tokens[:num_sound], min(num_accepted, num_sound), "the model's output was not a number")
    if num_open < len(tokens):
        why = fed.sequence.fault or "no token may come here: what is allowed, banned and required leaves none"
        is_known = not fed.sequence.grammar_lag  # else the state of the structure lags behind
        return made(tokens[:num_open], min(num_accepted, num_open), why if is_known else None)
    return made(tokens, num_accepted)


def _with_logprobs(fed: Seq[VerifyInput], logits: Tensor, outcomes: list[VerifyOutput]) -> list[VerifyOutput]:
    """Add log-probabilities of the unprocessed logits to the outcomes of sequences that asked for them."""
    for i, (f, outcome, first) in enumerate(zip(fed, outcomes, _offsets(fed), strict=False)):
        wanted = f.sequence.request.sampling.logprobs
        if wanted is not None and outcome.tokens:
            found = token_logprobs(logits[first : first + len(outcome.tokens)], outcome.tokens, wanted)
            outcomes[i] = replace(outcome, logprobs=found)
    return outcomes


def _coupled(fed: Seq[VerifyInput], logits: Tensor, rows: Tensor) -> Verdict:
    tokens = distribution.draw(logits, [row for f in fed for row in f.rows(Stream.COUPLED)])
    return coupled(tokens[rows], _padded_drafts(fed, logits.device))


def _rejection(fed: Seq[VerifyInput], logits: Tensor, rows: Tensor) -> Verdict:
    places = [row for f in fed for row in f.rows(Stream.RESAMPLE)]
    params = RowParams.of(places, logits.shape[1], logits.device)
    vocab, drafts = logits.shape[1], _padded_drafts(fed, logits.device)
    target_probs = distribution.probabilities(logits, params.samplers, truncated=params.truncated)[rows]
    draft_probs = _padded_draft_probs(fed, drafts, vocab)
    # Drawn on the host: a number for each row, and on a GPU 150 launches for them all.
    seeds = torch.tensor([signed(place.sequence.seed) for place in places])
    accept = noise.uniform(seeds, torch.tensor([place.position for place in places]), Stream.ACCEPT)

    def resample(left: Tensor, position: Tensor) -> Tensor:
        samplers = params.samplers.rows(rows.gather(1, position[:, None]).squeeze(1))
        shaped = replace(samplers, temperature=torch.ones_like(samplers.temperature))
        return distribution.choose(left.float(), RowParams(shaped, (Kind.WHOLE,) * len(left)))

    return rejection(target_probs, draft_probs, drafts, send(accept, logits.device)[rows[:, :-1]], resample)


_RULES: dict[Verification, Decide] = {Verification.COUPLED: _coupled, Verification.REJECTION: _rejection}


def _padded_rows(fed: Seq[VerifyInput], device: torch.device) -> Tensor:
    """Row of each position, `[B, K + 1]`; K_i [1, 0] -> [[0, 1], [2, 2]]: padding repeats the last and is not used."""
    widest = max(f.num_rows for f in fed)
    rows = [[min(first + i, stop - 1) for i in range(widest)] for first, stop in pairwise(_offsets(fed))]
    return send(torch.tensor(rows), device)


def _padded_drafts(fed: Seq[VerifyInput], device: torch.device) -> Tensor:
    """Drafts `[B, K]`, `NO_DRAFT` where a sequence has fewer."""
    widest = max(len(f.drafts) for f in fed)
    padded = [[*f.drafts, *[NO_DRAFT] * (widest - len(f.drafts))] for f in fed]
    return send(torch.tensor(padded, dtype=torch.int64), device)


def _padded_draft_probs(fed: Seq[VerifyInput], drafts: Tensor, vocab: int) -> Tensor:
    """Distributions of the drafts, float64 `[B, K, vocab]`: 0 for a missing draft, one-hot without `draft_probs`."""
    probs = torch.zeros((*drafts.shape, vocab), dtype=torch.float64, device=drafts.device)
    probs.scatter_(2, drafts.clamp(min=0)[..., None], (drafts != NO_DRAFT).double()[..., None])
    for i, f in enumerate(fed):
        if f.draft_probs is not None:
            probs[i, : len(f.drafts)] = f.draft_probs
    return probs


def _offsets(fed: Seq[VerifyInput]) -> list[int]:
    """The first row of each sequence, and the end; K_i [1, 0, 2] -> [0, 2, 3, 6]."""
    return list(accumulate((f.num_rows for f in fed), initial=0))
