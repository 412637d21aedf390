"""Applies the verification rule of each sequence to ragged logits. The rules are in `verify.py`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import replace
from itertools import accumulate, islice, pairwise

import torch
from torch import Tensor

from pilotfish.engine.kernels.args import SamplerRows
from pilotfish.engine.kernels.paging import send, send_together
from pilotfish.engine.params import Verification
from pilotfish.engine.sampling import noise
from pilotfish.engine.sampling.distribution import any_truncated, draw, draw_rows, probabilities, samplers_of
from pilotfish.engine.sampling.logprobs import token_logprobs
from pilotfish.engine.sampling.noise import LogitsRow, Stream
from pilotfish.engine.sampling.processors import process
from pilotfish.engine.step import Work
from pilotfish.engine.verify import NO_DRAFT, coupled, rejection

# By sequence: the number of accepted drafts, and the next token. By row: whether its logits are finite, before and
# after processing. For all sequences of one rule, from its rows of logits.
Decided = tuple[list[tuple[int, int]], list[int], list[int]]


def verify_rows(works: Seq[Work], logits: Tensor) -> list[Work]:
    """Return the works with what is decided of those whose newest token was fed.

    `logits` `[sum of num_rows, vocab]` are in the order of the works.
    """
    verified, firsts = list(works), _offsets(works)
    for rule, decide in _RULES.items():
        mine = [i for i, w in enumerate(works) if w.num_rows and w.sequence.speculation.verification is rule]
        if mine:
            rows = [row for i in mine for row in range(firsts[i], firsts[i + 1])]
            part = logits if len(rows) == len(logits) else logits[send(torch.tensor(rows), logits.device)]
            for i, work in zip(mine, _verified([works[i] for i in mine], part, decide), strict=True):
                verified[i] = work
    return verified


def _verified(works: Seq[Work], logits: Tensor, decide: Callable[[Seq[Work], Tensor], Decided]) -> Iterator[Work]:
    verdicts, sound, is_open = decide(works, logits)
    for before, verdict, (first, stop) in zip(works, verdicts, pairwise(_offsets(works)), strict=True):
        # A result depends on the rows up to that of the next token, so these must be finite.
        work = _with_tokens(before, *verdict, _num_leading(sound[first:stop]), _num_leading(is_open[first:stop]))
        wanted = work.sequence.request.sampling.logprobs
        if wanted is not None and work.tokens:  # of the logits before they were processed
            found = token_logprobs(logits[first : first + len(work.tokens)], work.tokens, wanted)
            work = replace(work, logprobs=found)
        yield work


def _with_tokens(work: Work, num_accepted: int, next_token: int, num_sound: int, num_open: int) -> Work:
    tokens, problem = (*work.drafts[:num_accepted], next_token), None
    if num_sound < len(tokens) and num_sound <= num_open:
        tokens, problem = tokens[:num_sound], "the model's logits were not finite"
    elif num_open < len(tokens):
        tokens = tokens[:num_open]
        if not work.sequence.grammar_lag:  # else the state of the structure lags behind
            problem = work.sequence.fault or "no token is possible: allowed, banned and required tokens exclude all"
    num_accepted = min(num_accepted, len(tokens))
    return replace(work, num_verified=len(work.drafts), num_accepted=num_accepted, tokens=tokens, problem=problem)


def _coupled(works: Seq[Work], logits: Tensor) -> Decided:
    """Compare drafts on the host with the tokens drawn on the device, so that drafts are not uploaded."""
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
    # Drawn on the host: one number per row, which on a GPU would take 150 launches.
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
    """Whether the maximum of each row is finite; a NaN becomes the maximum."""
    return is_open if processed is logits else logits.amax(-1).isfinite()


def _read(*columns: Tensor) -> Iterator[list[int]]:
    """Copy columns to the host in one transfer: the only place where a step waits for the device."""
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
