"""The rules of `rules.py` in C: CPU, float32 and bfloat16 rows. Other sizes, types and devices run there (`scans`)."""

from __future__ import annotations

from torch import Tensor

from pilotfish.engine.native import recurrent
from pilotfish.engine.recurrent import rules
from pilotfish.engine.recurrent.arena import PartSlots


def conv(slots: PartSlots, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None) -> Tensor:
    """See `rules.conv`. The states have the type of `x`."""
    if not recurrent.scans(x, weight.shape[1]):
        return rules.conv(slots, x, weight, bias, activation)
    assert activation in (None, "silu"), activation
    return recurrent.scan(
        "conv", slots.states, slots.log, slots.plan.numbers, [x],
        a=weight.float(), d=None if bias is None else bias.float(),
        width=x.shape[1], depth=weight.shape[1], wide=activation == "silu",
    )  # fmt: skip


def delta(slots: PartSlots, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """See `rules.delta`."""
    if not recurrent.scans(v, k.shape[2]):
        return rules.delta(slots, q, k, v, g, beta)
    rows = [v, q.to(v.dtype), k.to(v.dtype), g.float(), beta.float()]
    return recurrent.scan(
        "delta", slots.states, slots.log, slots.plan.numbers, rows,
        heads=v.shape[1], groups=k.shape[1], width=v.shape[2], depth=k.shape[2], wide=g.dim() == 3, corrects=True,
    )  # fmt: skip


def mamba2(slots: PartSlots, x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
    """See `rules.mamba2`."""
    if not recurrent.scans(x, b.shape[2]):
        return rules.mamba2(slots, x, dt, a, b, c, d)
    rows = [x, c.to(x.dtype), b.to(x.dtype), dt.float() * a.float(), dt.float()]
    return recurrent.scan(
        "delta", slots.states, slots.log, slots.plan.numbers, rows, d=d.float(),
        heads=x.shape[1], groups=b.shape[1], width=x.shape[2], depth=b.shape[2],
    )  # fmt: skip


def mamba1(slots: PartSlots, x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
    """See `rules.mamba1`."""
    if not recurrent.scans(x, b.shape[1]):
        return rules.mamba1(slots, x, dt, a, b, c, d)
    rows = [x, dt.float(), b.to(x.dtype), c.to(x.dtype)]
    return recurrent.scan(
        "mamba1", slots.states, slots.log, slots.plan.numbers, rows, a=a.float().T.contiguous(), d=d.float(),
        width=x.shape[1], depth=b.shape[1],
    )  # fmt: skip
