"""The state updates in plain torch: token by token, in float32. The oracle of all other implementations.

Every function runs the rows of each sequence from the state in the slot that the plan reads. It first applies rows of
that slot's log, then the new ones; it writes the planned states, and logs the rows that may be rolled back. The log
contains state updates instead of layer inputs, so no row is computed twice. Each operation has the same order and shape
at every position, so the bits of a row depend only on its own sequence, however its tokens were split into passes.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from pilotfish.engine.recurrent.arena import PartSlots


def conv(
    slots: PartSlots,  # of states [slots, C, k - 1], the latest inputs; logged: x
    x: Tensor,  # [T, C]
    weight: Tensor,  # [C, k]
    bias: Tensor | None,  # [C]
    activation: str | None,  # None or "silu"
) -> Tensor:
    """A causal depthwise convolution over the k latest inputs: `[T, C]`, in the type of `x`."""
    taps, states, log = weight.float().T, slots.states, slots.log  # [k, C]
    out, before = torch.empty_like(x), weight.shape[1] - 1
    for scan in slots.plan.scans:
        new = range(before + scan.replayed, before + scan.num_rows)
        inputs = torch.cat([states[scan.read].T, log[scan.read, : scan.replayed], x[scan.first : scan.stop]])
        total = torch.zeros(len(new), x.shape[1], device=x.device) if bias is None else bias.float()
        for tap, weights in enumerate(taps, start=-before):
            total = total + inputs[new.start + tap : new.stop + tap].float() * weights
        out[scan.first : scan.stop] = silu(total) if activation == "silu" else total
        for num_rows, slot in scan.writes:
            states[slot] = inputs[num_rows : num_rows + before].T
        fresh = max(scan.settled, scan.replayed)  # the first row that goes to the log
        log[scan.write, fresh - scan.settled : scan.num_rows - scan.settled] = inputs[before + fresh :]
    return out


def delta(
    slots: PartSlots,  # of states [slots, H, dk, dv] float32; logged: k, v, g
    q: Tensor,  # [T, G, dk], normalised and scaled; H / G heads share each
    k: Tensor,  # [T, G, dk], normalised
    v: Tensor,  # [T, H, dv]
    g: Tensor,  # [T, H], logarithms of the decay, or [T, H, dk], of that of each key channel
    beta: Tensor,  # [T, H]
) -> Tensor:
    """The gated delta rule (arXiv:2412.06464), or Kimi's by channels (2510.26692): `[T, H, dv]`, in the type of `v`."""
    g = g if g.dim() == 3 else g[..., None]
    keys, wanted, steps = _by_head(k, v.shape[1]), v.float(), beta.float()[..., None]

    def change(state: Tensor, row: int) -> Tensor:
        seen = (state * torch.exp(g[row].float())[..., None] * keys[row][..., None]).sum(1)
        return steps[row] * (wanted[row] - seen)

    return _outer(slots, q, k, g, change, torch.empty_like(v, dtype=torch.float32)).to(v.dtype)


def mamba2(
    slots: PartSlots,  # of states [slots, H, N, P] float32; logged: b, dt * x, dt * a
    x: Tensor,  # [T, H, P]
    dt: Tensor,  # [T, H], after its bias, softplus and limits
    a: Tensor,  # [H], negative
    b: Tensor,  # [T, G, N]
    c: Tensor,  # [T, G, N]
    d: Tensor,  # [H]
) -> Tensor:
    """The state space of Mamba 2 (Dao and Gu 2024, arXiv:2405.21060): `[T, H, P]`, in the type of `x`."""
    fed, steps = x.float(), dt.float()[..., None]  # [T, H, 1]

    def change(_: Tensor, row: int) -> Tensor:
        return steps[row] * fed[row]

    out = _outer(slots, c, b, steps * a.float()[:, None], change, torch.empty_like(fed))
    return (out + d.float()[:, None] * fed).to(x.dtype)


