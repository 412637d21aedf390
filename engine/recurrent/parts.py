"""The parts of a model's state: each of its convolutions and recurrences has one."""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class StatePart:
    """What one convolution or recurrence keeps of a sequence, and the inputs of a token that its log keeps."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    inputs: tuple[tuple[tuple[int, ...], torch.dtype], ...]  # shape and type of each

    @classmethod
    def of(cls, shape: Seq[int], dtype: torch.dtype, rows: Seq[Tensor]) -> StatePart:
        """The part of a layer whose inputs are `rows`, each `[T, ...]`."""
        return cls(tuple(shape), dtype, tuple((tuple(row.shape[1:]), row.dtype) for row in rows))

    def num_bytes(self, log_rows: int) -> int:
        """Bytes of one slot with a log of `log_rows` rows."""
        logged = sum(math.prod(shape) * dtype.itemsize for shape, dtype in self.inputs)
        return math.prod(self.shape) * self.dtype.itemsize + log_rows * logged

    def tensors(self, num_slots: int, log_rows: int, device: torch.device) -> tuple[Tensor, tuple[Tensor, ...]]:
        """New states `[num_slots, *shape]`, zeros as the empty state is, and a log for each input."""
        states = torch.zeros(num_slots, *self.shape, dtype=self.dtype, device=device)
        logs = (torch.zeros(num_slots, log_rows, *shape, dtype=kind, device=device) for shape, kind in self.inputs)
        return states, tuple(logs)
