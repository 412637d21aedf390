"""Turns logits into a distribution, and a distribution into a token. Rows are independent of the batch.

A row is one position of one sequence. Its distribution is the softmax of the processed logits (`processors`) after
these steps in this order: temperature, top-k, top-p (of the tokens that top-k keeps), min-p. Temperature 0 puts all
mass on the most likely token; ties: the lowest id.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace

import torch
from torch import Tensor

from pilotfish.engine.kernels import has_triton
from pilotfish.engine.kernels.args import Drawn, SamplerRows
from pilotfish.engine.kernels.paging import send_together
from pilotfish.engine.params import SamplingParams
from pilotfish.engine.sampling import noise
from pilotfish.engine.sampling.noise import LogitsRow

TINY = torch.finfo(torch.float32).tiny  # so that no positive temperature rounds to zero
_HOST = torch.device("cpu")


def is_truncated(wanted: SamplingParams) -> bool:
    """Whether only some tokens are possible, by top-k, top-p or min-p."""
    return wanted.temperature > 0 and bool(wanted.top_k or wanted.top_p < 1 or wanted.min_p > 0)


def any_truncated(rows: Seq[LogitsRow]) -> bool:
    """Whether any of the rows is."""
    return any(is_truncated(row.sequence.request.sampling) for row in rows)


def samplers_of(rows: Seq[LogitsRow], vocab_size: int, device: torch.device = _HOST) -> SamplerRows:
    """The sampling parameters of `rows`."""
    wanted = [row.sequence.request.sampling for row in rows]
    whole = [
        (min(p.top_k or vocab_size, vocab_size), signed(row.sequence.seed), row.position, int(row.stream))
        for p, row in zip(wanted, rows, strict=True)
    ]
    reals = torch.tensor([(p.least_mass, p.min_p) for p in wanted], dtype=torch.float64).reshape(-1, 2)
    heat = torch.tensor([max(p.temperature, TINY) if p.temperature else 0.0 for p in wanted], dtype=torch.float64)
    top_k, *where = torch.tensor(whole, dtype=torch.int64).reshape(-1, 4).unbind(1)
    return SamplerRows(*send_together((top_k, *reals.unbind(1), *where, heat.float()), device))


def signed(seed: int) -> int:
    """The int64 with the bits of a uint64: 2**64 - 1 -> -1."""
    return seed - 2**64 if seed >= 2**63 else seed


def likeliest(scores: Tensor) -> Tensor:
    """The index of the maximum of each row, the first of equal ones: `[R, n]` -> int64 `[R]`.

    For 262,144 float32 on a CPU, numpy takes a tenth of torch's time.
    """
    knows = scores.is_cpu and scores.dtype != torch.bfloat16
    return torch.from_numpy(scores.numpy().argmax(-1)) if knows else scores.argmax(-1)


def draw(logits: Tensor, samplers: SamplerRows, *, truncated: bool = True) -> Drawn:
    """Draw one token per row, as argmax of the distribution's logits plus Gumbel noise (Gumbel-max trick).

    The noise depends only on the row's seed, position and stream, so two models get the same noise for the same row:
    this is the coupling of `verify.coupled`. `logits` is `[R, vocab]`; `truncated`: whether any row may be. On CUDA our
    kernel draws, because the noise in torch would take longer than the model's pass.
    """
    if logits.is_cuda and has_triton():
        from pilotfish.engine.kernels import sampling  # imports Triton

        return sampling.choose(logits, samplers, truncated=truncated)
    return choose(logits, samplers, truncated=truncated)


def draw_rows(logits: Tensor, rows: Seq[LogitsRow]) -> Drawn:
    """The same for rows of sequences; if all are greedy, no parameters are uploaded."""
    if all(row.sequence.request.sampling.temperature == 0 for row in rows):
        return _greedy(logits)
    samplers = samplers_of(rows, logits.shape[1], logits.device)
    return draw(logits, samplers, truncated=any_truncated(rows))


def choose(logits: Tensor, samplers: SamplerRows, *, truncated: bool = True) -> Drawn:
    """`engine.kernels.sampling.choose` in plain torch; rows cost only what their parameters require."""
    drawn, sampled = _greedy(logits), samplers.temperature > 0
    limited = (samplers.top_k < logits.shape[1]) | (samplers.top_p < 1) | (samplers.min_p > 0)
    cut = sampled & limited if truncated else torch.zeros_like(sampled)
    for rows, pick in ((sampled & ~cut, _pick_of_all), (cut, _pick_of_support)):
        if rows.any():
            some = slice(None) if rows.all() else rows.nonzero().squeeze(1)
            drawn.token[some] = pick(logits[some].float(), samplers.rows(some))
    return drawn


def _greedy(logits: Tensor) -> Drawn:
    """The most likely token of each row, and its logit, which is not finite if one is NaN or all are -inf."""
    token = likeliest(logits)
    return Drawn(token, logits.gather(1, token[:, None]).squeeze(1).isfinite())


def _pick_of_all(logits: Tensor, samplers: SamplerRows) -> Tensor:
    noisy = noise.gumbel(samplers.seed, samplers.position, samplers.stream, logits.shape[1])
    return likeliest(noisy.add_(_tempered(logits, samplers)))


def _pick_of_support(logits: Tensor, samplers: SamplerRows) -> Tensor:
    scores, tokens = _support(logits, samplers)
    noisy = scores + noise.gumbel_at(samplers.seed, samplers.position, samplers.stream, tokens)
    return tokens.gather(1, noisy.argmax(-1, keepdim=True)).squeeze(1)


def probabilities(logits: Tensor, samplers: SamplerRows, *, truncated: bool = True) -> Tensor:
    """The full distribution of each row: float64 `[R, vocab]`, rows summing to 1; `truncated` as in `draw`."""
    drawn = _scores(logits, samplers, truncated=truncated).double().softmax(-1)
    greedy = torch.zeros_like(drawn).scatter_(1, logits.argmax(-1, keepdim=True), 1.0)
    return torch.where(samplers.temperature[:, None] > 0, drawn, greedy)


def _tempered(logits: Tensor, params: SamplerRows) -> Tensor:
    """Logits over temperature. The maximum is subtracted first, so the best token stays at 0 for any temperature."""
    return (logits - logits.amax(-1, keepdim=True)) / params.temperature[:, None]


def _support(logits: Tensor, params: SamplerRows) -> tuple[Tensor, Tensor]:
    """The tokens that truncation keeps, likeliest first: scores, with -inf as padding, and ids, both `[R, S]`.

    S is the largest support of these rows. Noise is computed for S tokens only, and not for the whole vocabulary.
    """
    # Stable, so that equal logits keep the order of their ids and top-k keeps exactly k.
    scores, tokens = _tempered(logits, params).sort(dim=-1, descending=True, stable=True)
    stay = kept(scores, params)
    widest = int(stay.sum(1).max())
    return scores.masked_fill(~stay, float("-inf"))[:, :widest], tokens[:, :widest]


def kept(scores: Tensor, params: SamplerRows) -> Tensor:
    """Mask of the sorted `scores` `[R, vocab]` that truncation keeps, always the first n >= 1: bool `[R, vocab]`."""
    rank = torch.arange(scores.shape[1], device=scores.device)
    by_k = rank < params.top_k[:, None]
    weight = scores.double().exp() * by_k
    # Running sums in float64: a row's result must not depend on rounding that other rows of the batch could change.
    mass = weight.cumsum(-1)
    by_p = (mass - weight < params.top_p[:, None] * mass[:, -1:]) | (params.top_p[:, None] >= 1)
    by_min_p = weight >= params.min_p[:, None] * weight[:, :1]
    return by_k & by_p & by_min_p | (rank == 0)  # a row of NaN also keeps a token; verification reports the row


def _scores(logits: Tensor, samplers: SamplerRows, *, truncated: bool) -> Tensor:
    """Logits over temperature, the best at 0; -inf for filtered tokens."""
    warm = replace(samplers, temperature=samplers.temperature.clamp(min=TINY))
    scores = _tempered(logits.float(), warm)
    if not truncated:
        return scores
    ranked, tokens = scores.sort(dim=-1, descending=True, stable=True)
    return torch.empty_like(scores).scatter_(1, tokens, ranked.masked_fill(~kept(ranked, samplers), float("-inf")))
