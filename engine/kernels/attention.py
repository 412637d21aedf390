"""Ragged paged attention in one kernel: verification, decoding and chunked prefill alike.

A tile holds some query rows of one sequence times the query heads of one KV head, so that K and V are read once for all
of them. Keys are split by absolute position (`paging.split_of`), and what the splits say is merged from left to right.
Whether one program walks all splits of a tile, or each split has its own and a second kernel merges, is a matter of
speed alone: both add the same numbers in the same order, and no number depends on the rest of the batch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.paging import LEVELS, PER_LEVEL, SPLIT, Paging, split_of, tile_size

_LOG2_E = tl.constexpr(1.4426950408889634)
_PROGRAMS = 264  # two for each multiprocessor of a large card: with fewer tiles than these, splits are spread
_LARGE_HEAD = 128  # larger heads take narrower blocks of keys and more warps


def attend(
    query: Tensor,  # [T, heads, head_dim]; rows may be strided
    k: Tensor,  # [rows, kv_heads, head_dim], the arena of one layer
    v: Tensor,
    paging: Paging,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    *,
    spread: bool | None = None,
    split: int = SPLIT,
    per_level: int = PER_LEVEL,
) -> Tensor:  # [T, heads, head_dim]
    """softmax(q k^T * scale + causal mask) v, each sequence over its own pages; rows of no tile stay unwritten.

    `spread` gives each split of the keys a program of its own, or leaves them to one; by default as there are tiles.
    `split` and `per_level` are `paging.split_of`'s.
    """
    _, heads, dim = query.shape
    kv_heads = k.shape[1]
    group = heads // kv_heads
    if query.stride()[1:] != (dim, 1):
        query = query.contiguous()
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    num_splits = split_of(paging.max_kv - 1, split, per_level) + 1
    tiles = (len(paging.tiles), kv_heads)
    spread = (num_splits > 1 and tiles[0] * tiles[1] < _PROGRAMS) if spread is None else spread
    dim_padded = max(16, triton.next_power_of_2(dim))  # the least that a matmul of tiles takes
    parts, sums = out, out
    if spread:
        parts = query.new_empty((len(query), heads, num_splits, dim_padded), dtype=torch.float32)
        sums = query.new_empty((len(query), heads, num_splits, 2), dtype=torch.float32)
    large = dim > _LARGE_HEAD
    sizes = {"KV_HEADS": kv_heads, "GROUP": group, "DIM": dim, "DIM_PADDED": dim_padded, "BLOCK_M": tile_size(group)}
    splits = {"SPLIT": split, "PER_LEVEL": per_level, "LEVELS": LEVELS}
    _attend_kernel[(*tiles, num_splits if spread else 1)](
        query, k, v, out, parts, sums, paging.tiles, paging.spans, paging.tables, scale, softcap or 0.0,
        query.stride(0), paging.tables.stride(0), num_splits,
        **sizes, **splits, PAGE=paging.page_size, BLOCK_N=min(split, 32 if large else 64), WINDOW=window or 0,
        CAPPED=softcap is not None, SPREAD=spread, num_warps=8 if large else 4, num_stages=3,
    )  # fmt: skip
    if spread:
        _merge_kernel[(*tiles, tile_size(group))](
            parts, sums, out, paging.tiles, paging.spans, num_splits, **sizes, **splits, WINDOW=window or 0, num_warps=1
        )
    return out


@triton.jit
def _split_of(position, SPLIT: tl.constexpr, PER_LEVEL: tl.constexpr, LEVELS: tl.constexpr):
    """As `paging.split_of`."""
    level = position * 0
    for i in tl.static_range(1, LEVELS):
        level += (position >= SPLIT * PER_LEVEL * ((1 << i) - 1)).to(tl.int32)
    size = (level * 0 + SPLIT) << level
    return level * PER_LEVEL + (position - (size - SPLIT) * PER_LEVEL) // size


@triton.jit
def _split_start(split, SPLIT: tl.constexpr, PER_LEVEL: tl.constexpr):
    """The first key position of a split."""
    level = split // PER_LEVEL
    size = (level * 0 + SPLIT) << level
    return (size - SPLIT) * PER_LEVEL + (split % PER_LEVEL) * size


@triton.jit
def _seen(off, rows, start, ROWS: tl.constexpr, WINDOW: tl.constexpr):
    """Key positions that any row of a tile sees, half-open."""
    oldest = start + off - WINDOW + 1
    oldest = tl.maximum(oldest, 0) if WINDOW > 0 else oldest * 0
    return oldest, start + tl.minimum(off + ROWS, rows)


@triton.jit
def _factors(peak, new_peak):
    """The larger of two maxima (base 2), and what each part is scaled by; a part of no key has maximum -inf."""
    largest = tl.maximum(peak, new_peak)
    ground = tl.where(largest == float("-inf"), 0.0, largest)
    return largest, tl.exp2(peak - ground), tl.exp2(new_peak - ground)


@triton.jit
def _scores(q, k, scale, softcap, CAPPED: tl.constexpr):
    """Scores in base 2: `[BLOCK_M, BLOCK_N]` float32."""
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    if CAPPED:
        scores = softcap * (2.0 / (1.0 + tl.exp(-2.0 * (scores / softcap))) - 1.0)  # softcap * tanh
    return scores * _LOG2_E


@triton.jit
def _over_keys(
    q, k_ptr, v_ptr, table_ptr, start, stop, position, row_ok, head, scale, softcap,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, DIM_PADDED: tl.constexpr, PAGE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """What keys start .. stop - 1 say to a tile: the largest score, the sum of weights, the sum of weighted values."""
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, DIM_PADDED], tl.float32)
    d = tl.arange(0, DIM_PADDED)
    for first in range(start, stop, BLOCK_N):
        n = first + tl.arange(0, BLOCK_N)
        page = tl.load(table_ptr + n // PAGE, mask=n < stop, other=0)
        at = (page.to(tl.int64) * PAGE + n % PAGE) * (KV_HEADS * DIM) + head * DIM
        loadable = (n < stop)[:, None] & (d < DIM)[None, :]
        k = tl.load(k_ptr + at[:, None] + d[None, :], mask=loadable, other=0.0)
        visible = (n[None, :] <= position[:, None]) & row_ok[:, None] & (n < stop)[None, :]
        if WINDOW > 0:
            visible = visible & (n[None, :] > position[:, None] - WINDOW)
        scores = tl.where(visible, _scores(q, k, scale, softcap, CAPPED), float("-inf"))
        largest = tl.maximum(peak, tl.max(scores, 1))
        ground = tl.where(largest == float("-inf"), 0.0, largest)
        weights = tl.exp2(scores - ground[:, None])
        faded = tl.exp2(peak - ground)
        v = tl.load(v_ptr + at[:, None] + d[None, :], mask=loadable, other=0.0)
        total = total * faded + tl.sum(weights, 1)
        acc = acc * faded[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        peak = largest
    return peak, total, acc


@triton.jit
def _attend_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, parts_ptr, sums_ptr, tiles_ptr, spans_ptr, tables_ptr, scale, softcap,
    q_stride, width, num_splits,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, DIM_PADDED: tl.constexpr, BLOCK_M: tl.constexpr,
    SPLIT: tl.constexpr, PER_LEVEL: tl.constexpr, LEVELS: tl.constexpr, PAGE: tl.constexpr, BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr, CAPPED: tl.constexpr, SPREAD: tl.constexpr,
):  # fmt: skip
    tile, head = tl.program_id(0), tl.program_id(1)
    sequence, off = tl.load(tiles_ptr + 2 * tile), tl.load(tiles_ptr + 2 * tile + 1)
    if sequence >= 0:
        span_ptr = spans_ptr + 4 * sequence
        rows, start = tl.load(span_ptr + 1), tl.load(span_ptr + 2)
        table_ptr = tables_ptr + tl.load(span_ptr + 3).to(tl.int64) * width
        oldest, newest = _seen(off, rows, start, BLOCK_M // GROUP, WINDOW)
        begin = _split_of(oldest, SPLIT, PER_LEVEL, LEVELS)
        end = _split_of(newest - 1, SPLIT, PER_LEVEL, LEVELS) + 1
        if SPREAD:
            begin = tl.maximum(begin, tl.program_id(2))
            end = tl.minimum(end, tl.program_id(2) + 1)
        m = tl.arange(0, BLOCK_M)
        d = tl.arange(0, DIM_PADDED)
        row = off + m // GROUP
        row_ok = (row < rows) & (m < (BLOCK_M // GROUP) * GROUP)
        flat = (tl.load(span_ptr) + row).to(tl.int64)
        query_head = head * GROUP + m % GROUP
        cell_ok = row_ok[:, None] & (d < DIM)[None, :]
        q = tl.load(q_ptr + (flat * q_stride + query_head * DIM)[:, None] + d[None, :], mask=cell_ok, other=0.0)
        peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, DIM_PADDED], tl.float32)
        for split in range(begin, end):
            first = tl.maximum(_split_start(split, SPLIT, PER_LEVEL), oldest // BLOCK_N * BLOCK_N)
            stop = tl.minimum(_split_start(split + 1, SPLIT, PER_LEVEL), newest)
            new_peak, new_total, new_acc = _over_keys(
                q, k_ptr, v_ptr, table_ptr, first, stop, start + row, row_ok, head, scale, softcap,
                KV_HEADS, DIM, DIM_PADDED, PAGE, BLOCK_M, BLOCK_N, WINDOW, CAPPED,
            )  # fmt: skip
            peak, old, new = _factors(peak, new_peak)
            total = total * old + new_total * new
            acc = acc * old[:, None] + new_acc * new[:, None]
        out = (flat * (KV_HEADS * GROUP) + query_head).to(tl.int64)
        if SPREAD:
            if begin < end:
                out = out * num_splits + tl.program_id(2)
                tl.store(parts_ptr + (out * DIM_PADDED)[:, None] + d[None, :], acc, mask=row_ok[:, None])
                tl.store(sums_ptr + 2 * out, peak, mask=row_ok)
                tl.store(sums_ptr + 2 * out + 1, total, mask=row_ok)
        else:
            acc = acc / tl.where(total > 0, total, 1.0)[:, None]  # a row before position 0 sees nothing, and gets 0
            tl.store(out_ptr + (out * DIM)[:, None] + d[None, :], acc.to(out_ptr.dtype.element_ty), mask=cell_ok)


@triton.jit
def _merge_kernel(
    parts_ptr, sums_ptr, out_ptr, tiles_ptr, spans_ptr, num_splits,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, DIM_PADDED: tl.constexpr, BLOCK_M: tl.constexpr,
    SPLIT: tl.constexpr, PER_LEVEL: tl.constexpr, LEVELS: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """One row of one head: its splits from left to right, as `_attend_kernel` would have merged them."""
    tile, head, m = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    sequence, off = tl.load(tiles_ptr + 2 * tile), tl.load(tiles_ptr + 2 * tile + 1)
    if sequence >= 0:
        span_ptr = spans_ptr + 4 * sequence
        rows, start = tl.load(span_ptr + 1), tl.load(span_ptr + 2)
        row = off + m // GROUP
        if (row < rows) & (m < (BLOCK_M // GROUP) * GROUP):
            oldest, newest = _seen(off, rows, start, BLOCK_M // GROUP, WINDOW)
            begin = _split_of(oldest, SPLIT, PER_LEVEL, LEVELS)
            end = _split_of(newest - 1, SPLIT, PER_LEVEL, LEVELS) + 1
            d = tl.arange(0, DIM_PADDED)
            out = (tl.load(span_ptr) + row).to(tl.int64) * (KV_HEADS * GROUP) + head * GROUP + m % GROUP
            peak, total = float("-inf"), 0.0
            acc = tl.zeros([DIM_PADDED], tl.float32)
            for split in range(begin, end):
                part = out * num_splits + split
                new_total = tl.load(sums_ptr + 2 * part + 1)
                peak, old, new = _factors(peak, tl.load(sums_ptr + 2 * part))
                total = total * old + new_total * new
                acc = acc * old + tl.load(parts_ptr + part * DIM_PADDED + d) * new
            acc = acc / tl.where(total > 0, total, 1.0)
            tl.store(out_ptr + out * DIM + d, acc.to(out_ptr.dtype.element_ty), mask=d < DIM)
