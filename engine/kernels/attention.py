"""Ragged paged attention in one kernel: verification, decoding and chunked prefill alike.

A tile holds some query rows of one sequence times query heads of one K/V head, so that K and V are read once for all
of them. Its keys are cut by absolute position (`paging.split_of`), and what the splits say is merged from left to
right. Whether one program walks all splits of a tile, or several share them and a second kernel merges, is a matter of
speed alone: both add the same numbers in the same order, and no number depends on the rest of the batch.

Tiles of prompts are larger and give that up: their keys are cut into as many runs as there are programs for them.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.paging import ITEM, Paging, padded
from engine.kernels.plan import Plan, oldest_of, plans_of, split_at, split_start

_LOG2_E = tl.constexpr(1.4426950408889634)
_ITEM = tl.constexpr(ITEM)
_AT_ONCE = tl.constexpr(8)  # parts whose loads a merge has under way together
_MERGED_ROWS = 8  # query rows of one head that one program merges


def attend(
    query: Tensor,  # [T, heads, head_dim]; rows may be strided
    k: Tensor,  # [rows, kv_heads, head_dim], the arena of one layer
    v: Tensor,
    paging: Paging,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    *,
    plans: tuple[Plan, ...] | None = None,
    **options: Any,
) -> Tensor:  # [T, heads, head_dim]
    """softmax(q k^T * scale + causal mask) v, each sequence over its own pages; rows of no tile stay unwritten.

    `plans` are what `plans_of` says of the same shapes, kept from another layer; else it is asked, with `options`.
    """
    if plans is None:
        plans = plans_of(query, k, paging, window, **options)
    if query.stride()[1:] != (query.shape[2], 1):
        query = query.contiguous()
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    for plan in plans:
        _run(plan, query, k, v, out, paging, float(scale), window or 0, softcap)
    return out


def _run(
    plan: Plan, query: Tensor, k: Tensor, v: Tensor, out: Tensor, paging: Paging, scale: float, window: int,
    softcap: float | None,
) -> None:  # fmt: skip
    _, heads, dim = query.shape
    kv_heads = k.shape[1]
    group, tile, tuning = heads // kv_heads, plan.tile, plan.tuning
    dim_padded = padded(dim)
    parts = query.new_empty((plan.num_cells, dim_padded), dtype=torch.float32)
    sums = query.new_empty((plan.num_cells, 2), dtype=torch.float32)
    of_heads = -(-group // tile.heads)  # tiles beside each other that share one K/V head
    _attend_kernel[(len(plan.items), kv_heads * of_heads)](
        query, k, v, out, parts, sums, plan.items, paging.tables, scale, softcap or 0.0,
        query.stride(0), paging.tables.stride(0),
        KV_HEADS=kv_heads, GROUP=group, OF_HEADS=of_heads, TILE_HEADS=tile.heads, DIM=dim, DIM_PADDED=dim_padded,
        BLOCK_M=tile.size, **plan.splits, PAGE=paging.page_size, BLOCK_N=min(plan.splits["SPLIT"], tuning.block_n),
        WINDOW=window, CAPPED=softcap is not None, RUNS=plan.is_prompt,
        num_warps=tuning.num_warps, num_stages=tuning.num_stages,
    )  # fmt: skip
    if len(plan.merges):
        _merge_kernel[(len(plan.merges), heads, -(-tile.rows // _MERGED_ROWS))](
            parts, sums, out, plan.items, plan.merges, HEADS=heads, DIM=dim, DIM_PADDED=dim_padded,
            ROWS=_MERGED_ROWS, num_warps=4,
        )  # fmt: skip


@triton.jit
def _factors(peak, new_peak):
    """The larger of two maxima (base 2), and what each part is scaled by; a part of no key has maximum -inf."""
    largest = tl.maximum(peak, new_peak)
    ground = tl.where(largest == float("-inf"), 0.0, largest)
    return largest, tl.exp2(peak - ground), tl.exp2(new_peak - ground)


@triton.jit
def _sum_of(x, factor, new, new_factor):
    """`x * factor + new * new_factor`, rounded the same in both kernels: a compiler may fuse either product."""
    return tl.fma(x, factor, new * new_factor)


@triton.jit
def _scores(products, scale, softcap, CAPPED: tl.constexpr):
    """Scores in base 2: `[BLOCK_M, BLOCK_N]` float32."""
    scores = products * scale
    if CAPPED:
        scores = softcap * (2.0 / (1.0 + tl.exp(-2.0 * (scores / softcap))) - 1.0)  # softcap * tanh
    return scores * _LOG2_E


@triton.jit
def _piecewise(
    q_ptr, q_at, q_ok, k_ptr, k_at, k_ok,
    DIM: tl.constexpr, DIM_PADDED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """q k^T of float32 without tensor cores, some columns at a time: registers hold no more of them."""
    piece: tl.constexpr = min(DIM_PADDED, 32 if DIM_PADDED <= 128 else 16)
    products = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for first in range(0, DIM_PADDED, piece):
        d = first + tl.arange(0, piece)
        q = tl.load(q_ptr + q_at[:, None] + d[None, :], mask=q_ok[:, None] & (d < DIM)[None, :], other=0.0)
        k = tl.load(k_ptr + k_at[:, None] + d[None, :], mask=k_ok[:, None] & (d < DIM)[None, :], other=0.0)
        products = tl.dot(q, tl.trans(k), products, input_precision="ieee")
    return products


@triton.jit
def _over_keys(
    q_ptr, q_at, row_ok, k_ptr, v_ptr, table_ptr, start, stop, position, scale, softcap,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, DIM_PADDED: tl.constexpr, PAGE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """What keys start .. stop - 1 say to a tile: the largest score, the sum of weights, the sum of weighted values."""
    exact: tl.constexpr = q_ptr.dtype.element_ty == tl.float32
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, DIM_PADDED], tl.float32)
    d = tl.arange(0, DIM_PADDED)
    q = 0.0
    if not exact:
        q = tl.load(q_ptr + q_at[:, None] + d[None, :], mask=row_ok[:, None] & (d < DIM)[None, :], other=0.0)
    n = start + tl.arange(0, BLOCK_N)
    page = tl.load(table_ptr + n // PAGE, mask=n < stop, other=0)
    for first in range(start, stop, BLOCK_N):
        n = first + tl.arange(0, BLOCK_N)
        at = (page.to(tl.int64) * PAGE + n % PAGE) * (KV_HEADS * DIM)
        # Pages of the block after this one are looked up here, so that its keys need not wait for them: else the
        # compiler counts the look-up as a stage of its own, and keeps one block less in flight.
        after = n + BLOCK_N
        page = tl.load(table_ptr + after // PAGE, mask=after < stop, other=0)
        loadable = (n < stop)[:, None] & (d < DIM)[None, :]
        v = tl.load(v_ptr + at[:, None] + d[None, :], mask=loadable, other=0.0)
        if exact:
            products = _piecewise(q_ptr, q_at, row_ok, k_ptr, at, n < stop, DIM, DIM_PADDED, BLOCK_M, BLOCK_N)
        else:
            k = tl.load(k_ptr + at[:, None] + d[None, :], mask=loadable, other=0.0)
            products = tl.dot(q, tl.trans(k))
        visible = n[None, :] <= position[:, None]  # no key from `stop` on: it ends a block, or lies behind all rows
        if WINDOW > 0:
            visible = visible & (n[None, :] > position[:, None] - WINDOW)
        scores = tl.where(visible, _scores(products, scale, softcap, CAPPED), float("-inf"))
        largest = tl.maximum(peak, tl.max(scores, 1))
        ground = tl.where(largest == float("-inf"), 0.0, largest)
        weights = tl.exp2(scores - ground[:, None])
        faded = tl.exp2(peak - ground)
        total = total * faded + tl.sum(weights, 1)
        acc = tl.dot(weights.to(v.dtype), v, acc * faded[:, None], input_precision="ieee")
        peak = largest
    return peak, total, acc


@triton.jit
def _store_part(parts_ptr, sums_ptr, at, row_ok, peak, total, acc, DIM_PADDED: tl.constexpr):
    d = tl.arange(0, DIM_PADDED)
    tl.store(parts_ptr + (at * DIM_PADDED)[:, None] + d[None, :], acc, mask=row_ok[:, None])
    tl.store(sums_ptr + 2 * at, peak, mask=row_ok)
    tl.store(sums_ptr + 2 * at + 1, total, mask=row_ok)


@triton.jit
def _over_splits(
    q_ptr, q_at, row_ok, k_ptr, v_ptr, table_ptr, oldest, newest, position, scale, softcap,
    parts_ptr, sums_ptr, at, turn, turns, parts,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, DIM_PADDED: tl.constexpr, PAGE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr, CAPPED: tl.constexpr,
    SPLIT: tl.constexpr, PER_LEVEL: tl.constexpr, LEVELS: tl.constexpr,
):  # fmt: skip
    """Every `turns`-th split: all of them merged, if there is one turn; else each is stored as the part that it is."""
    begin = split_at(oldest, SPLIT, PER_LEVEL, LEVELS)
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, DIM_PADDED], tl.float32)
    for part in range(turn, parts, turns):
        first = tl.maximum(split_start(begin + part, SPLIT, PER_LEVEL), oldest // BLOCK_N * BLOCK_N)
        stop = tl.minimum(split_start(begin + part + 1, SPLIT, PER_LEVEL), newest)
        new_peak, new_total, new_acc = _over_keys(
            q_ptr, q_at, row_ok, k_ptr, v_ptr, table_ptr, first, stop, position, scale, softcap,
            KV_HEADS, DIM, DIM_PADDED, PAGE, BLOCK_M, BLOCK_N, WINDOW, CAPPED,
        )  # fmt: skip
        if turns > 1:
            _store_part(parts_ptr, sums_ptr, at * parts + part, row_ok, new_peak, new_total, new_acc, DIM_PADDED)
        else:
            peak, old, new = _factors(peak, new_peak)
            total = _sum_of(total, old, new_total, new)
            acc = _sum_of(acc, old[:, None], new_acc, new[:, None])
    return peak, total, acc


@triton.jit(do_not_specialize=["width"], do_not_specialize_on_alignment=["tables_ptr"])
def _attend_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, parts_ptr, sums_ptr, items_ptr, tables_ptr, scale, softcap, q_stride, width,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, OF_HEADS: tl.constexpr, TILE_HEADS: tl.constexpr,
    DIM: tl.constexpr, DIM_PADDED: tl.constexpr, BLOCK_M: tl.constexpr,
    SPLIT: tl.constexpr, PER_LEVEL: tl.constexpr, LEVELS: tl.constexpr, PAGE: tl.constexpr, BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr, CAPPED: tl.constexpr, RUNS: tl.constexpr,
):  # fmt: skip
    """One item for one tile of heads: either the tile's whole answer, or the parts of it that are this program's."""
    item_ptr = items_ptr + tl.program_id(0) * _ITEM
    rows = tl.load(item_ptr + 1)
    if rows > 0:
        first_row, start, table = tl.load(item_ptr), tl.load(item_ptr + 2), tl.load(item_ptr + 3)
        turn, turns = tl.load(item_ptr + 4), tl.load(item_ptr + 5)
        parts, cell = tl.load(item_ptr + 6), tl.load(item_ptr + 7)
        head = tl.program_id(1) // OF_HEADS
        table_ptr = tables_ptr + table.to(tl.int64) * width
        # What is as large as an arena or a batch goes into the pointers, so that the offsets of a tile are short.
        q_ptr += first_row.to(tl.int64) * q_stride + head * (GROUP * DIM)
        k_ptr += head * DIM
        v_ptr += head * DIM
        parts_ptr += cell.to(tl.int64) * DIM_PADDED
        sums_ptr += cell.to(tl.int64) * 2
        m = tl.arange(0, BLOCK_M)
        d = tl.arange(0, DIM_PADDED)
        row, of_head = m // TILE_HEADS, tl.program_id(1) % OF_HEADS * TILE_HEADS + m % TILE_HEADS
        row_ok = (row < rows) & (of_head < GROUP)
        q_at = row * q_stride + of_head * DIM
        at = row * (KV_HEADS * GROUP) + head * GROUP + of_head
        oldest, newest = oldest_of(start, WINDOW), tl.load(item_ptr + 8)
        aligned = oldest // BLOCK_N * BLOCK_N
        if RUNS:
            blocks = (tl.maximum(newest - aligned, 0) + BLOCK_N - 1) // BLOCK_N
            first = aligned + (blocks.to(tl.int64) * turn // turns).to(tl.int32) * BLOCK_N
            stop = tl.minimum(aligned + (blocks.to(tl.int64) * (turn + 1) // turns).to(tl.int32) * BLOCK_N, newest)
            peak, total, acc = _over_keys(
                q_ptr, q_at, row_ok, k_ptr, v_ptr, table_ptr, first, stop, start + row, scale, softcap,
                KV_HEADS, DIM, DIM_PADDED, PAGE, BLOCK_M, BLOCK_N, WINDOW, CAPPED,
            )  # fmt: skip
            if turns > 1:
                _store_part(parts_ptr, sums_ptr, at * parts + turn, row_ok, peak, total, acc, DIM_PADDED)
        else:
            peak, total, acc = _over_splits(
                q_ptr, q_at, row_ok, k_ptr, v_ptr, table_ptr, oldest, newest, start + row, scale, softcap,
                parts_ptr, sums_ptr, at, turn, turns, parts,
                KV_HEADS, DIM, DIM_PADDED, PAGE, BLOCK_M, BLOCK_N, WINDOW, CAPPED, SPLIT, PER_LEVEL, LEVELS,
            )  # fmt: skip
        if turns == 1:
            out_ptr += first_row.to(tl.int64) * (KV_HEADS * GROUP * DIM)
            acc = acc / tl.where(total > 0, total, 1.0)[:, None]  # a row before position 0 sees nothing, and gets 0
            out_ok = row_ok[:, None] & (d < DIM)[None, :]
            tl.store(out_ptr + (at * DIM)[:, None] + d[None, :], acc.to(out_ptr.dtype.element_ty), mask=out_ok)


@triton.jit
def _merge_kernel(
    parts_ptr, sums_ptr, out_ptr, items_ptr, merges_ptr,
    HEADS: tl.constexpr, DIM: tl.constexpr, DIM_PADDED: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Some rows of one head of a shared tile: its parts from left to right, as one program would have merged them."""
    item = tl.load(merges_ptr + tl.program_id(0))
    if item >= 0:
        item_ptr = items_ptr + item * _ITEM
        first_row, rows = tl.load(item_ptr), tl.load(item_ptr + 1)
        parts, cell = tl.load(item_ptr + 6), tl.load(item_ptr + 7)
        row = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
        row_ok = row < rows
        d = tl.arange(0, DIM_PADDED)
        at = row * HEADS + tl.program_id(1)
        parts_ptr += cell.to(tl.int64) * DIM_PADDED
        sums_ptr += cell.to(tl.int64) * 2
        peak = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        acc = tl.zeros([ROWS, DIM_PADDED], tl.float32)
        for first in range(0, parts, _AT_ONCE):
            # Written out, so that the loads of all come before the sums of any. What is beyond the last adds nothing.
            for i in tl.static_range(_AT_ONCE):
                part, there = at * parts + first + i, row_ok & (row * 0 + first + i < parts)
                new_peak = tl.load(sums_ptr + 2 * part, mask=there, other=float("-inf"))
                new_total = tl.load(sums_ptr + 2 * part + 1, mask=there, other=0.0)
                new_acc = tl.load(parts_ptr + (part * DIM_PADDED)[:, None] + d[None, :], mask=there[:, None], other=0.0)
                peak, old, new = _factors(peak, new_peak)
                total = _sum_of(total, old, new_total, new)
                acc = _sum_of(acc, old[:, None], new_acc, new[:, None])
        out_ptr += first_row.to(tl.int64) * (HEADS * DIM)
        acc = acc / tl.where(total > 0, total, 1.0)[:, None]
        out_ok = row_ok[:, None] & (d < DIM)[None, :]
        tl.store(out_ptr + (at * DIM)[:, None] + d[None, :], acc.to(out_ptr.dtype.element_ty), mask=out_ok)
