"""What a pass does with the states of its sequences: which rows it runs over, which slots it reads and writes.

The same for all layers of a model, so it is worked out once for a batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from engine.kv.batch import RaggedBatch
from engine.types import StateSpan

PLAN = "scan plan"  # the key under which a batch keeps its plan


class SequenceScan(NamedTuple):
    """The rows of one sequence: those of a log that are applied again, then new ones. Eight numbers, as our C reads it.

    A sequence whose slot 3 has the state at position 7, and that goes on at 9 with one token and two drafts:

        first 0, stop 3           its new rows in the batch, at positions 9, 10, 11
        read 3, replayed 2        positions 7 and 8 are applied from the log of slot 3
        write 4, settled 3        the state after three rows, at position 10, goes to slot 4
                                  positions 10 and 11, which may be taken back, go to rows 0 and 1 of its log
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
        """The scan of a sequence that is fed the positions from `start` on as these rows of the batch."""
        snapshot, reached = (0, span.base) if span.snapshot is None else span.snapshot
        scan = cls(
            rows.start, rows.stop, span.read, start - span.base, span.write, span.settled - span.base,
            snapshot, reached - span.base,
        )  # fmt: skip
        in_place = scan.write == scan.read
        assert scan.settled > scan.replayed or not scan.settled, "a row of a log is settled, but no new one"
        assert scan.settled or in_place, "rows are appended to a log that begins elsewhere"
        assert not scan.settled or not scan.replayed or not in_place, "a log is written while it is read"
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
        """Pairs of (after how many rows, slot) for each state that is written."""
        return [pair for pair in ((self.settled, self.write), (self.reached, self.snapshot)) if pair[0]]


@dataclass(frozen=True, slots=True)
class ScanPlan:
    """The scans of all sequences of a batch."""

    scans: tuple[SequenceScan, ...]  # [B]
    numbers: Tensor  # the same as int64 [B, 8] on the CPU

    @classmethod
    def of(cls, batch: RaggedBatch, log_rows: int) -> ScanPlan:
        """The plan of a batch, whose sequences all have states, with logs of `log_rows` rows."""
        plan: ScanPlan = batch.once((PLAN, log_rows), lambda: cls._of(batch, log_rows))
        return plan

    @classmethod
    def _of(cls, batch: RaggedBatch, log_rows: int) -> ScanPlan:
        spans = [span for span in batch.states if span is not None]
        assert len(spans) == len(batch.kv_lens), "a sequence has no state"
        scans = []
        for i, (span, stop) in enumerate(zip(spans, batch.kv_lens, strict=True)):
            rows = range(batch.cu_seqlens[i], batch.cu_seqlens[i + 1])
            assert stop - span.settled <= log_rows, "more tokens than the log holds may be taken back"
            scans.append(SequenceScan.of(span, rows, stop - len(rows)))
        return cls(tuple(scans), torch.tensor(scans, dtype=torch.int64).view(len(scans), -1))
