"""Log-probabilities of tokens under the target's distribution: log-softmax of its logits, before all processors.

This distribution does not depend on sampling parameters, so values of different requests are comparable. It is
defined at every position, with and without drafts.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from pilotfish.engine.types import Logprob, Sequence, TopLogprob

_ROWS = 32  # rows converted to float64 at a time: a row of 150,000 tokens takes several megabytes


def token_logprobs(logits: Tensor, tokens: Seq[int], top: int) -> tuple[Logprob, ...]:
    """Logprobs of token i at row i of `logits` `[R, vocab]` and of the `top` likeliest tokens; ties: lower id first."""
    parts = (range(start, min(start + _ROWS, len(logits))) for start in range(0, len(logits), _ROWS))
    return tuple(
        found for part in parts for found in _of_rows(logits[part.start : part.stop], tokens[part.start :], top)
    )


def _of_rows(logits: Tensor, tokens: Seq[int], top: int) -> Iterator[Logprob]:
    logprobs = logits.double().log_softmax(-1)
    ids = torch.tensor(tokens[: len(logits)], device=logprobs.device)
    chosen = logprobs.gather(1, ids[:, None]).squeeze(1).tolist()
    if not top:
        return map(Logprob, chosen)
    values, places = (found.tolist() for found in _sorted(logprobs, top))
    return map(Logprob, chosen, (tuple(map(TopLogprob, *each)) for each in zip(places, values, strict=True)))


def _sorted(logprobs: Tensor, top: int) -> tuple[Tensor, Tensor]:
    """Return values and ids `[R, top]`, largest first, of equal ones the lower id first.

    Sorting whole rows would take ten times as long. `topk` may choose any of equal values: then the row is sorted.
    """
    most = min(top + 1, logprobs.shape[1])
    best, places = logprobs.topk(most)
    ids, by_id = places[:, :top].sort()
    values, by_value = best[:, :top].gather(1, by_id).sort(descending=True, stable=True)
    ids = ids.gather(1, by_value)
    ties = (best[:, top - 1] == best[:, top]).nonzero().squeeze(1) if most > top else ()
    if len(ties):
        all_values, all_ids = logprobs[ties].sort(dim=-1, descending=True, stable=True)
        values[ties], ids[ties] = all_values[:, :top], all_ids[:, :top]
    return values, ids


def record_prompt(sequence: Sequence, start: int, logits: Tensor) -> None:
    """Add to `sequence.prompt_logprobs`; row i of `logits` predicts the token after position `start + i`."""
    known = sequence.prompt_logprobs or [None]  # nothing precedes the first token
    skip = len(known) - 1 - start
    assert skip >= 0, "prompt positions were left out"
    tokens = sequence.request.token_ids[len(known) : start + 1 + len(logits)]
    wanted = sequence.request.sampling.prompt_logprobs
    assert wanted is not None, "not requested"
    found = token_logprobs(logits[skip : skip + len(tokens)], tokens, wanted) if tokens else ()
    sequence.prompt_logprobs = [*known, *found]
