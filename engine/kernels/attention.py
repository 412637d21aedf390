"""Ragged paged attention in one kernel for verification, decoding and chunked prefill.

A tile is a set of query rows of one sequence times query heads of one K/V head, so that K and V are read once for all
of them. Its keys are split by absolute position (`paging.split_of`), and the results of the splits are merged from left
to right. One program processes all splits of a tile, or several share them and a second kernel merges: both add the
same numbers in the same order, and none depends on the rest of the batch.

Tiles of prompts are larger and not batch-invariant: their keys are divided into one run per program.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from pilotfish.engine.kernels.paging import ITEM, Paging, padded
from pilotfish.engine.kernels.plan import Plan, oldest_of, plans_of, split_at, split_start

_LOG2_E = tl.constexpr(1.4426950408889634)
_ITEM = tl.constexpr(ITEM)
_AT_ONCE = tl.constexpr(8)  # parts that a merge loads concurrently
_MERGED_ROWS = 8  # maximum query rows of one head that one program merges
_MERGED = 2048  # and their columns: the maximum that registers hold
_WHOLE = 128  # columns up to which a head is padded, not divided


def attend(
    query: Tensor,  # [T, heads, key_dim]; rows may be strided
    k: Tensor,  # [rows, kv_heads, scaled + key_dim], the arena of one layer
    v: Tensor,  # [rows, kv_heads, scaled + value_dim]; not dense if values are the beginning of their keys
    paging: Paging,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    *,
    chunk: int | None = None,
    sinks: Tensor | None = None,  # [heads]
    scaled: int = 0,
    plans: tuple[Plan, ...] | None = None,
    **options: Any,
) -> Tensor:  # [T, heads, value_dim]
    """softmax(q k^T * scale + causal mask, with a sink in its denominator) v, each sequence over its own pages.

    `scaled`: bytes of the float32 scale at the beginning of each vector of int8 codes (`kv.arena`); 0 if K and V are
    floats. `plans`: result of `plans_of` for the same shapes, from another layer; if missing, it is called with
    `options`. Rows outside of all tiles are not written.
    """
    if plans is None:
        plans = plans_of(query, k, paging, window, chunk=chunk, value_dim=v.shape[2] - scaled, **options)
    if query.stride()[1:] != (query.shape[2], 1):
        query = query.contiguous()
    sinks = None if sinks is None else sinks.contiguous()
    out = torch.empty((*query.shape[:2], v.shape[2] - scaled), dtype=query.dtype, device=query.device)
    reach = {"WINDOW": window or 0, "CHUNK": chunk or 0}
    for plan in plans:
        _run(plan, query, k, v, out, paging, float(scale), softcap, sinks, reach, scaled)
    return out


def _run(
    plan: Plan, query: Tensor, k: Tensor, v: Tensor, out: Tensor, paging: Paging, scale: float, softcap: float | None,
    sinks: Tensor | None, reach: dict[str, int], scaled: int,
) -> None:  # fmt: skip
    heads, kv_heads, value_dim = query.shape[1], k.shape[1], out.shape[2]
    group, tile, tuning = heads // kv_heads, plan.tile, plan.tuning
    value_padded = padded(value_dim)
    parts = query.new_empty((plan.num_cells, value_padded), dtype=torch.float32)
    sums = query.new_empty((plan.num_cells, 2), dtype=torch.float32)
    of_heads = -(-group // tile.heads)  # adjacent tiles that share one K/V head
    shared = {"V_DIM": value_dim, "V_PADDED": value_padded, "HAS_SINKS": sinks is not None}
    _attend_kernel[(len(plan.items), kv_heads * of_heads)](
        query, k, v, sums if sinks is None else sinks, out, parts, sums, plan.items, paging.tables, scale,
        softcap or 0.0, query.stride(0), paging.tables.stride(0),
        KV_HEADS=kv_heads, GROUP=group, OF_HEADS=of_heads, TILE_HEADS=tile.heads, **_sizes_of(k, v, scaled), **shared,
        BLOCK_M=tile.size, **plan.splits, PAGE=paging.page_size, BLOCK_N=min(plan.splits["SPLIT"], tuning.block_n),
        **reach, CAPPED=softcap is not None, RUNS=plan.is_prompt,
        num_warps=tuning.num_warps, num_stages=tuning.num_stages,
    )  # fmt: skip
    if len(plan.merges):
        rows = min(_MERGED_ROWS, max(1, _MERGED // value_padded))
        _merge_kernel[(len(plan.merges), heads, -(-tile.rows // rows))](
            parts, sums, out, sums if sinks is None else sinks, plan.items, plan.merges, HEADS=heads, **shared,
            ROWS=rows, num_warps=4,
        )  # fmt: skip


def _sizes_of(k: Tensor, v: Tensor, scaled: int) -> dict[str, int | bool]:
    """The division of a head into powers of two of columns, and the strides of rows and heads of the arena.

    Keys of 96 have 128 columns, of 192 they have 128 and 64, of 576 they have 512 and 64.
    """
    key_dim, value_dim = k.shape[2] - scaled, v.shape[2] - scaled
    columns = padded(key_dim)
    if columns > max(key_dim, _WHOLE):
        columns //= 2
    is_within = v.stride(0) != v.shape[1] * v.shape[2]
    return {
        "DIM": key_dim, "COLUMNS": columns, "REST": padded(key_dim - columns) if key_dim > columns else 0,
        "K_STRIDE": k.stride(0), "V_STRIDE": v.stride(0), "SCALED": scaled,
        "WITHIN": is_within and value_dim == columns,
    }  # fmt: skip


@triton.jit
def _factors(peak, new_peak):
    """The larger of two maxima (base 2), and the factor of each part; a part without keys has maximum -inf."""
    largest = tl.maximum(peak, new_peak)
    ground = tl.where(largest == float("-inf"), 0.0, largest)
    return largest, tl.exp2(peak - ground), tl.exp2(new_peak - ground)


@triton.jit
def _sum_of(x, factor, new, new_factor):
    """`x * factor + new * new_factor`, rounded the same in both kernels: a compiler may fuse either product."""
    return tl.fma(x, factor, new * new_factor)


@triton.jit
def _with_sink(sinks_ptr, head, head_ok, peak, total, acc):
    """Add the score of a sink, which has no value, to the sum of weights."""
    sink = tl.load(sinks_ptr + head, mask=head_ok, other=0.0).to(tl.float32) * _LOG2_E
    _, old, new = _factors(peak, sink)
    return _sum_of(total, old, 1.0, new), acc * old[:, None]


@triton.jit
def _scores(products, scale, softcap, CAPPED: tl.constexpr):
    """Scores in base 2: `[BLOCK_M, BLOCK_N]` float32."""
    scores = products * scale
    if CAPPED:
        scores = softcap * (2.0 / (1.0 + tl.exp(-2.0 * (scores / softcap))) - 1.0)  # softcap * tanh
    return scores * _LOG2_E


@triton.jit
def _scaled(columns, ptr, row, ok, STRIDE: tl.constexpr, SCALED: tl.constexpr):
    """Columns of codes times the scales of their arena rows; columns of floats unchanged."""
    if SCALED > 0:
        scales_ptr = ptr.to(tl.pointer_type(tl.float32)) + row * (STRIDE // SCALED)
        columns *= tl.load(scales_ptr, mask=ok, other=0.0)[None, :]
    return columns


@triton.jit
def _piecewise(
    q_ptr, q_at, q_ok, k_ptr, k_at, k_ok,
    DIM: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """q k^T of float32 without tensor cores, in blocks of columns that fit into registers."""
    piece: tl.constexpr = min(COLUMNS, 32 if COLUMNS <= 128 else 16)
    products = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for first in range(0, DIM, piece):
        d = first + tl.arange(0, piece)
        q = tl.load(q_ptr + q_at[:, None] + d[None, :], mask=q_ok[:, None] & (d < DIM)[None, :], other=0.0)
        k = tl.load(k_ptr + k_at[:, None] + d[None, :], mask=k_ok[:, None] & (d < DIM)[None, :], other=0)
        products = tl.dot(q, tl.trans(k.to(tl.float32)), products, input_precision="ieee")
    return products


@triton.jit
def _over_keys(
    q_ptr, q_at, row_ok, k_ptr, v_ptr, table_ptr, start, stop, position, scale, softcap,
    DIM: tl.constexpr, COLUMNS: tl.constexpr, REST: tl.constexpr, V_DIM: tl.constexpr, V_PADDED: tl.constexpr,
    K_STRIDE: tl.constexpr, V_STRIDE: tl.constexpr, SCALED: tl.constexpr, WITHIN: tl.constexpr, PAGE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """Result of keys start .. stop - 1 for a tile: largest score, sum of weights, sum of weighted values."""
    kind: tl.constexpr = q_ptr.dtype.element_ty
    exact: tl.constexpr = kind == tl.float32
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, V_PADDED], tl.float32)
    d, of_value = tl.arange(0, COLUMNS), tl.arange(0, V_PADDED)
    of_rest = COLUMNS + tl.arange(0, REST if REST > 0 else COLUMNS)
    q, q_rest = 0.0, 0.0
    if not exact:
        q = tl.load(q_ptr + q_at[:, None] + d[None, :], mask=row_ok[:, None] & (d < DIM)[None, :], other=0.0)
        if REST > 0:
            there = row_ok[:, None] & (of_rest < DIM)[None, :]
            q_rest = tl.load(q_ptr + q_at[:, None] + of_rest[None, :], mask=there, other=0.0)
    n = start + tl.arange(0, BLOCK_N)
    page = tl.load(table_ptr + n // PAGE, mask=n < stop, other=0)
    for first in range(start, stop, BLOCK_N):
        n = first + tl.arange(0, BLOCK_N)
        row = page.to(tl.int64) * PAGE + n % PAGE
        at, loadable = row * K_STRIDE, (n < stop)[:, None]
        # Look up the pages of the next block here, so that its keys do not wait for them: otherwise the compiler makes
        # the look-up a separate pipeline stage, and keeps one block less in flight.
        after = n + BLOCK_N
        page = tl.load(table_ptr + after // PAGE, mask=after < stop, other=0)
        v = 0.0  # until set below
        if exact or not WITHIN:
            v_ok = loadable & (of_value < V_DIM)[None, :]
            v = tl.load(v_ptr + (row * V_STRIDE + SCALED)[:, None] + of_value[None, :], mask=v_ok, other=0).to(kind)
        if exact:
            products = _piecewise(q_ptr, q_at, row_ok, k_ptr, at + SCALED, n < stop, DIM, COLUMNS, BLOCK_M, BLOCK_N)
        else:
            k_at = at + SCALED
            k = tl.load(k_ptr + k_at[:, None] + d[None, :], mask=loadable & (d < DIM)[None, :], other=0).to(kind)
            products = tl.dot(q, tl.trans(k))
            if WITHIN:
                v = k
            if REST > 0:
                rest_ok = loadable & (of_rest < DIM)[None, :]
                k_rest = tl.load(k_ptr + k_at[:, None] + of_rest[None, :], mask=rest_ok, other=0).to(kind)
                products = tl.dot(q_rest, tl.trans(k_rest), products)
        products = _scaled(products, k_ptr, row, n < stop, K_STRIDE, SCALED)  # codes are exact in any type
        visible = n[None, :] <= position[:, None]  # masks keys from `stop` on: it ends a block, or is beyond all rows
        if WINDOW > 0:
            visible = visible & (n[None, :] > position[:, None] - WINDOW)
        if CHUNK > 0:
            visible = visible & (n[None, :] >= (position // CHUNK * CHUNK)[:, None])
        scores = tl.where(visible, _scores(products, scale, softcap, CAPPED), float("-inf"))
        largest = tl.maximum(peak, tl.max(scores, 1))
        ground = tl.where(largest == float("-inf"), 0.0, largest)
        weights = tl.exp2(scores - ground[:, None])
        faded = tl.exp2(peak - ground)
        total = total * faded + tl.sum(weights, 1)
        weights = _scaled(weights, v_ptr, row, n < stop, V_STRIDE, SCALED)
        acc = tl.dot(weights.to(kind), v, acc * faded[:, None], input_precision="ieee")
        peak = largest
    return peak, total, acc


@triton.jit
def _store_part(parts_ptr, sums_ptr, at, row_ok, peak, total, acc, V_PADDED: tl.constexpr):
    d = tl.arange(0, V_PADDED)
    tl.store(parts_ptr + (at * V_PADDED)[:, None] + d[None, :], acc, mask=row_ok[:, None])
    tl.store(sums_ptr + 2 * at, peak, mask=row_ok)
    tl.store(sums_ptr + 2 * at + 1, total, mask=row_ok)


@triton.jit
def _over_splits(
    q_ptr, q_at, row_ok, k_ptr, v_ptr, table_ptr, oldest, newest, position, scale, softcap,
    parts_ptr, sums_ptr, at, turn, turns, parts,
    DIM: tl.constexpr, COLUMNS: tl.constexpr, REST: tl.constexpr, V_DIM: tl.constexpr, V_PADDED: tl.constexpr,
    K_STRIDE: tl.constexpr, V_STRIDE: tl.constexpr, SCALED: tl.constexpr, WITHIN: tl.constexpr, PAGE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr, CAPPED: tl.constexpr,
    SPLIT: tl.constexpr, PER_LEVEL: tl.constexpr, LEVELS: tl.constexpr,
):  # fmt: skip
    """Every `turns`-th split: merged if there is one turn, else each stored as a separate part."""
    begin = split_at(oldest, SPLIT, PER_LEVEL, LEVELS)
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, V_PADDED], tl.float32)
    for part in range(turn, parts, turns):
        first = tl.maximum(split_start(begin + part, SPLIT, PER_LEVEL), oldest // BLOCK_N * BLOCK_N)
        stop = tl.minimum(split_start(begin + part + 1, SPLIT, PER_LEVEL), newest)
        new_peak, new_total, new_acc = _over_keys(
            q_ptr, q_at, row_ok, k_ptr, v_ptr, table_ptr, first, stop, position, scale, softcap,
            DIM, COLUMNS, REST, V_DIM, V_PADDED, K_STRIDE, V_STRIDE, SCALED, WITHIN, PAGE, BLOCK_M, BLOCK_N,
            WINDOW, CHUNK, CAPPED,
        )  # fmt: skip
        if turns > 1:
            _store_part(parts_ptr, sums_ptr, at * parts + part, row_ok, new_peak, new_total, new_acc, V_PADDED)
        else:
            peak, old, new = _factors(peak, new_peak)
            total = _sum_of(total, old, new_total, new)
            acc = _sum_of(acc, old[:, None], new_acc, new[:, None])
    return peak, total, acc


@triton.jit(do_not_specialize=["width"], do_not_specialize_on_alignment=["tables_ptr", "sinks_ptr"])
def _attend_kernel(
    q_ptr, k_ptr, v_ptr, sinks_ptr, out_ptr, parts_ptr, sums_ptr, items_ptr, tables_ptr, scale, softcap, q_stride,
    width,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, OF_HEADS: tl.constexpr, TILE_HEADS: tl.constexpr,
    DIM: tl.constexpr, COLUMNS: tl.constexpr, REST: tl.constexpr, V_DIM: tl.constexpr, V_PADDED: tl.constexpr,
    K_STRIDE: tl.constexpr, V_STRIDE: tl.constexpr, SCALED: tl.constexpr, WITHIN: tl.constexpr, BLOCK_M: tl.constexpr,
    SPLIT: tl.constexpr, PER_LEVEL: tl.constexpr, LEVELS: tl.constexpr, PAGE: tl.constexpr, BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr, CHUNK: tl.constexpr, CAPPED: tl.constexpr, HAS_SINKS: tl.constexpr, RUNS: tl.constexpr,
):  # fmt: skip
    """One item for one tile of heads: the tile's result, or this program's parts of it."""
    item_ptr = items_ptr + tl.program_id(0) * _ITEM
    rows = tl.load(item_ptr + 1)
    if rows > 0:
        first_row, start, table = tl.load(item_ptr), tl.load(item_ptr + 2), tl.load(item_ptr + 3)
        turn, turns = tl.load(item_ptr + 4), tl.load(item_ptr + 5)
        parts, cell = tl.load(item_ptr + 6), tl.load(item_ptr + 7)
        head = tl.program_id(1) // OF_HEADS
        table_ptr = tables_ptr + table.to(tl.int64) * width
        # Large offsets (arena, batch) are added to the pointers, so that offsets within a tile are small.
        q_ptr += first_row.to(tl.int64) * q_stride + head * (GROUP * DIM)
        k_ptr += head * (SCALED + DIM)
        v_ptr += head * (SCALED + V_DIM)
        parts_ptr += cell.to(tl.int64) * V_PADDED
        sums_ptr += cell.to(tl.int64) * 2
        m = tl.arange(0, BLOCK_M)
        d = tl.arange(0, V_PADDED)
        row, of_head = m // TILE_HEADS, tl.program_id(1) % OF_HEADS * TILE_HEADS + m % TILE_HEADS
        row_ok = (row < rows) & (of_head < GROUP)
        q_at = row * q_stride + of_head * DIM
        at = row * (KV_HEADS * GROUP) + head * GROUP + of_head
        oldest, newest = oldest_of(start, WINDOW, CHUNK), tl.load(item_ptr + 8)
        aligned = oldest // BLOCK_N * BLOCK_N
        if RUNS:
            blocks = (tl.maximum(newest - aligned, 0) + BLOCK_N - 1) // BLOCK_N
            first = aligned + (blocks.to(tl.int64) * turn // turns).to(tl.int32) * BLOCK_N
            stop = tl.minimum(aligned + (blocks.to(tl.int64) * (turn + 1) // turns).to(tl.int32) * BLOCK_N, newest)
            peak, total, acc = _over_keys(
                q_ptr, q_at, row_ok, k_ptr, v_ptr, table_ptr, first, stop, start + row, scale, softcap,
                DIM, COLUMNS, REST, V_DIM, V_PADDED, K_STRIDE, V_STRIDE, SCALED, WITHIN, PAGE, BLOCK_M, BLOCK_N,
                WINDOW, CHUNK, CAPPED,
            )  # fmt: skip
            if turns > 1:
                _store_part(parts_ptr, sums_ptr, at * parts + turn, row_ok, peak, total, acc, V_PADDED)
        else:
            peak, total, acc = _over_splits(
                q_ptr, q_at, row_ok, k_ptr, v_ptr, table_ptr, oldest, newest, start + row, scale, softcap,
                parts_ptr, sums_ptr, at, turn, turns, parts,
                DIM, COLUMNS, REST, V_DIM, V_PADDED, K_STRIDE, V_STRIDE, SCALED, WITHIN, PAGE, BLOCK_M, BLOCK_N,
                WINDOW, CHUNK, CAPPED, SPLIT, PER_LEVEL, LEVELS,
            )  # fmt: skip
        if turns == 1:
            if HAS_SINKS:
                total, acc = _with_sink(sinks_ptr, head * GROUP + of_head, row_ok, peak, total, acc)
            out_ptr += first_row.to(tl.int64) * (KV_HEADS * GROUP * V_DIM)
            acc = acc / tl.where(total > 0, total, 1.0)[:, None]  # a row before position 0 has no keys and becomes 0
            out_ok = row_ok[:, None] & (d < V_DIM)[None, :]
            tl.store(out_ptr + (at * V_DIM)[:, None] + d[None, :], acc.to(out_ptr.dtype.element_ty), mask=out_ok)


@triton.jit(do_not_specialize_on_alignment=["sinks_ptr"])
def _merge_kernel(
    parts_ptr, sums_ptr, out_ptr, sinks_ptr, items_ptr, merges_ptr,
    HEADS: tl.constexpr, V_DIM: tl.constexpr, V_PADDED: tl.constexpr, HAS_SINKS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Merge rows of one head of a shared tile: its parts from left to right, as one program would."""
    item = tl.load(merges_ptr + tl.program_id(0))
    if item >= 0:
        item_ptr = items_ptr + item * _ITEM
        first_row, rows = tl.load(item_ptr), tl.load(item_ptr + 1)
        parts, cell = tl.load(item_ptr + 6), tl.load(item_ptr + 7)
        row = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
        row_ok = row < rows
        d = tl.arange(0, V_PADDED)
        at = row * HEADS + tl.program_id(1)
        parts_ptr += cell.to(tl.int64) * V_PADDED
        sums_ptr += cell.to(tl.int64) * 2
        peak = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        acc = tl.zeros([ROWS, V_PADDED], tl.float32)
        for first in range(0, parts, _AT_ONCE):
            # Unrolled, so that all loads precede the sums. Parts beyond the last add nothing.
            for i in tl.static_range(_AT_ONCE):
                part, there = at * parts + first + i, row_ok & (row * 0 + first + i < parts)
                new_peak = tl.load(sums_ptr + 2 * part, mask=there, other=float("-inf"))
                new_total = tl.load(sums_ptr + 2 * part + 1, mask=there, other=0.0)
                new_acc = tl.load(parts_ptr + (part * V_PADDED)[:, None] + d[None, :], mask=there[:, None], other=0.0)
                peak, old, new = _factors(peak, new_peak)
                total = _sum_of(total, old, new_total, new)
                acc = _sum_of(acc, old[:, None], new_acc, new[:, None])
        if HAS_SINKS:
            total, acc = _with_sink(sinks_ptr, row * 0 + tl.program_id(1), row_ok, peak, total, acc)
        out_ptr += first_row.to(tl.int64) * (HEADS * V_DIM)
        acc = acc / tl.where(total > 0, total, 1.0)[:, None]
        out_ok = row_ok[:, None] & (d < V_DIM)[None, :]
        tl.store(out_ptr + (at * V_DIM)[:, None] + d[None, :], acc.to(out_ptr.dtype.element_ty), mask=out_ok)
