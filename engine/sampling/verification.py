"""Applies to ragged logits the verification rule of each sequence. The rules themselves are in `verify.py`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import replace
from functools import partial
from itertools import accumulate, islice, pairwise

import torch
from torch import Tensor

from engine.kernels.args import SamplerRows
from engine.kernels.paging import send, send_together
from engine.params import Verification
from engine.sampling import noise
from engine.sampling.distribution import any_truncated, draw, draw_rows, probabilities, samplers_of
from engine.sampling.logprobs import token_logprobs
from engine.sampling.noise import LogitsRow, Stream
from engine.sampling.processors import process
from engine.step import Outcome, Work
from engine.verify import NO_DRAFT, coupled, rejection

# By sequence: how many drafts stay, and the token after them. By row: whether its logits are numbers, before and after
# they were processed. All of one rule, from its rows of logits.
Decided = tuple[list[tuple[int, int]], list[int], list[int]]


def verify_rows(works: Seq[Work], logits: Tensor) -> list[Outcome]:
    """Verify the drafts of all sequences; `logits` `[sum of (K_i + 1), vocab]` are in the same order."""
    outcomes, firsts = dict[int, Outcome](), _offsets(works)
    for rule, decide in _RULES.items():
        mine = [i for i, work in enumerate(works) if work.sequence.speculation.verification is rule]
        if mine:
            rows = [row for i in mine for row in range(firsts[i], firsts[i + 1])]
            part = logits if len(mine) == len(works) else logits[send(torch.tensor(rows), logits.device)]
            outcomes |= zip(mine, _outcomes([works[i] for i in mine], part, decide), strict=True)
    return [outcomes[i] for i in range(len(works))]


def _outcomes(works: Seq[Work], logits: Tensor, decide: Callable[[Seq[Work], Tensor], Decided]) -> Iterator[Outcome]:
    verdicts, sound, is_open = decide(works, logits)
    for work, verdict, (first, stop) in zip(works, verdicts, pairwise(_offsets(works)), strict=True):
        # A result depends on the rows up to the one of the next token, so these must be finite.
        outcome = _outcome(work, *verdict, _num_leading(sound[first:stop]), _num_leading(is_open[first:stop]))
        wanted = work.sequence.request.sampling.logprobs
        if wanted is not None and outcome.tokens:  # of the logits before they were processed
            found = token_logprobs(logits[first : first + len(outcome.tokens)], outcome.tokens, wanted)
            outcome = replace(outcome, logprobs=found)
        yield outcome


def _outcome(work: Work, num_accepted: int, next_token: int, num_sound: int, num_open: int) -> Outcome:
    made, tokens = partial(Outcome, work, len(work.drafts)), (*work.drafts[:num_accepted], next_token)
    if num_sound < len(tokens) and num_sound <= num_open:
        return made(tokens[:num_sound], min(num_accepted, num_sound), "the model's output was not a number")
    if num_open < len(tokens):
        why = work.sequence.fault or "no token may come here: what is allowed, banned and required leaves none"
        is_known = not work.sequence.grammar_lag  # else the state of the structure lags behind
        return made(tokens[:num_open], min(num_accepted, num_open), why if is_known else None)
    return made(tokens, num_accepted)


def _coupled(works: Seq[Work], logits: Tensor) -> Decided:
    """Compare on the host what is drawn on the device: no draft is sent there for it."""
    places = _places(works, Stream.COUPLED)
    processed = process(logits, places)
    drawn = draw_rows(processed, places)
    tokens, sound, is_open = _read(drawn.token, _are_numbers(logits, drawn.sound, processed), drawn.sound)
    verdicts = []
    for work, (first, stop) in zip(works, pairwise(_offsets(works)), strict=True):
        num_accepted = coupled(tokens[first:stop], work.drafts)
        verdicts.append((num_accepted, tokens[first + num_accepted]))
    return verdicts, sound, is_open


def _rejection(works: Seq[Work], logits: Tensor) -> Decided:
    processed, vocab, device = process(logits, _places(works, Stream.COUPLED)), logits.shape[1], logits.device
    places = _places(works, Stream.RESAMPLE)
    host, truncated = samplers_of(places, vocab), any_truncated(places)
    # Drawn on the host: a number for each row, and on a GPU 150 launches for them all.
    accept = noise.uniform(host.seed, host.position, Stream.ACCEPT)
    numbers = accept, _padded_rows(works), _padded_drafts(works), *host.tensors
    accept, rows, drafts, *sent = send_together(numbers, device)
    samplers = SamplerRows(*sent)
    target_probs = probabilities(processed, samplers, truncated=truncated)[rows]

    def resample(left: Tensor, position: Tensor) -> Tensor:
        mine = samplers.rows(rows.gather(1, position[:, None]).squeeze(1))
        shaped = replace(mine, temperature=torch.ones_like(mine.temperature))
        return draw(left.float(), shaped, truncated=False).token

    verdict = rejection(target_probs, _padded_probs(works, drafts, vocab), drafts, accept[rows[:, :-1]], resample)
    are_open = processed.amax(-1).isfinite()
    columns = verdict.num_accepted, verdict.next_token, _are_numbers(logits, are_open, processed), are_open
    num_accepted, next_tokens, sound, is_open = _read(*columns)
    return list(zip(num_accepted, next_tokens, strict=True)), sound, is_open


_RULES = {Verification.COUPLED: _coupled, Verification.REJECTION: _rejection}


def _are_numbers(logits: Tensor, is_open: Tensor, processed: Tensor) -> Tensor:
    """Whether the largest of each row is a finite number: a NaN becomes the maximum."""
    return is_open if processed is logits else logits.amax(-1).isfinite()


def _read(*columns: Tensor) -> Iterator[list[int]]:
    """Bring columns to the host, in one copy: the only place where a step waits for the device."""
    numbers = iter(torch.cat(columns).tolist())
    return (list(islice(numbers, len(column))) for column in columns)


def _num_leading(kept: Seq[int]) -> int:
    """[1, 1, 0, 1] -> 2."""
    return next((i for i, is_kept in enumerate(kept) if not is_kept), len(kept))


def _places(works: Seq[Work], stream: Stream) -> list[LogitsRow]:
    """The positions of all rows."""
    return [LogitsRow(w.sequence, w.drafts[:i], stream) for w in works for i in range(w.num_rows)]


def _padded_rows(works: Seq[Work]) -> Tensor:
    """Row of each position, `[B, K + 1]`; K_i [1, 0] -> [[0, 1], [2, 2]]: padding repeats the last and is not used."""
    widest = max(work.num_rows for work in works)
    return torch.tensor(
        [[min(first + i, stop - 1) for i in range(widest)] for first, stop in pairwise(_offsets(works))]
    )


def _padded_drafts(works: Seq[Work]) -> Tensor:
    """Drafts `[B, K]`, `NO_DRAFT` where a sequence has fewer."""
    widest = max(len(work.drafts) for work in works)
    padded = [[*work.drafts, *[NO_DRAFT] * (widest - len(work.drafts))] for work in works]
    return torch.tensor(padded, dtype=torch.int64)


def _padded_probs(works: Seq[Work], drafts: Tensor, vocab: int) -> Tensor:
    """Distributions of the drafts, float64 `[B, K, vocab]`: 0 for a missing draft, one-hot without `draft_probs`."""
    probs = torch.zeros((*drafts.shape, vocab), dtype=torch.float64, device=drafts.device)
    probs.scatter_(2, drafts.clamp(min=0)[..., None], (drafts != NO_DRAFT).double()[..., None])
    for i, work in enumerate(works):
        if work.draft_probs is not None:
            probs[i, : len(work.drafts)] = work.draft_probs
    return probs


def _offsets(works: Seq[Work]) -> list[int]:
    """The first row of each sequence, and the end; K_i [1, 0, 2] -> [0, 2, 3, 6]."""
    return list(accumulate((work.num_rows for work in works), initial=0))
