"""Slots and logs of states as tensors, and the plan of a pass: the rows to run, the slots to read and write.

`engine/kv/states.py` assigns slots to sequences. The plan of a pass is the same for all layers of a model.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from pilotfish.engine.kv.batch import RaggedBatch
from pilotfish.engine.types import StateSpan


@dataclass(frozen=True, slots=True)
class StatePart:
    """The state of one convolution or recurrence per sequence, and the log of its changes."""

    shape: tuple[int, ...]
    log_width: int  # width of a log row
    dtype: torch.dtype  # of both

    def num_bytes(self, log_rows: int) -> int:
        """Bytes of one slot with a log of `log_rows` rows."""
        return (math.prod(self.shape) + log_rows * self.log_width) * self.dtype.itemsize

    def tensors(self, num_slots: int, log_rows: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """New states `[num_slots, *shape]`, zero as the initial state, and logs `[num_slots, log_rows, width]`."""
        states = torch.zeros(num_slots, *self.shape, dtype=self.dtype, device=device)
        return states, torch.zeros(num_slots, log_rows, self.log_width, dtype=self.dtype, device=device)


class SequenceScan(NamedTuple):
    """The rows of one sequence: replayed log rows, then new ones. Eight numbers, in the layout of our C.

    A sequence whose slot 3 has the state at position 7, and that continues at 9 with one token and two drafts:

        first 0, stop 3           its new rows in the batch, at positions 9, 10, 11
        read 3, replayed 2        positions 7 and 8 are applied from the log of slot 3
        write 4, settled 3        the state after three rows, at position 10, goes to slot 4
                                  positions 10 and 11, which may be rolled back, go to rows 0 and 1 of its log
        snapshot 5, reached 1     the state after one row, at position 8, goes to slot 5 too
    """

    first: int
    stop: int
    read: int
    replayed: int
    write: int
    settled: int  # 0: no state is written, and new rows are appended to the log that is read
    snapshot: int
    reached: int  # 0: no snapshot

    @classmethod
    def of(cls, span: StateSpan, rows: range, start: int) -> SequenceScan:
        """The scan of a sequence whose positions from `start` are these rows of the batch."""
        snapshot, reached = (0, span.base) if span.snapshot is None else span.snapshot
        scan = cls(
            rows.start, rows.stop, span.read, start - span.base, span.write, span.settled - span.base,
            snapshot, reached - span.base,
        )  # fmt: skip
        in_place = scan.write == scan.read
        assert scan.settled > scan.replayed or not scan.settled, "a log row is settled, but no new row"
        assert scan.settled or in_place, "rows are appended to another slot's log"
        assert not scan.settled or not scan.replayed or not in_place, "a log is read and written in one pass"
        return scan

    @property
    def num_rows(self) -> int:
        """Rows from the log and new ones."""
        return self.replayed + self.stop - self.first

    def new_row(self, number: int) -> int | None:
        """The row of the batch that is the sequence's row `number`; None if that comes from the log."""
        return None if number < self.replayed else self.first + number - self.replayed

    @property
    def writes(self) -> list[tuple[int, int]]:
        """Pairs of (number of rows, slot) for each written state."""
        return [pair for pair in ((self.settled, self.write), (self.reached, self.snapshot)) if pair[0]]


@dataclass(frozen=True, slots=True)
class ScanPlan:
    """The scans of all sequences of a batch."""

    scans: tuple[SequenceScan, ...]  # [B]
    numbers: Tensor  # the same as int64 [B, 8] on the CPU

    @classmethod
    def of(cls, batch: RaggedBatch, log_rows: int) -> ScanPlan:
        """The plan of a batch, whose sequences all have states, with logs of `log_rows` rows."""
        spans = [span for span in batch.states if span is not None]
        assert len(spans) == len(batch.kv_lens), "a sequence has no state"
        scans = []
        for i, (span, stop) in enumerate(zip(spans, batch.kv_lens, strict=True)):
            rows = range(batch.cu_seqlens[i], batch.cu_seqlens[i + 1])
            assert stop - span.settled <= log_rows, "more tokens can be rolled back than the log holds"
            scans.append(SequenceScan.of(span, rows, stop - len(rows)))
        return cls(tuple(scans), torch.tensor(scans, dtype=torch.int64).view(len(scans), -1))


@dataclass(frozen=True, slots=True)
class PartSlots:
    """All slots of a part, and the plan of the pass."""

    states: Tensor  # [slots, *shape]
    log: Tensor  # [slots, log_rows, width], of the same type
    plan: ScanPlan


def parts_of(model: nn.Module) -> tuple[StatePart, ...]:
    """The parts of a model's state, in the order of the pass; only our decoder has any."""
    return getattr(model, "state", ())


def bytes_per_slot(parts: Seq[StatePart], log_rows: int) -> int:
    """Bytes of one slot over all layers, with a log of `log_rows` rows."""
    return sum(part.num_bytes(log_rows) for part in parts)


class PassStates:
    """The states of a ragged batch in one pass. Parts are identified by their order, equal in every pass."""

    def __init__(self, plan: ScanPlan, arena: StateArena) -> None:
        self._plan, self._arena, self._number = plan, arena, 0  # index of the next part

    def slots(self, part: StatePart) -> PartSlots:
        """The slots of the next part."""
        assert part == self._arena.parts[self._number], "state parts are read in another order"
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
        """The arena of a model; None if it has no recurrent layers."""
        parts = parts_of(model)
        return cls(parts, num_slots, log_rows, device) if parts else None

    def during(self, batch: RaggedBatch) -> PassStates:
        return PassStates(ScanPlan.of(batch, self.log_rows), self)
