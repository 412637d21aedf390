"""The functions that mixers of transformers call, over the rows of a ragged batch instead of one sequence.

Each takes the arguments of transformers' function of that name, with a batch of one whose tokens are the T rows of the
pass, and the pass's states before them. What a recurrence returns as its last state is empty: states stay in slots.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from engine.errors import ModelError
from engine.recurrent.parts import PartSlots, StatePart
from engine.recurrent.registry import StateRules
from engine.recurrent.rules import silu, softplus


class Scan(Protocol):
    """The states of a pass (`states.RaggedStates`), for the part whose turn it is."""

    rules: StateRules

    def kept(self, rows: Tensor) -> Tensor:
        """The inputs of a convolution, which the mixer has also handed to its cache."""
        ...

    def slots(self, part: StatePart) -> PartSlots:
        """The slots of this part."""
        ...


def causal_conv1d(
    scan: Scan,
    hidden_states: Tensor,  # [1, C, T]
    weight: Tensor,  # [C, k]
    bias: Tensor | None = None,
    activation: str | None = None,
    **_: object,
) -> Tensor:
    """`causal_conv1d_fn`: `[1, C, T]`."""
    if activation not in (None, "silu", "swish"):
        raise ModelError(f"a convolution has the activation {activation}; there is only silu")
    x = scan.kept(hidden_states)[0].T.contiguous()
    slots = scan.slots(StatePart.of((weight.shape[0], weight.shape[1] - 1), x.dtype, x))
    return scan.rules.conv(slots, x, weight, bias, "silu" if activation else None).T[None]


def gated_delta_rule(
    scan: Scan,
    query: Tensor,  # [1, T, Hk, dk]
    key: Tensor,
    value: Tensor,  # [1, T, H, dv]
    g: Tensor,  # [1, T, H], or [1, T, H, dk]
    beta: Tensor,  # [1, T, H]
    use_qk_l2norm_in_kernel: bool = False,
    **_: object,
) -> tuple[Tensor, Tensor]:
    """`torch_chunk_gated_delta_rule` and `chunk_kimi_delta_attention`: `[1, T, H, dv]` in the type of `query`."""
    q, k, v, g, beta = (rows[0].float().contiguous() for rows in (query, key, value, g, beta))
    heads, key_dim, value_dim = v.shape[1], k.shape[2], v.shape[2]
    if use_qk_l2norm_in_kernel:
        q, k = (rows * torch.rsqrt((rows * rows).sum(-1, keepdim=True) + 1e-6) for rows in (q, k))
    delta = scan.rules.gated_delta if g.ndim == 2 else scan.rules.kimi_delta
    slots = scan.slots(StatePart.of((heads, key_dim, value_dim), torch.float32, k, v, g))
    out = delta(slots, q * key_dim**-0.5, k, v, g, beta)
    return out[None].to(query.dtype), _last_state(out)


def mamba2_chunk_scan(
    scan: Scan,
    hidden_states: Tensor,  # [1, T, H, P]
    dt: Tensor,  # [1, T, H]
    A: Tensor,  # noqa: N803  # as in transformers; [H]
    B: Tensor,  # noqa: N803  # [1, T, G, N]
    C: Tensor,  # noqa: N803
    chunk_size: int,  # noqa: ARG001
    D: Tensor | None = None,  # noqa: N803  # [H]
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    z: Tensor | None = None,
    **_: object,
) -> tuple[Tensor, Tensor]:
    """`mamba2_chunk_scan`: float32 `[1, T, H, P]`. The order of sums does not know chunks."""
    if z is not None:
        raise ModelError("a Mamba 2 layer hands its gate to the scan, which ours does not apply")
    x, b, c = (rows[0].float().contiguous() for rows in (hidden_states, B, C))
    step = _step_sizes(dt[0], dt_bias, dt_softplus).clamp(*dt_limit)
    slots = scan.slots(StatePart.of((x.shape[1], b.shape[2], x.shape[2]), torch.float32, b, x, step))
    out = scan.rules.mamba2(slots, x, step, A.float(), b, c, _skip(D, A))
    return out[None], _last_state(out)


def mamba_selective_scan(
    scan: Scan,
    hidden_states: Tensor,  # [1, I, T]
    dt: Tensor,  # [1, I, T]
    A: Tensor,  # noqa: N803  # [I, N]
    B: Tensor,  # noqa: N803  # [1, N, T]
    C: Tensor,  # noqa: N803
    D: Tensor | None = None,  # noqa: N803  # [I]
    z: Tensor | None = None,  # [1, I, T]
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    **_: object,
) -> tuple[Tensor, Tensor]:
    """`mamba_selective_scan` of Mamba 1: float32 `[1, I, T]`."""
    x, b, c = (rows[0].T.float().contiguous() for rows in (hidden_states, B, C))
    step = _step_sizes(dt[0].T.contiguous(), delta_bias, delta_softplus)
    slots = scan.slots(StatePart.of((b.shape[1], x.shape[1]), torch.float32, b, x, step))
    out = scan.rules.mamba1(slots, x, step, A.float(), b, c, _skip(D, A[:, 0]))
    if z is not None:
        out = out * silu(z[0].T.float().contiguous())
    return out.T[None], _last_state(out)


FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "causal_conv1d_fn": causal_conv1d,
    "torch_chunk_gated_delta_rule": gated_delta_rule,
    "chunk_kimi_delta_attention": gated_delta_rule,
    "mamba2_chunk_scan": mamba2_chunk_scan,
    "mamba_selective_scan": mamba_selective_scan,
}


def _step_sizes(dt: Tensor, bias: Tensor | None, is_logarithm: bool) -> Tensor:
    """Of `dt` `[T, ...]`, in float32 as in the kernels that such models are trained with."""
    step = dt.float() if bias is None else dt.float() + bias.float()
    return (softplus(step) if is_logarithm else step).contiguous()


def _skip(d: Tensor | None, like: Tensor) -> Tensor:
    return torch.zeros_like(like, dtype=torch.float32) if d is None else d.float()


def _last_state(out: Tensor) -> Tensor:
    return out.new_empty(0)
