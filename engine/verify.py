"""Which drafts stay. Two exact rules in two functions, never mixed. Knows tokens and distributions only.

p is the target's distribution at a position, q the draft's.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor

NO_DRAFT = -1
# One token for each row of logits, not normalised, `[B, vocab]` float64; beside them the positions 0..K they are of.
Draw = Callable[[Tensor, Tensor], Tensor]


def coupled(drawn: Seq[int], drafts: Seq[int]) -> int:
    """Keep drafts while they *equal* what the target draws with the same noise (Daliri et al. 2024, arXiv 2408.07978).

    `drawn`: the target's own K + 1 tokens, at each position given the K `drafts` before it. Returns how many drafts
    stay; `drawn` at that place is the next token. Each kept token is the target's draw and so is the one after: the
    output is the target's sequential sample, whatever the drafts were. With p and q drawn under common noise a draft is
    kept with probability at least (1 - TV(p, q)) / (1 + TV(p, q)).
    """
    return next((i for i, (token, draft) in enumerate(zip(drawn, drafts, strict=False)) if token != draft), len(drafts))


@dataclass(frozen=True, slots=True)
class Verdict:
    """Per sequence: the first `num_accepted` drafts stay, then comes `next_token` (recovered or bonus)."""

    num_accepted: Tensor  # [B] int64
    next_token: Tensor  # [B] int64


def rejection(p: Tensor, q: Tensor, drafts: Tensor, accept: Tensor, draw: Draw) -> Verdict:
    """Keep a draft with probability min(1, p / q); else draw from max(p - q, 0), normalised.

    Leviathan et al. 2023 (arXiv 2211.17192, algorithm 1); Chen et al. 2023 (arXiv 2302.01318, theorem 1).
    `p` float64 `[B, K + 1, vocab]`, `q` float64 `[B, K, vocab]`, `drafts` `[B, K]` drawn from q; a sequence that has
    fewer is padded with `NO_DRAFT` and q = 0 everywhere, which cannot be accepted.
    `accept` `[B, K]` uniform in (0, 1); `draw` has noise of its own for each position 0..K, all independent.
    After the last draft q is 0, so the residual is p itself: the bonus token needs no case of its own.
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
    # Equal distributions leave nothing: a rejection is then an effect of rounding, and p is as right.
    return torch.where(excess.sum(-1, keepdim=True) > 0, excess, p)


def leading_run(kept: Tensor) -> Tensor:
    """Length of the leading run of True in each row: [[1, 1, 0, 1]] -> [2]."""
    return kept.long().cumprod(1).sum(1)
