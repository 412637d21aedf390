"""The experts of a mixture as single matrices, which are rounded and packed like all others.

Each expert has two matmuls; if our C has packed them, one call runs all experts of a layer. On CUDA a kernel reads
fused matrices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from pilotfish.engine.kernels.args import FusedWeights
from pilotfish.engine.model.linear.grouped import packed_of
from pilotfish.engine.native import rows_for
from pilotfish.engine.native.experts import ExpertGate, ExpertMatrices


class RoutedExperts(nn.Module):
    """The weighted sum of each row's selected experts.

    A row's result has the same bits in any batch if its matmuls have.
    """

    def __init__(self, ups: Iterable[nn.Linear], downs: Iterable[nn.Linear], gate: ExpertGate) -> None:
        super().__init__()
        self.ups, self.downs, self.gate = nn.ModuleList(ups), nn.ModuleList(downs), gate
        self._ready: ExpertMatrices | None = None

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Rows `[T, in]`, experts `[T, k]` and their weights `[T, k]` -> `[T, out]`; unknown experts add nothing."""
        native = self._native(hidden_states)
        if native is not None:
            return native.run(hidden_states, top_k_index, top_k_weights)
        chosen, each = top_k_index.flatten(), top_k_index.shape[1]
        given = hidden_states.new_zeros(len(chosen), hidden_states.shape[1], dtype=torch.float32)
        for expert in set(chosen.tolist()) & set(range(len(self.ups))):
            places = (chosen == expert).nonzero()[:, 0]
            both = self.ups[expert](hidden_states[places // each])
            gated = torch.cat([self.gate(row.clone()) for row in both.split(1)])
            given[places] = self.downs[expert](gated).float()
        total = torch.zeros_like(hidden_states, dtype=torch.float32)
        for one, weight in zip(given.unflatten(0, (-1, each)).unbind(1), top_k_weights.float().unbind(1), strict=True):
            total += one * weight[:, None]
        return total.to(hidden_states.dtype)

    def _native(self, rows: Tensor) -> ExpertMatrices | None:
        """All experts in our C, if it supports their matrix types and activation; else None."""
        if self._ready is None:
            ups, downs = ([packed_of(matmul) or () for matmul in matmuls] for matmuls in (self.ups, self.downs))
            if all(len(parts) == 1 for parts in (*ups, *downs)):
                halves = [part for (part,) in ups], [part for (part,) in downs]
                self._ready = ExpertMatrices(*halves, self.gate) if ExpertMatrices.fits(*halves, self.gate) else None
        ready = self._ready
        serves = ready is not None and rows.is_cpu and rows_for(rows.dtype, ready.in_features) is not None
        return ready if serves else None


Mix = Callable[[Tensor, Tensor, Tensor, FusedWeights], Tensor]  # `kernels.experts.mix`, or its reference


class FusedExperts(nn.Module):
    """The same as one function over the fused matrices of all experts, for CUDA."""

    up: Tensor
    down: Tensor
    up_bias: Tensor | None
    down_bias: Tensor | None

    def __init__(
        self, up: Tensor, down: Tensor, biases: tuple[Tensor, Tensor] | None, gate: ExpertGate, mix: Mix, *,
        transposed: bool = False,
    ) -> None:  # fmt: skip
        """Take fused matrices, as in `FusedWeights`, and the function that multiplies them."""
        super().__init__()
        up_bias, down_bias = biases or (None, None)
        for name, stack in (("up", up), ("down", down), ("up_bias", up_bias), ("down_bias", down_bias)):
            self.register_buffer(name, None if stack is None else stack.detach().contiguous())
        self.gate, self.mix, self.transposed = gate, mix, transposed

    @property
    def fused(self) -> FusedWeights:
        """The arguments of the function."""
        gate = self.gate
        return FusedWeights(
            self.up, self.down, self.up_bias, self.down_bias, self.transposed,
            gate, (gate.linear, gate.cubic, gate.limit, gate.plus), gate.squared, gate.ungated, gate.interleaved,
        )  # fmt: skip

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        return self.mix(hidden_states, top_k_index, top_k_weights, self.fused)
