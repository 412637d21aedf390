"""From logits to a law, and from a law to a token. Rows are independent; nothing here knows a batch.

A row is one position of one sequence. Its law is the softmax of the logits after, in this order: temperature,
top-k, top-p (of what top-k left), min-p. Temperature 0 puts all mass on the likeliest token, lowest id first.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from engine import noise
from engine.noise import Stream
from engine.types import Sequence

NEVER = float("-inf")


class Row(NamedTuple):
    """The token at absolute `position` of `sequence` is to be drawn from `stream`."""

    sequence: Sequence
    position: int
    stream: Stream


@dataclass(frozen=True, slots=True)
class RowParams:
    """Sampling parameters of R rows as tensors on the model's device."""

    temperature: Tensor  # [R] float32
    top_k: Tensor  # [R] int64, the vocabulary size where off
    top_p: Tensor  # [R] float64
    min_p: Tensor  # [R] float64
    seed: Tensor  # [R] int64, the bits of a uint64
    position: Tensor  # [R] int64
    stream: Tensor  # [R] int64
    all_greedy: bool
    truncates: bool  # some row uses top-k, top-p or min-p

    @classmethod
    def of(cls, rows: Iterable[Row], vocab_size: int, device: torch.device) -> RowParams:
        """Gather the parameters of `rows`."""
        rows = list(rows)
        wanted = [row.sequence.request.sampling for row in rows]
        reals = [(p.temperature, p.top_p, p.min_p) for p in wanted]
        whole = [
            (min(p.top_k or vocab_size, vocab_size), _signed(row.sequence.seed), row.position, int(row.stream))
            for p, row in zip(wanted, rows, strict=True)
        ]
        temperature, top_p, min_p = torch.tensor(reals, dtype=torch.float64).reshape(-1, 3).to(device).unbind(1)
        top_k, seed, position, stream = torch.tensor(whole, dtype=torch.int64).reshape(-1, 4).to(device).unbind(1)
        return cls(
            temperature=temperature.float(),
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            seed=seed,
            position=position,
            stream=stream,
            all_greedy=all(p.temperature == 0 for p in wanted),
            truncates=any(p.temperature > 0 and _truncates(p.top_k, p.top_p, p.min_p) for p in wanted),
        )


def _truncates(top_k: int, top_p: float, min_p: float) -> bool:
    return bool(top_k) or top_p < 1 or min_p > 0


def _signed(seed: int) -> int:
    """The int64 with the bits of a uint64: 2**64 - 1 -> -1."""
    return seed - 2**64 if seed >= 2**63 else seed


def choose(logits: Tensor, params: RowParams) -> Tensor:
    """Draw one token per row, int64 `[R]`, as argmax of the law's logits plus Gumbel noise (Gumbel-max trick).

    The noise is a function of the row's seed, position and stream alone, so two models that ask for the same
    row meet the same noise: that is the coupling of `verify.coupled`. `logits` is float32 `[R, vocab]`.
    """
    if params.all_greedy:
        return logits.argmax(-1)
    scores, tokens = _scores(logits, params)
    if tokens is None:
        drawn = noise.gumbel(params.seed, params.position, params.stream, scores.shape[1])
    else:
        drawn = noise.gumbel_at(params.seed, params.position, params.stream, tokens)
    best = torch.where(params.temperature[:, None] > 0, scores + drawn, scores).argmax(-1, keepdim=True)
    return (best if tokens is None else tokens.gather(1, best)).squeeze(1)


def probabilities(logits: Tensor, params: RowParams) -> Tensor:
    """The law of each row in full: float64 `[R, vocab]`, rows summing to 1."""
    scores, tokens = _scores(logits, params)
    greedy = params.temperature[:, None] == 0
    one_hot = torch.full_like(scores, NEVER).scatter(1, scores.argmax(-1, keepdim=True), 0.0)
    law = torch.where(greedy, one_hot, scores).double().softmax(-1)
    return law if tokens is None else torch.zeros_like(logits, dtype=torch.float64).scatter(1, tokens, law)


def _scores(logits: Tensor, params: RowParams) -> tuple[Tensor, Tensor | None]:
    """The law's logits, -inf where it is zero: `[R, vocab]`, or the likeliest S with their tokens, both `[R, S]`."""
    # The maximum is taken off first: however small the temperature, the best token stays at 0 and finite.
    scaled = logits - logits.amax(-1, keepdim=True)
    scaled = scaled / torch.where(params.temperature > 0, params.temperature, 1.0)[:, None]
    if not params.truncates:
        return scaled, None
    # Stable, so that equal logits keep the order of their ids and top-k keeps exactly k.
    values, tokens = scaled.sort(dim=-1, descending=True, stable=True)
    widest = int(params.top_k.max())
    values, tokens = values[:, :widest], tokens[:, :widest]
    return values.masked_fill(~_kept(values, params), NEVER), tokens


def _kept(values: Tensor, params: RowParams) -> Tensor:
    """Which of the sorted `values` `[R, S]` stay: bool `[R, S]`. The first always does."""
    rank = torch.arange(values.shape[1], device=values.device)
    by_k = rank < params.top_k[:, None]
    weight = values.double().exp() * by_k
    # Running sums in float64: a row's decision must not hinge on how wide its batch mates made the matrix.
    mass = weight.cumsum(-1)
    before = mass - weight
    by_p = (before < params.top_p[:, None] * mass[:, -1:]) | (params.top_p[:, None] >= 1)
    by_min = weight >= params.min_p[:, None] * weight[:, :1]
    stays = by_k & by_p & by_min
    return stays | (params.temperature == 0)[:, None]
