"""Log-probabilities of tokens under the target's distribution: log-softmax of its logits, before all processors.

This distribution does not depend on sampling parameters, so numbers of different requests can be compared. It is
defined at every position, with and without drafts.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from engine.types import Logprob, Sequence, TopLogprob


def token_logprobs(logits: Tensor, tokens: Seq[int], top: int) -> tuple[Logprob, ...]:
    """Logprobs of token i at row i of `logits` `[R, vocab]` and of the `top` likeliest tokens; ties: lower id first."""
    samplers = logits.double().log_softmax(-1)
    chosen = samplers.gather(1, torch.tensor(tokens, device=samplers.device)[:, None]).squeeze(1).tolist()
    best = _likeliest(samplers, top)
    return tuple(Logprob(logprob, candidates) for logprob, candidates in zip(chosen, best, strict=True))


def _likeliest(samplers: Tensor, top: int) -> list[tuple[TopLogprob, ...]]:
    if not top:
        return [()] * len(samplers)
    values, ids = samplers.sort(dim=-1, descending=True, stable=True)
    pairs = zip(ids[:, :top].tolist(), values[:, :top].tolist(), strict=True)
    return [tuple(map(TopLogprob, tokens, logprobs)) for tokens, logprobs in pairs]


def record_prompt(sequence: Sequence, start: int, logits: Tensor) -> None:
    """Add to `sequence.prompt_logprobs`; row i of `logits` predicts the token after position `start + i`."""
    known = sequence.prompt_logprobs or [None]  # nothing precedes the first token
    skip = len(known) - 1 - start
    assert skip >= 0, "prompt positions were left out"
    tokens = sequence.request.token_ids[len(known) : start + 1 + len(logits)]
    wanted = sequence.request.sampling.prompt_logprobs
    assert wanted is not None, "nobody asked"
    found = token_logprobs(logits[skip : skip + len(tokens)], tokens, wanted) if tokens else ()
    sequence.prompt_logprobs = [*known, *found]
