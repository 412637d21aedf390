"""What a pass does with the states of its sequences: which rows it runs over, which slots it reads and writes.

The same for all layers of a model, so it is worked out once for a batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, chain

import torch
from torch import Tensor

from engine.kv.batch import RaggedBatch

PLAN = "scan plan"  # the key under which a batch keeps its plan


@dataclass(frozen=True, slots=True)
class ScanPlan:
    """Rows and slots of B sequences. T rows are new; with the logged rows that are applied first there are S.

    Two sequences, of which the first goes on after two logged rows, feeds one token and two drafts, and the second is
    fed a prompt of four tokens:

        cu_rows [0, 5, 9]                  rows 0, 1 from the log, 2..4 new | 5..8 new
        read    [3, 0]                     slot 0 is the empty state
        writes  [[(3, 4)], [(4, 5)]]       after three of its rows, to slot 4 | after all four, to slot 5
        log     rows 3, 4 to slot 4        the drafts, which may be taken back
    """

    cu_rows: tuple[int, ...]  # [B + 1]
    read: tuple[int, ...]  # [B]
    writes: tuple[tuple[tuple[int, int], ...], ...]  # [B], pairs (after how many of the sequence's S rows, slot)
    log_rows: int  # of each slot
    new: Tensor  # int64 [T], which of the S rows are new
    replayed: Tensor  # int64 [S - T], which of the S rows are from the log
    replayed_from: Tensor  # int64 [S - T], slot * log_rows + row
    logged: Tensor  # int64, which of the S rows are written to a log
    logged_to: Tensor  # int64, slot * log_rows + row
    slots: Tensor  # int64 on the CPU: `cu_rows`, `read`, B + 1 first writes, then the writes; what our C reads

    @classmethod
    def of(cls, batch: RaggedBatch, log_rows: int) -> ScanPlan:
        """The plan of a batch, whose sequences all have states."""
        plan: ScanPlan = batch.once((PLAN, log_rows), lambda: cls._of(batch, log_rows))
        return plan

    @classmethod
    def _of(cls, batch: RaggedBatch, log_rows: int) -> ScanPlan:
        cu_rows, writes = [0], list[tuple[tuple[int, int], ...]]()
        new, replayed, replayed_from, logged, logged_to = (list[int]() for _ in range(5))
        spans = [span for span in batch.states if span is not None]
        assert len(spans) == len(batch.kv_lens), "a sequence has no state"
        for i, (span, stop) in enumerate(zip(spans, batch.kv_lens, strict=True)):
            start = stop - (batch.cu_seqlens[i + 1] - batch.cu_seqlens[i])
            first = cu_rows[-1] - span.base  # row of position p is first + p
            cu_rows.append(first + stop)
            assert stop - span.settled <= log_rows, "more tokens than the log holds may be taken back"
            replayed += range(first + span.base, first + start)
            replayed_from += (span.read * log_rows + p - span.base for p in range(span.base, start))
            new += range(first + start, first + stop)
            # What is not settled is logged; where nothing more is settled, the log of the slot already has the rows
            # that came from it.
            unsettled = range(span.settled if span.settled > span.base else start, stop)
            logged += (first + p for p in unsettled)
            logged_to += (span.write * log_rows + p - span.settled for p in unsettled)
            stops = [span.snapshot[::-1]] if span.snapshot is not None else []
            stops += [(span.settled, span.write)] if span.settled > span.base else []
            writes.append(tuple((position - span.base, slot) for position, slot in stops))
        device = batch.positions.device
        read, firsts = tuple(span.read for span in spans), accumulate(map(len, writes), initial=0)
        slots = torch.tensor([*cu_rows, *read, *firsts, *chain.from_iterable(chain.from_iterable(writes))])

        def sent(indices: list[int]) -> Tensor:
            return torch.tensor(indices, dtype=torch.int64, device=device)

        return cls(
            tuple(cu_rows), read, tuple(writes), log_rows, sent(new), sent(replayed), sent(replayed_from), sent(logged),
            sent(logged_to), slots,
        )  # fmt: skip

    def gather(self, fresh: Tensor, log: Tensor) -> Tensor:
        """Rows `[T, ...]` of this pass, with those of `log` `[slots, log_rows, ...]` before them: `[S, ...]`."""
        if not len(self.replayed):
            return fresh
        rows = fresh.new_empty(self.cu_rows[-1], *fresh.shape[1:])
        rows[self.new] = fresh
        rows[self.replayed] = log.flatten(0, 1)[self.replayed_from].to(fresh.dtype)
        return rows

    def record(self, rows: Tensor, log: Tensor) -> None:
        """Write the rows `[S, ...]` that may be taken back to `log` `[slots, log_rows, ...]`."""
        if len(self.logged):
            log.flatten(0, 1)[self.logged_to] = rows[self.logged].to(log.dtype)

    def fresh(self, rows: Tensor) -> Tensor:
        """Of rows `[S, ...]` those of this pass, `[T, ...]`."""
        return rows[self.new] if len(self.replayed) else rows
