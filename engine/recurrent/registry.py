"""Which implementation of the rules runs."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from engine.recurrent import native, rules
from engine.recurrent.parts import PartSlots


class StateRules(Protocol):
    """The rules by which states change; shapes as in `rules.py`."""

    def conv(self, slots: PartSlots, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None) -> Tensor:
        """A causal convolution."""
        ...

    def gated_delta(self, slots: PartSlots, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        """The gated delta rule."""
        ...

    def kimi_delta(self, slots: PartSlots, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        """The gated delta rule with a decay for each key channel."""
        ...

    def mamba2(self, slots: PartSlots, x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
        """The state space of Mamba 2."""
        ...

    def mamba1(self, slots: PartSlots, x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
        """The state space of Mamba 1."""
        ...


def choose(device: torch.device) -> StateRules:
    """The fastest rules for a device: our C on a CPU, for the rows that it runs, or else plain torch."""
    return native if device.type == "cpu" else rules
