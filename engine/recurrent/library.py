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
from engine.recurrent.plan import ScanPlan
from engine.recurrent.registry import StateRules
from engine.recurrent.rules import silu, softplus


class Scan(Protocol):
    """The states of a pass (`states.RaggedStates`), for the part whose turn it is."""

    rules: StateRules

    def kept(self, rows: Tensor) -> Tensor:
        """The inputs of a convolution, which the mixer has also handed to its cache."""
        ...

    def run(
        self, shape: tuple[int, ...], dtype: torch.dtype, rows: tuple[Tensor, ...], rule: Callable[..., Tensor]
    ) -> Tensor:
        """Run `rule(states, *rows, plan)`, where states are `[slots, *shape]`; rows of this pass in, and out."""
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

    def rule(states: Tensor, rows: Tensor, plan: ScanPlan) -> Tensor:
        return scan.rules.conv(states, rows, weight, bias, "silu" if activation else None, plan)

    return scan.run((weight.shape[0], weight.shape[1] - 1), x.dtype, (x,), rule).T[None]


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
    heads, key_dim, value_dim = value.shape[2], key.shape[3], value.shape[3]

    def rule(states: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, plan: ScanPlan) -> Tensor:
        q, k, v, g, beta = (rows.float().contiguous() for rows in (q, k, v, g, beta))
        if use_qk_l2norm_in_kernel:
            q, k = (rows * torch.rsqrt((rows * rows).sum(-1, keepdim=True) + 1e-6) for rows in (q, k))
        delta = scan.rules.gated_delta if g.ndim == 2 else scan.rules.kimi_delta
        return delta(states, q * key_dim**-0.5, k, v, g, beta, plan)

    rows = tuple(rows[0] for rows in (query, key, value, g, beta))
    out = scan.run((heads, key_dim, value_dim), torch.float32, rows, rule)
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
    heads, head_dim = hidden_states.shape[2:]

    def rule(states: Tensor, x: Tensor, dt: Tensor, b: Tensor, c: Tensor, plan: ScanPlan) -> Tensor:
        step = _step_sizes(dt, dt_bias, dt_softplus).clamp(*dt_limit)
        x, b, c = (rows.float().contiguous() for rows in (x, b, c))
        return scan.rules.mamba2(states, x, step, A.float(), b, c, _skip(D, A), plan)

    rows = tuple(rows[0] for rows in (hidden_states, dt, B, C))
    out = scan.run((heads, B.shape[-1], head_dim), torch.float32, rows, rule)
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

    def rule(states: Tensor, x: Tensor, dt: Tensor, b: Tensor, c: Tensor, plan: ScanPlan) -> Tensor:
        step = _step_sizes(dt, delta_bias, delta_softplus)
        x, b, c = (rows.float() for rows in (x, b, c))
        return scan.rules.mamba1(states, x, step, A.float(), b, c, _skip(D, A[:, 0]), plan)

    rows = tuple(rows[0].T.contiguous() for rows in (hidden_states, dt, B, C))
    out = scan.run((A.shape[1], A.shape[0]), torch.float32, rows, rule)
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
    """Of `dt` `[S, ...]`, in float32 as in the kernels that such models are trained with."""
    step = dt.float() if bias is None else dt.float() + bias.float()
    return (softplus(step) if is_logarithm else step).contiguous()


def _skip(d: Tensor | None, like: Tensor) -> Tensor:
    return torch.zeros_like(like, dtype=torch.float32) if d is None else d.float()


def _last_state(out: Tensor) -> Tensor:
    return out.new_empty(0)
