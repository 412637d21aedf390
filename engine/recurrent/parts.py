"""The parts of a model's state: each of its convolutions and recurrences has one."""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.recurrent.plan import ScanPlan


@dataclass(frozen=True, slots=True)
class StatePart:
    """What one convolution or recurrence keeps of a sequence: its state, and rows of a log that change it."""

    shape: tuple[int, ...]
    log_width: int  # numbers of a row of the log
    dtype: torch.dtype  # of both

    @classmethod
    def of(cls, shape: Seq[int], dtype: torch.dtype, *logged: Tensor) -> StatePart:
        """The part whose log has rows of all `logged` side by side, each `[T, ...]`."""
        return cls(tuple(shape), sum(math.prod(rows.shape[1:]) for rows in logged), dtype)

    def num_bytes(self, log_rows: int) -> int:
        """Bytes of one slot with a log of `log_rows` rows."""
        return (math.prod(self.shape) + log_rows * self.log_width) * self.dtype.itemsize

    def tensors(self, num_slots: int, log_rows: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """New states `[num_slots, *shape]`, zeros as the empty state is, and logs `[num_slots, log_rows, width]`."""
        states = torch.zeros(num_slots, *self.shape, dtype=self.dtype, device=device)
        return states, torch.zeros(num_slots, log_rows, self.log_width, dtype=self.dtype, device=device)


@dataclass(frozen=True, slots=True)
class PartSlots:
    """All slots of a part, and what a pass does with them."""

    states: Tensor  # [slots, *shape]
    log: Tensor  # [slots, log_rows, width], of the same type
    plan: ScanPlan
