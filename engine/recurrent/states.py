"""Slots and logs of states as tensors. `engine/kv/states.py` decides which sequence has which slot."""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from engine.kv.batch import RaggedBatch
from engine.recurrent.plan import ScanPlan


@dataclass(frozen=True, slots=True)
class StatePart:
    """What one convolution or recurrence keeps of a sequence: its state, and rows of a log that change it."""

    shape: tuple[int, ...]
    log_width: int  # numbers of a row of the log
    dtype: torch.dtype  # of both

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


def parts_of(model: nn.Module) -> tuple[StatePart, ...]:
    """The parts of a model's state, in the order in which a pass comes to them; only our decoder keeps any."""
    return getattr(model, "state", ())


def bytes_per_slot(parts: Seq[StatePart], log_rows: int) -> int:
    """Bytes of one slot over all layers, with a log of `log_rows` rows."""
    return sum(part.num_bytes(log_rows) for part in parts)


class PassStates:
    """The states of a ragged batch in one pass. Parts have no names: every pass comes to them in the same order."""

    def __init__(self, plan: ScanPlan, arena: StateArena) -> None:
        self._plan, self._arena, self._number = plan, arena, 0  # of the part whose turn it is

    def slots(self, part: StatePart) -> PartSlots:
        """The slots of the part whose turn it is."""
        assert part == self._arena.parts[self._number], "a pass came to the parts of the state in another order"
        states, log = self._arena.tensors[self._number]
        self._number += 1
        return PartSlots(states, log, self._plan)


class StateArena:
    """The states of every sequence of one model."""

    def __init__(self, parts: Seq[StatePart], num_slots: int, log_rows: int, device: torch.device) -> None:
        self.parts, self.log_rows = parts, log_rows
        self.tensors = [part.tensors(num_slots, log_rows, device) for part in parts]

    @classmethod
    def of(cls, model: nn.Module, num_slots: int, log_rows: int, device: torch.device) -> StateArena | None:
        """The arena of a model; None where its layers keep no state."""
        parts = parts_of(model)
        return cls(parts, num_slots, log_rows, device) if parts else None

    def during(self, batch: RaggedBatch) -> PassStates:
        """The states of a pass."""
        return PassStates(ScanPlan.of(batch, self.log_rows), self)
