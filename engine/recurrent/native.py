"""The rules of `rules.py` in C: CPU, float32 and bfloat16 rows. Other sizes and types run there (`fits`)."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.native import recurrent
from engine.recurrent import rules
from engine.recurrent.plan import ScanPlan


def fits(rows: Tensor, depth: int) -> bool:
    """Whether C runs a rule over these rows, with states of this depth."""
    return recurrent.scans(rows, depth)


def conv(
    states: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None, plan: ScanPlan
) -> Tensor:
    """See `rules.conv`. `states` has the type of `x`."""
    if not fits(x, weight.shape[1]):
        return rules.conv(states, x, weight, bias, activation, plan)
    assert activation in (None, "silu"), activation
    return recurrent.scan(
        "conv", states, [x], plan.slots, len(plan.read), a=weight.float(), d=None if bias is None else bias.float(),
        out=_like(x), width=x.shape[1], depth=weight.shape[1], wide=activation == "silu",
    )  # fmt: skip


def gated_delta(states: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, plan: ScanPlan) -> Tensor:
    """See `rules.gated_delta`."""
    if not fits(v, k.shape[2]):
        return rules.gated_delta(states, q, k, v, g, beta, plan)
    return _delta(states, q, k, v, g, beta, plan)


def kimi_delta(states: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, plan: ScanPlan) -> Tensor:
    """See `rules.kimi_delta`."""
    if not fits(v, k.shape[2]):
        return rules.kimi_delta(states, q, k, v, g, beta, plan)
    return _delta(states, q, k, v, g, beta, plan)


def _delta(states: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, plan: ScanPlan) -> Tensor:
    rows = [q.to(v.dtype), k.to(v.dtype), v, g.float(), beta.float()]
    return recurrent.scan(
        "delta", states, rows, plan.slots, len(plan.read),
        out=_like(v), heads=v.shape[1], groups=k.shape[1], width=v.shape[2], depth=k.shape[2], wide=g.dim() == 3,
        corrects=True,
    )  # fmt: skip


def mamba2(states: Tensor, x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, plan: ScanPlan) -> Tensor:
    """See `rules.mamba2`."""
    if not fits(x, b.shape[2]):
        return rules.mamba2(states, x, dt, a, b, c, d, plan)
    rows = [c.to(x.dtype), b.to(x.dtype), x, dt.float() * a.float(), dt.float()]
    return recurrent.scan(
        "delta", states, rows, plan.slots, len(plan.read), d=d.float(),
        out=_like(x), heads=x.shape[1], groups=b.shape[1], width=x.shape[2], depth=b.shape[2],
    )  # fmt: skip


def mamba1(states: Tensor, x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, plan: ScanPlan) -> Tensor:
    """See `rules.mamba1`."""
    if not fits(x, b.shape[1]):
        return rules.mamba1(states, x, dt, a, b, c, d, plan)
    rows = [x, dt.float(), b.to(x.dtype), c.to(x.dtype)]
    return recurrent.scan(
        "mamba1", states, rows, plan.slots, len(plan.read), a=a.float().T.contiguous(), d=d.float(),
        out=_like(x), width=x.shape[1], depth=b.shape[1],
    )  # fmt: skip


def _like(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype)
