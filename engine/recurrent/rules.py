"""The rules by which states change, in plain torch: one token after another, in float32. The oracle of all others.

Every function runs the rows of each sequence from the state in the slot that the plan reads, and writes the states
that the plan wants. Each operation has the same order and the same shape at every position, so the bits of a row
depend on its own sequence alone, however its tokens were cut into passes.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor

from engine.recurrent.plan import ScanPlan


def conv(
    states: Tensor,  # [slots, C, k - 1], the newest inputs
    x: Tensor,  # [S, C]
    weight: Tensor,  # [C, k]
    bias: Tensor | None,  # [C]
    activation: str | None,  # None or "silu"
    plan: ScanPlan,
) -> Tensor:
    """A causal convolution of each channel over its own k newest inputs: `[S, C]`, in the type of `x`."""
    taps = weight.float().T  # [k, C]
    out = torch.empty_like(x)
    for i, (first, stop) in enumerate(pairwise(plan.cu_rows)):
        inputs = torch.cat([states[plan.read[i]].T, x[first:stop]])  # a copy: its slot may be written below
        total = torch.zeros(stop - first, x.shape[1], device=x.device) if bias is None else bias.float()
        for tap, weights in enumerate(taps):
            total = total + inputs[tap : tap + stop - first].float() * weights
        out[first:stop] = silu(total) if activation == "silu" else total
        for num_rows, slot in plan.writes[i]:
            states[slot] = inputs[num_rows : num_rows + len(taps) - 1].T
    return out


def gated_delta(
    states: Tensor,  # [slots, H, dk, dv] float32
    q: Tensor,  # [S, G, dk], normalised and scaled; H / G heads share each
    k: Tensor,  # [S, G, dk], normalised
    v: Tensor,  # [S, H, dv]
    g: Tensor,  # [S, H], logarithms of the decay
    beta: Tensor,  # [S, H]
    plan: ScanPlan,
) -> Tensor:
    """The gated delta rule (Yang et al. 2024, arXiv:2412.06464): `[S, H, dv]`, in the type of `v`."""
    return kimi_delta(states, q, k, v, g[..., None], beta, plan)


def kimi_delta(
    states: Tensor,  # [slots, H, dk, dv] float32
    q: Tensor,  # [S, G, dk], normalised and scaled; H / G heads share each
    k: Tensor,  # [S, G, dk], normalised
    v: Tensor,  # [S, H, dv]
    g: Tensor,  # [S, H, dk], logarithms of the decay of each key channel
    beta: Tensor,  # [S, H]
    plan: ScanPlan,
) -> Tensor:
    """Kimi Delta Attention (arXiv:2510.26692), a gated delta rule by channels: `[S, H, dv]`, in the type of `v`."""
    dtype, group = v.dtype, v.shape[1] // k.shape[1]
    q, k = (rows.float().repeat_interleave(group, 1) for rows in (q, k))
    v, g, beta = (rows.float() for rows in (v, g, beta))

    def step(state: Tensor, row: int) -> tuple[Tensor, Tensor]:
        key = k[row][..., None]  # [H, dk, 1]
        state = state * torch.exp(g[row])[..., None]
        change = beta[row][:, None] * (v[row] - (state * key).sum(1))  # [H, dv]
        state = state + key * change[:, None]
        return state, (state * q[row][..., None]).sum(1)

    return _run(states, plan, step, torch.empty_like(v)).to(dtype)


def mamba2(
    states: Tensor,  # [slots, H, N, P] float32
    x: Tensor,  # [S, H, P]
    dt: Tensor,  # [S, H], after its bias, softplus and limits
    a: Tensor,  # [H], negative
    b: Tensor,  # [S, G, N]
    c: Tensor,  # [S, G, N]
    d: Tensor,  # [H]
    plan: ScanPlan,
) -> Tensor:
    """The state space of Mamba 2 (Dao and Gu 2024, arXiv:2405.21060): `[S, H, P]`, in the type of `x`."""
    dtype, group = x.dtype, x.shape[1] // b.shape[1]
    x, dt, a, d = (values.float() for values in (x, dt, a, d))
    b, c = (rows.float().repeat_interleave(group, 1) for rows in (b, c))  # [S, H, N]

    def step(state: Tensor, row: int) -> tuple[Tensor, Tensor]:
        decay = torch.exp(dt[row] * a)[:, None, None]
        state = state * decay + b[row][..., None] * (dt[row][:, None] * x[row])[:, None]
        return state, (state * c[row][..., None]).sum(1) + d[:, None] * x[row]

    return _run(states, plan, step, torch.empty_like(x)).to(dtype)


def mamba1(
    states: Tensor,  # [slots, N, I] float32
    x: Tensor,  # [S, I]
    dt: Tensor,  # [S, I], after its bias and softplus
    a: Tensor,  # [I, N], negative
    b: Tensor,  # [S, N]
    c: Tensor,  # [S, N]
    d: Tensor,  # [I]
    plan: ScanPlan,
) -> Tensor:
    """The selective state space of Mamba (Gu and Dao 2023, arXiv:2312.00752): `[S, I]`, in the type of `x`."""
    dtype = x.dtype
    x, dt, a, b, c, d = (values.float() for values in (x, dt, a, b, c, d))

    def step(state: Tensor, row: int) -> tuple[Tensor, Tensor]:
        decay = torch.exp(dt[row] * a.T)
        state = state * decay + b[row][:, None] * (dt[row] * x[row])
        return state, (state * c[row][:, None]).sum(0) + d * x[row]

    return _run(states, plan, step, torch.empty_like(x)).to(dtype)


def silu(x: Tensor) -> Tensor:
    """x * sigmoid(x), with the same bits wherever in `x` an element is: torch's own rounds the last few differently."""
    return x / (1 + torch.exp(-x))


def softplus(x: Tensor) -> Tensor:
    """log(1 + exp(x)) as in torch, but with the same bits wherever in `x` an element is."""
    return torch.where(x > 20, x, torch.log1p(torch.exp(x)))


def _run(states: Tensor, plan: ScanPlan, step: Callable[[Tensor, int], tuple[Tensor, Tensor]], out: Tensor) -> Tensor:
    """Step through all rows of all sequences. `step` returns the state after a row, and the row's output."""
    for i, (first, stop) in enumerate(pairwise(plan.cu_rows)):
        state = states[plan.read[i]].clone()
        for row in range(first, stop):
            state, out[row] = step(state, row)
            for num_rows, slot in plan.writes[i]:
                if first + num_rows == row + 1:
                    states[slot] = state
    return out
