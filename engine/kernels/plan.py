"""Assigns programs to the keys of each tile of a pass, by their number. Computed once for all layers.

It is computed on the device, because lengths may exist only there and a graph's launches have fixed shapes.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from pilotfish.engine.kernels import paging as cuts
from pilotfish.engine.kernels.paging import ITEM, LEVELS, PER_LEVEL, SPLIT, Paging, Tile, Tuning

_ITEM = tl.constexpr(ITEM)
_PLANNED = 256  # tiles per block of the plan
_ALL = 1 << 30  # programs: more than the maximum number of splits


@dataclass(frozen=True, slots=True)
class Plan:
    """The keys and tile of each program: the same for all layers of a pass with equal shape and reach."""

    items: Tensor  # [W, ITEM] int32, one for each program of a K/V head; see `_plan_kernel`
    merges: Tensor  # [M] int32, items whose tiles are shared by several programs; -1: none
    num_cells: int  # unmerged results of shared tiles: one cell per row and head
    tile: Tile
    is_prompt: bool
    tuning: Tuning
    splits: dict[str, int]


def plans_of(
    query: Tensor,  # [T, heads, key_dim]
    k: Tensor,  # [rows, kv_heads, key_dim]
    paging: Paging,
    window: int | None = None,
    *,
    chunk: int | None = None,
    value_dim: int | None = None,
    spread: bool | None = None,
    split: int = SPLIT,
    per_level: int = PER_LEVEL,
    tuning: Tuning | None = None,
) -> tuple[Plan, ...]:
    """A plan for the tiles of each kind, computed on the device.

    `spread`: divide the keys of each tile among one program per split, or assign them to one program; default: by
    length. `value_dim` is the size of a value, by default that of a key. `split` and `per_level` are
    `paging.split_of`'s.
    """
    num_rows, heads, dim = query.shape
    kv_heads = k.shape[1]
    group = heads // kv_heads
    num_keys = min(paging.max_kv, paging.tables.shape[1] * paging.page_size)
    max_splits = cuts.split_of(num_keys - 1, split, per_level) + 1
    splits = {"SPLIT": split, "PER_LEVEL": per_level, "LEVELS": LEVELS}
    plans = []
    for tiles, is_prompt in ((paging.tiles, False), (paging.prompts, True)):
        if tiles is None or not len(tiles):
            continue
        tile = cuts.tile_of(group, prompt=is_prompt)
        if not is_prompt:  # fewer heads if values are wide: 4 rows x 16 heads of 512 -> 4 x 8
            tile = Tile(
                tile.rows, max(1, min(tile.heads, cuts.DECODE_SUMS // cuts.padded(value_dim or dim) // tile.rows))
            )
        chosen = tuning or cuts.tuning_for(query.dtype, group, dim, is_prompt)
        if k.dtype == torch.int8 and not is_prompt:  # codes become floats in registers: larger blocks would spill
            chosen = replace(chosen, block_n=min(chosen.block_n, 32))
        programs = chosen.programs if spread is None else _ALL if spread else 0
        sizes = cuts.plan_sizes(len(tiles), tile, num_rows, heads, kv_heads, value_dim or dim, max_splits, programs)
        items = torch.empty((sizes.items, ITEM), dtype=torch.int32, device=query.device)
        merges = torch.empty(sizes.merges, dtype=torch.int32, device=query.device)
        _plan_kernel[(1,)](
            tiles, paging.spans, items, merges, len(tiles), *astuple(sizes), num_keys,
            HEADS=heads, ROWS=tile.rows, **splits, WINDOW=window or 0, CHUNK=chunk or 0, RUNS=is_prompt, BLOCK=_PLANNED,
            num_warps=4,
        )  # fmt: skip
        plans.append(Plan(items, merges, sizes.cells, tile, is_prompt, chosen, splits))
    return tuple(plans)


@triton.jit
def split_at(position, SPLIT: tl.constexpr, PER_LEVEL: tl.constexpr, LEVELS: tl.constexpr):
    """As `paging.split_of`."""
    level = position * 0
    for i in tl.static_range(1, LEVELS):
        level += (position >= SPLIT * PER_LEVEL * ((1 << i) - 1)).to(tl.int32)
    size = (level * 0 + SPLIT) << level
    return level * PER_LEVEL + (position - (size - SPLIT) * PER_LEVEL) // size


@triton.jit
def split_start(split, SPLIT: tl.constexpr, PER_LEVEL: tl.constexpr):
    """The first key position of a split."""
    level = split // PER_LEVEL
    size = (level * 0 + SPLIT) << level
    return (size - SPLIT) * PER_LEVEL + (split % PER_LEVEL) * size


@triton.jit
def oldest_of(position, WINDOW: tl.constexpr, CHUNK: tl.constexpr):
    """The first key that a row at `position` sees, by its window and its chunk."""
    oldest = tl.maximum(position - WINDOW + 1, 0) if WINDOW > 0 else position * 0
    return tl.maximum(oldest, position // CHUNK * CHUNK) if CHUNK > 0 else oldest


@triton.jit(
    do_not_specialize=["num_tiles", "wanted", "num_items", "num_merges", "num_cells", "num_keys"],
    do_not_specialize_on_alignment=["tiles_ptr", "spans_ptr"],
)
def _plan_kernel(
    tiles_ptr, spans_ptr, items_ptr, merges_ptr, num_tiles, wanted, num_items, num_merges, num_cells, num_keys,
    HEADS: tl.constexpr, ROWS: tl.constexpr, SPLIT: tl.constexpr, PER_LEVEL: tl.constexpr, LEVELS: tl.constexpr,
    WINDOW: tl.constexpr, CHUNK: tl.constexpr, RUNS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Assign each tile one program, and further ones of `wanted` in proportion to its keys.

    An item is: first row in the batch, rows (0: idle), position of the first, row of `tables`, the program's turn,
    turns, parts of the tile, its first cell, the end of its keys. Item t is the first of tile t; the others follow.
    """
    total = tl.zeros([BLOCK], tl.int64)
    for first in range(0, num_tiles, BLOCK):
        _, _, position, rows = _tile_at(tiles_ptr, spans_ptr, first + tl.arange(0, BLOCK), num_tiles, ROWS)
        keys = tl.minimum(position + rows, num_keys) - oldest_of(position, WINDOW, CHUNK)
        total += tl.where(rows > 0, tl.maximum(keys, 0), 0)
    all_keys = tl.maximum(tl.sum(total), 1)
    used, merged, cells = num_tiles, num_tiles * 0, tl.sum(tl.zeros([BLOCK], tl.int64))
    for first in range(0, num_tiles, BLOCK):
        t = first + tl.arange(0, BLOCK)
        row, table, position, rows = _tile_at(tiles_ptr, spans_ptr, t, num_tiles, ROWS)
        oldest, newest = oldest_of(position, WINDOW, CHUNK), tl.minimum(position + rows, num_keys)
        keys = tl.maximum(newest - oldest, 0).to(tl.int64)
        splits = (
            split_at(tl.maximum(newest - 1, oldest), SPLIT, PER_LEVEL, LEVELS)
            - split_at(oldest, SPLIT, PER_LEVEL, LEVELS)
            + 1
        )
        turns = ((2 * keys * wanted + all_keys) // (2 * all_keys)).to(tl.int32)
        turns = tl.where(rows > 0, tl.minimum(turns, splits), 0)
        parts = turns if RUNS else splits
        need = tl.where(turns > 1, rows * HEADS * parts, 0).to(tl.int64)
        cell = cells + tl.cumsum(need) - need
        is_shared = (turns > 1) & (cell + need <= num_cells)
        turns = tl.where(is_shared, turns, 1)
        item = used + tl.cumsum(turns - 1) - (turns - 1)
        for turn in range(tl.max(turns)):
            at = items_ptr + tl.where(turn == 0, t, item + turn - 1) * _ITEM
            mine = (turn < turns) & (t < num_tiles)
            tl.store(at, row, mask=mine)
            tl.store(at + 1, rows, mask=mine)
            tl.store(at + 2, position, mask=mine)
            tl.store(at + 3, table, mask=mine)
            tl.store(at + 4, turns * 0 + turn, mask=mine)
            tl.store(at + 5, turns, mask=mine)
            tl.store(at + 6, parts, mask=mine)
            tl.store(at + 7, cell.to(tl.int32), mask=mine)
            tl.store(at + 8, newest, mask=mine)
        place = merged + tl.cumsum(is_shared.to(tl.int32)) - 1
        tl.store(merges_ptr + place, t, mask=is_shared)
        used += tl.sum(turns - 1)
        merged += tl.sum(is_shared.to(tl.int32))
        cells += tl.sum(need)
    for first in range(used, num_items, BLOCK):
        i = first + tl.arange(0, BLOCK)
        tl.store(items_ptr + i * _ITEM + 1, i * 0, mask=i < num_items)
    for first in range(merged, num_merges, BLOCK):
        i = first + tl.arange(0, BLOCK)
        tl.store(merges_ptr + i, i * 0 - 1, mask=i < num_merges)


@triton.jit
def _tile_at(tiles_ptr, spans_ptr, t, num_tiles, ROWS: tl.constexpr):
    """Of tiles `t`: first row in the batch, row of `tables`, position of the first row, rows (0: idle)."""
    sequence = tl.load(tiles_ptr + 2 * t, mask=t < num_tiles, other=-1)
    off = tl.load(tiles_ptr + 2 * t + 1, mask=t < num_tiles, other=0)
    span_ptr, there = spans_ptr + 4 * sequence, sequence >= 0
    first = tl.load(span_ptr, mask=there, other=0)
    rows = tl.load(span_ptr + 1, mask=there, other=0)
    start = tl.load(span_ptr + 2, mask=there, other=0)
    table = tl.load(span_ptr + 3, mask=there, other=0)
    return first + off, table, start + off, tl.maximum(tl.minimum(rows - off, ROWS), 0)
