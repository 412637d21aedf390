"""Turns logits into a distribution, and a distribution into a token. Rows are independent of the batch.

A row is one position of one sequence. Its distribution is the softmax of the processed logits (`processors`) after
these steps in this order: temperature, top-k, top-p (of the tokens that top-k keeps), min-p. Temperature 0 puts all
mass on the likeliest token; of equal ones, on the lowest id.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from enum import Enum

import torch
from torch import Tensor

from engine.kernels import has_triton
from engine.kernels.args import Drawn, SamplerRows
from engine.kernels.paging import send
from engine.params import SamplingParams
from engine.sampling import noise
from engine.sampling.noise import LogitsRow

TINY = torch.finfo(torch.float32).tiny  # no positive temperature rounds to zero


class Kind(Enum):
    """The kind of a row's distribution, which decides how much work it takes."""

    GREEDY = "greedy"  # an argmax
    WHOLE = "whole"  # only temperature: every token is possible
    TRUNCATED = "cut"  # top-k, top-p or min-p: only some tokens are possible

    @classmethod
    def of(cls, wanted: SamplingParams) -> Kind:
        """The kind of a request's rows."""
        if wanted.temperature == 0:
            return cls.GREEDY
        return cls.TRUNCATED if wanted.top_k or wanted.top_p < 1 or wanted.min_p > 0 else cls.WHOLE


@dataclass(frozen=True, slots=True)
class RowParams:
    """Sampling parameters of R rows on the model's device, and on the host the kind of each."""

    samplers: SamplerRows
    kinds: tuple[Kind, ...]

    @classmethod
    def of(cls, rows: Iterable[LogitsRow], vocab_size: int, device: torch.device) -> RowParams:
        """Gather the parameters of `rows`."""
        rows = list(rows)
        wanted = [row.sequence.request.sampling for row in rows]
        reals = [(max(p.temperature, TINY) if p.temperature else 0.0, p.least_mass, p.min_p) for p in wanted]
        whole = [
            (min(p.top_k or vocab_size, vocab_size), signed(row.sequence.seed), row.position, int(row.stream))
            for p, row in zip(wanted, rows, strict=True)
        ]
        temperature, top_p, min_p = send(torch.tensor(reals, dtype=torch.float64).reshape(-1, 3), device).unbind(1)
        top_k, seed, position, stream = send(torch.tensor(whole, dtype=torch.int64).reshape(-1, 4), device).unbind(1)
        samplers = SamplerRows(temperature.float(), top_k, top_p, min_p, seed, position, stream)
        return cls(samplers, tuple(map(Kind.of, wanted)))

    @property
    def truncated(self) -> bool:
        return Kind.TRUNCATED in self.kinds

    def rows(self, kind: Kind) -> Tensor | slice | None:
        """Which rows are of this kind: an index, all of them, or none."""
        found = [i for i, k in enumerate(self.kinds) if k is kind]
        if not found:
            return None
        return slice(None) if len(found) == len(self.kinds) else send(torch.tensor(found), self.samplers.seed.device)


def signed(seed: int) -> int:
    """The int64 with the bits of a uint64: 2**64 - 1 -> -1."""
    return seed - 2**64 if seed >= 2**63 else seed


def likeliest(scores: Tensor) -> Tensor:
    """The place of the largest of each row, the first of equal ones: `[R, n]` -> int64 `[R]`.

    Of 262,144 float32 on a CPU numpy finds it in a tenth of the time that torch takes.
    """
    knows = scores.is_cpu and scores.dtype != torch.bfloat16
    return torch.from_numpy(scores.numpy().argmax(-1)) if knows else scores.argmax(-1)


def choose(logits: Tensor, params: RowParams) -> Tensor:
    """Draw one token per row, int64 `[R]`, as argmax of the distribution's logits plus Gumbel noise (Gumbel-max trick).

    The noise depends only on the row's seed, position and stream, so two models get the same noise for the same row:
    this is the coupling of `verify.coupled`. `logits` is float32 `[R, vocab]`. On CUDA our kernel draws: torch's
    operations for the noise alone would take longer than the model's pass.
    """
    if logits.is_cuda and has_triton():
        from engine.kernels import sampling  # imports Triton

        return sampling.choose(logits, params.samplers, truncated=params.truncated).token
    chosen = likeliest(logits)
    rows = params.rows(Kind.WHOLE)
    if rows is not None:
        p = params.samplers.rows(rows)
        drawn = noise.gumbel(p.seed, p.position, p.stream, logits.shape[1])
        chosen[rows] = likeliest(drawn.add_(_tempered(logits[rows], p)))
    rows = params.rows(Kind.TRUNCATED)
    if rows is not None:
        p = params.samplers.rows(rows)
        scores, tokens = _support(logits[rows], p)
        best = (scores + noise.gumbel_at(p.seed, p.position, p.stream, tokens)).argmax(-1, keepdim=True)
        chosen[rows] = tokens.gather(1, best).squeeze(1)
    return chosen


def draw(logits: Tensor, rows: Seq[LogitsRow]) -> Tensor:
    """As `choose`, for rows of any kind: where all are greedy, no tensors of parameters are made for nothing."""
    if all(Kind.of(row.sequence.request.sampling) is Kind.GREEDY for row in rows):
        return likeliest(logits)
    return choose(logits, RowParams.of(rows, logits.shape[1], logits.device))


def probabilities(logits: Tensor, samplers: SamplerRows, *, truncated: bool = True) -> Tensor:
    """The full distribution of each row: float64 `[R, vocab]`, rows summing to 1; `truncated` as in `choose_unread`."""
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
    """Which of the sorted `scores` `[R, vocab]` truncation keeps, always the first n >= 1: bool `[R, vocab]`."""
    rank = torch.arange(scores.shape[1], device=scores.device)
    by_k = rank < params.top_k[:, None]
    weight = scores.double().exp() * by_k
    # Running sums in float64: a row's decision must not depend on rounding that its batch mates could change.
    mass = weight.cumsum(-1)
    by_p = (mass - weight < params.top_p[:, None] * mass[:, -1:]) | (params.top_p[:, None] >= 1)
    by_min_p = weight >= params.min_p[:, None] * weight[:, :1]
    return by_k & by_p & by_min_p | (rank == 0)  # a row of NaN keeps a token too, and verification reports the row


def choose_unread(logits: Tensor, samplers: SamplerRows, *, truncated: bool = True) -> Drawn:
    """As `choose` where parameters are on the device alone, for rounds: what `engine.kernels.sampling.choose` means.

    Rows of every kind pay for the whole vocabulary, and for a sort where any may be `truncated`.
    """
    noisy = noise.gumbel(samplers.seed, samplers.position, samplers.stream, logits.shape[1])
    token = (noisy + _scores(logits, samplers, truncated=truncated)).argmax(-1)
    return Drawn(torch.where(samplers.temperature > 0, token, logits.argmax(-1)), logits.amax(-1).isfinite())


def _scores(logits: Tensor, samplers: SamplerRows, *, truncated: bool) -> Tensor:
    """Logits over temperature, the best at 0; -inf what the filters drop."""
    warm = replace(samplers, temperature=samplers.temperature.clamp(min=TINY))
    scores = _tempered(logits.float(), warm)
    if not truncated:
        return scores
    ranked, tokens = scores.sort(dim=-1, descending=True, stable=True)
    return torch.empty_like(scores).scatter_(1, tokens, ranked.masked_fill(~kept(ranked, samplers), float("-inf")))
