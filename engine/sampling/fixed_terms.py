"""Tensors that follow from a request alone: forbidden tokens, biases, counts of the prompt's tokens.

They are made once for all outputs of the request, whatever the number of steps, outputs and drafts: a request may name
every token of the vocabulary, and have a prompt as long as the context.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from engine.types import Sequence


def forbidden(sequence: Sequence, like: Tensor) -> Tensor | None:
    """Bool `[vocab]`, True for banned tokens and for all but the allowed ones; None if the request names none."""
    wanted = sequence.request.sampling
    if not wanted.banned_token_ids and wanted.allowed_token_ids is None:
        return None

    def make() -> Tensor:
        mask = torch.full(like.shape[1:], wanted.allowed_token_ids is not None, device=like.device)
        if wanted.allowed_token_ids is not None:
            mask[_ids(wanted.allowed_token_ids, like)] = False
        mask[_ids(wanted.banned_token_ids, like)] = True
        return mask

    return _once(sequence, "forbidden", like, make)


def biases(sequence: Sequence, like: Tensor) -> tuple[Tensor, Tensor] | None:
    """Int64 ids and their biases, in the type of `like`; None if the request has none."""
    wanted = sequence.request.sampling.logit_bias
    if not wanted:
        return None
    ids = _once(sequence, "biased", like, lambda: _ids(wanted, like))
    values = _once(
        sequence, "bias", like, lambda: torch.tensor(list(wanted.values()), device=like.device).to(like.dtype)
    )
    return ids, values


def prompt_counts(sequence: Sequence, like: Tensor) -> Tensor:
    """Float32 `[vocab]`: how often each token is in the prompt. Small whole numbers are exact in any order of sums."""
    return _once(sequence, "prompt", like, lambda: counted(sequence.request.token_ids, like))


def output_counts(sequence: Sequence, like: Tensor) -> Tensor:
    """Float32 `[vocab]`: how often each token was generated. Only tokens that are new since the last call are read."""
    counts, start = sequence.output_counts, sequence.prompt_len + sequence.num_counted
    if counts is None or counts.shape != like.shape[1:] or counts.device != like.device:
        counts, start = torch.zeros(like.shape[1], device=like.device), sequence.prompt_len
    if start < len(sequence.tokens):
        counts = counts + counted(sequence.tokens[start:], like)
    sequence.output_counts, sequence.num_counted = counts, sequence.num_generated
    return counts


def counted(tokens: Iterable[int], like: Tensor) -> Tensor:
    """Float32 `[vocab]`: how often each token occurs; [3, 3, 1] -> 2 at token 3, 1 at token 1."""
    ids = _ids(tokens, like)
    counts = torch.zeros(like.shape[1], device=like.device)
    return counts.index_add_(0, ids, torch.ones(len(ids), device=like.device))


def _once(sequence: Sequence, name: str, like: Tensor, make: Callable[[], Tensor]) -> Tensor:
    """Return what `make` returned the first time; a draft model's logits may have another width and device."""
    key = (name, like.shape[1], like.device, like.dtype)
    found = sequence.shared.get(key)
    if found is None:
        found = sequence.shared[key] = make()
    return found


def _ids(tokens: Iterable[int], like: Tensor) -> Tensor:
    return torch.tensor(list(tokens), dtype=torch.int64, device=like.device)
