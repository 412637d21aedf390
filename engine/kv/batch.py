"""A ragged batch: sequences of different lengths, concatenated without padding."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, TypeVar

import torch
from torch import Tensor

from pilotfish.engine.kernels.paging import send
from pilotfish.engine.types import EMPTY_STATE, StateSpan

T = TypeVar("T")
TABLE_MARK = 1 << 32  # far above any position and exact in int64


@dataclass(frozen=True, slots=True)
class Feed:
    """One sequence's part of a forward pass: `tokens` at positions `start`, `start + 1`, ...

    The pass returns logits for the last `num_logits` tokens: K + 1 when drafts are verified, 0 inside a prompt.
    """

    tokens: Seq[int]
    start: int
    page_table: Seq[int]
    num_logits: int = 1
    table: int = 0  # the number of the rotary table, for a model that has two
    state: StateSpan | None = None  # for a model with recurrent states
    adapter: int = 0  # the number of the low-rank adapter of these rows; 0: none

    @classmethod
    def begun(cls, tokens: Seq[int], number: int, num_logits: int) -> Feed:
        """A sequence from its start, for self-tests at load: it has page `number` and slot `number` + 1."""
        state = StateSpan(EMPTY_STATE, 0, number + 1, len(tokens))
        return cls(tokens, 0, [number], num_logits, state=state)

    @property
    def kv_len(self) -> int:
        """Valid K/V rows after this pass."""
        return self.start + len(self.tokens)


@dataclass(frozen=True, slots=True)
class RaggedBatch:
    """The input of one forward pass. T tokens, R rows of logits, B sequences.

    Three sequences in pages of 4: A verifies two drafts at positions 5..7, B is fed a new prompt of four
    tokens, C decodes one token at position 9:

        cu_seqlens [0, 3, 7, 8]           A is rows 0..2, B rows 3..6, C row 7
        positions  [5 6 7 | 0 1 2 3 | 9]
        kv_lens    [8, 4, 10]             rows that each sequence attends to, including its own
        logit_rows [0 1 2 | 6 | 7]        A wants all three, B and C their last
    """

    input_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64
    position_ids: Tensor  # [T] int64, the position + table * TABLE_MARK: `decoder.rotary` reads both
    kv_rows: Tensor  # [T] int64, the arena row that each token's K/V is written to
    logit_rows: Tensor  # [R] int64
    cu_seqlens: tuple[int, ...]  # [B + 1]
    kv_lens: tuple[int, ...]  # [B]
    page_tables: tuple[Seq[int], ...]  # [B]
    page_size: int
    is_contiguous: tuple[bool, ...]  # [B], whether the sequence's pages are consecutive
    states: tuple[StateSpan | None, ...] = ()  # [B]
    has_adapters: bool = False  # whether any row has an adapter: then the pass must run module by module
    _worked_out: dict[Hashable, Any] = field(default_factory=dict, repr=False)

    def once(self, key: Hashable, work_out: Callable[[], T]) -> T:
        """Compute a value shared by all layers (masks, row tables) at the first call, and cache it."""
        if key not in self._worked_out:
            self._worked_out[key] = work_out()
        found: T = self._worked_out[key]
        return found

    @classmethod
    def of(cls, feeds: Seq[Feed], page_size: int, device: torch.device) -> RaggedBatch:
        ids: list[int] = []
        positions: list[int] = []
        position_ids: list[int] = []  # of a model with two rotary tables; else they are the positions
        kv_rows: list[int] = []
        logit_rows: list[int] = []
        cu_seqlens, has_tables = [0], any(feed.table for feed in feeds)
        for feed in feeds:
            ids += feed.tokens
            span = range(feed.start, feed.kv_len)
            positions += span
            position_ids += (p + feed.table * TABLE_MARK for p in span) if has_tables else ()
            kv_rows += [feed.page_table[p // page_size] * page_size + p % page_size for p in span]
            logit_rows += range(len(ids) - feed.num_logits, len(ids))
            cu_seqlens.append(len(ids))
        # One upload for all arrays: on a GPU the number of copies costs more than their size.
        packed = send(torch.tensor(ids + positions + kv_rows + logit_rows + position_ids, dtype=torch.int64), device)
        total, end = len(ids), 3 * len(ids) + len(logit_rows)
        return cls(
            input_ids=packed[:total],
            positions=packed[total : 2 * total],
            kv_rows=packed[2 * total : 3 * total],
            position_ids=packed[end:] if has_tables else packed[total : 2 * total],
            logit_rows=packed[3 * total : end],
            cu_seqlens=tuple(cu_seqlens),
            kv_lens=tuple(feed.kv_len for feed in feeds),
            page_tables=tuple(feed.page_table for feed in feeds),
            page_size=page_size,
            is_contiguous=tuple(_is_run(feed.page_table) for feed in feeds),
            states=tuple(feed.state for feed in feeds),
            has_adapters=any(feed.adapter for feed in feeds),
        )


def _is_run(pages: Seq[int]) -> bool:
    """[4, 5, 6] -> True; [4, 6] -> False."""
    return all(after == before + 1 for before, after in pairwise(pages))