def mamba1(
    slots: PartSlots,  # of states [slots, N, I] float32; logged: b, dt * x, dt
    x: Tensor,  # [T, I]
    dt: Tensor,  # [T, I], after its bias and softplus
    a: Tensor,  # [I, N], negative
    b: Tensor,  # [T, N]
    c: Tensor,  # [T, N]
    d: Tensor,  # [I]
) -> Tensor:
    """The selective state space of Mamba (Gu and Dao 2023, arXiv:2312.00752): `[T, I]`, in the type of `x`."""
    fed, steps, decays = x.float(), dt.float(), a.float().T
    entries = torch.cat([b.float(), steps * fed, steps], 1)
    sizes = [b.shape[1], *x.shape[1:], *x.shape[1:]]

    def apply(state: Tensor, entry: Tensor) -> Tensor:
        key, added, step = _split(entry, sizes)
        return state * torch.exp(step * decays) + key[:, None] * added

    def read(state: Tensor, row: int) -> Tensor:
        return (state * c[row].float()[:, None]).sum(0)

    out = _run(slots, lambda _, row: entries[row], apply, read, torch.empty_like(fed))
    return (out + d.float() * fed).to(x.dtype)


def silu(x: Tensor) -> Tensor:
    """x * sigmoid(x), with bits independent of an element's position: torch's rounds the last few differently."""
    return x / (1 + torch.exp(-x))


def softplus(x: Tensor) -> Tensor:
    """log(1 + exp(x)) as in torch, but with bits that do not depend on an element's position."""
    return torch.where(x > 20, x, torch.log1p(torch.exp(x)))


def _by_head(rows: Tensor, heads: int) -> Tensor:
    """Rows `[..., G, n]`, each shared by several heads, repeated per head: `[..., H, n]` float32."""
    return rows.float().repeat_interleave(heads // rows.shape[-2], -2)


def _split(entry: Tensor, sizes: list[int]) -> tuple[Tensor, ...]:
    """The parts of a log row."""
    parts: tuple[Tensor, ...] = entry.split(sizes)
    return parts


def _outer(
    slots: PartSlots,  # of states [slots, H, dk, dv]
    q: Tensor,  # [T, G, dk]
    k: Tensor,  # [T, G, dk]
    g: Tensor,  # [T, H, dk] or [T, H, 1]
    change: Callable[[Tensor, int], Tensor],  # of a state and a row: [H, dv]
    out: Tensor,
) -> Tensor:
    """Let states decay, add the outer product of each row's key and change, and read with its query."""
    heads, width = out.shape[1:]
    queries, sizes = _by_head(q, heads), [k[0].numel(), heads * width, g[0].numel()]

    def entry(state: Tensor, row: int) -> Tensor:
        return torch.cat([rows.flatten().float() for rows in (k[row], change(state, row), g[row])])

    def apply(state: Tensor, entry: Tensor) -> Tensor:
        key, added, decay = _split(entry, sizes)
        key = _by_head(key.view(k.shape[1:]), heads)
        return state * torch.exp(decay.view(g.shape[1:]))[..., None] + key[..., None] * added.view(heads, 1, width)

    def read(state: Tensor, row: int) -> Tensor:
        return (state * queries[row][..., None]).sum(1)

    return _run(slots, entry, apply, read, out)


def _run(
    slots: PartSlots,
    entry: Callable[[Tensor, int], Tensor],  # of a state and a row: the row's update, as a log row
    apply: Callable[[Tensor, Tensor], Tensor],  # of a state and a log row: the state after it
    read: Callable[[Tensor, int], Tensor],  # of the state after a row, and the row: the output
    out: Tensor,
) -> Tensor:
    """Step through all rows of all sequences."""
    states, log = slots.states, slots.log
    for scan in slots.plan.scans:
        state = states[scan.read].clone()
        for number in range(scan.num_rows):
            row = scan.new_row(number)
            applied = log[scan.read, number] if row is None else entry(state, row)
            state = apply(state, applied)
            if row is not None:
                out[row] = read(state, row)
            if row is not None and number >= scan.settled:
                log[scan.write, number - scan.settled] = applied
            for num_rows, slot in scan.writes:
                if num_rows == number + 1:
                    states[slot] = state
    return out
