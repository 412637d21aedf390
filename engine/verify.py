"""The verification rules: two exact rules in two separate functions over tokens and distributions.

p is the target's distribution at a position, q the draft's.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor

NO_DRAFT = -1
# Draws one token per row of unnormalised probabilities `[B, vocab]` float64, given the positions 0..K of the rows.
Draw = Callable[[Tensor, Tensor], Tensor]


def coupled(drawn: Seq[int], drafts: Seq[int]) -> int:
    """Accept drafts while they *equal* the target's draws with the same noise (Daliri et al. 2024, arXiv 2408.07978).

    `drawn`: the target's K + 1 tokens, each given the `drafts` before it. Returns the number of accepted drafts;
    `drawn` at that position is the next token. Each accepted token and the next one are the target's draws: the output
    is the target's sequential sample for any drafts. With p and q drawn with common noise, a draft is accepted with
    probability at least (1 - TV(p, q)) / (1 + TV(p, q)).
    """
    return next((i for i, (token, draft) in enumerate(zip(drawn, drafts, strict=False)) if token != draft), len(drafts))


@dataclass(frozen=True, slots=True)
class Verdict:
    """Per sequence: the number of accepted drafts, and the next token (recovered or bonus)."""

    num_accepted: Tensor  # [B] int64
    next_token: Tensor  # [B] int64


def rejection(p: Tensor, q: Tensor, drafts: Tensor, accept: Tensor, draw: Draw) -> Verdict:
    """Accept a draft with probability min(1, p / q); else draw from max(p - q, 0), normalised.

    Leviathan et al. 2023 (arXiv 2211.17192, algorithm 1); Chen et al. 2023 (arXiv 2302.01318, theorem 1).
    `p` float64 `[B, K + 1, vocab]`, `q` float64 `[B, K, vocab]`, `drafts` `[B, K]` drawn from q; a sequence with fewer
    is padded with `NO_DRAFT` and q = 0, which cannot be accepted. `accept` `[B, K]` uniform in (0, 1); `draw` has
    independent noise for each position 0..K. After the last draft q is 0, so the residual is p: the bonus token is not
    a special case.
    """
    at = drafts.clamp(min=0)[..., None]
    chance_p = p[:, :-1].gather(-1, at).squeeze(-1)
    chance_q = q.gather(-1, at).squeeze(-1)
    num_accepted = leading_run((accept * chance_q < chance_p) & (drafts != NO_DRAFT))
    row = num_accepted[:, None, None].expand(-1, 1, p.shape[-1])
    q_padded = torch.cat([q, torch.zeros_like(p[:, :1])], 1)
    left = residual(p.gather(1, row), q_padded.gather(1, row)).squeeze(1)
    return Verdict(num_accepted, draw(left.log(), num_accepted))


def residual(p: Tensor, q: Tensor) -> Tensor:
    """The distribution after a rejection, max(p - q, 0), not normalised; `[..., vocab]`."""
    excess = (p - q).clamp(min=0)
    # Equal distributions have no residual: the rejection is then a rounding error, and p is equally correct.
    return torch.where(excess.sum(-1, keepdim=True) > 0, excess, p)


def leading_run(kept: Tensor) -> Tensor:
    """Length of the leading run of True in each row: [[1, 1, 0, 1]] -> [2]."""
    return kept.long().cumprod(1).sum(1)
