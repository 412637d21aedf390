"""Draws whose parameters lie on the device, in plain torch: what `engine.kernels.sampling.choose` means.

No tensor's value is read on the host, so rows of every kind pay for the whole vocabulary and a sort; `sampling.choose`,
which knows the kinds of its rows, is faster and draws the same tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.kernels.args import Drawn, SamplerRows
from engine.sampling import noise
from engine.sampling.distribution import TINY, kept


def choose(logits: Tensor, samplers: SamplerRows, *, truncated: bool = True) -> Drawn:
    """One token per row of `logits` `[R, vocab]`; `truncated` as in the kernel."""
    largest = logits.amax(-1)
    scores = _scores(logits, largest, samplers, truncated=truncated)
    token = (noise.gumbel(samplers.seed, samplers.position, samplers.stream, logits.shape[1]) + scores).argmax(-1)
    return Drawn(torch.where(samplers.temperature > 0, token, logits.argmax(-1)), largest.isfinite())


def probabilities(logits: Tensor, samplers: SamplerRows, *, truncated: bool = True) -> Tensor:
    """The distribution of each row, as `sampling.distribution.probabilities`: float64 `[R, vocab]`."""
    drawn = _scores(logits, logits.amax(-1), samplers, truncated=truncated).double().softmax(-1)
    greedy = torch.zeros_like(drawn).scatter_(1, logits.argmax(-1, keepdim=True), 1.0)
    return torch.where(samplers.temperature[:, None] > 0, drawn, greedy)


def _scores(logits: Tensor, largest: Tensor, samplers: SamplerRows, *, truncated: bool) -> Tensor:
    """Logits over temperature, the best at 0; -inf what the filters drop."""
    scores = (logits.float() - largest.float()[:, None]) / samplers.temperature.clamp(min=TINY)[:, None]
    if not truncated:
        return scores
    ranked, tokens = scores.sort(dim=-1, descending=True, stable=True)
    left = ranked.masked_fill(~kept(ranked, samplers), float("-inf"))
    return torch.empty_like(scores).scatter_(1, tokens, left)
