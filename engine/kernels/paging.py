"""Where the rows of a batch and their keys lie, as device tensors that a kernel reads; and how keys are split."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor

SPLIT = 256  # keys in one of the first splits
PER_LEVEL = 16  # splits of one size; those that follow are twice as long
LEVELS = 12  # 16 million positions
_TILE_ROWS = 8  # query rows that share one reading of K/V: a verification of up to 7 drafts


def send(numbers: Tensor, device: torch.device) -> Tensor:
    """To the device. From pinned memory a copy takes its place behind what the device has to do; others wait for it."""
    return numbers.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else numbers.to(device)


def tile_size(group: int) -> int:
    """Rows of a tile: query rows times the query heads of one KV head, a power of two, at least 16.

    The same for every batch: on a GPU another size may be another instruction, with another order of sums.
    group 1 -> 16, 4 -> 32, 7 -> 64.
    """
    return max(16, 1 << (_TILE_ROWS * group - 1).bit_length())


def split_of(position: int, split: int = SPLIT, per_level: int = PER_LEVEL) -> int:
    """The split that a key position belongs to: a function of the position alone, so that batch mates never matter.

    With splits of 4, two per level: positions 0..3 -> 0, 4..7 -> 1, 8..15 -> 2, 16..23 -> 3, 24..39 -> 4.
    """
    level = (position // (split * per_level) + 1).bit_length() - 1
    return level * per_level + (position - split * per_level * ((1 << level) - 1)) // (split << level)


@dataclass(frozen=True, slots=True)
class Paging:
    """N tiles over B sequences; everything that changes from step to step is in the tensors.

    Two sequences, tiles of two query rows, A feeds three rows from position 5 on, B one row at position 9:

        spans [[0, 3, 5, a], [3, 1, 9, b]]        a and b are rows of `tables`
        tiles [[0, 0], [0, 2], [1, 0]]            a tile of sequence -1 is idle
    """

    tiles: Tensor  # [N, 2] int32: the sequence, and which of its new rows the tile begins with
    spans: Tensor  # [B, 4] int32: first row in the batch, number of rows, position of the first, row of `tables`
    tables: Tensor  # [S, W] int32, arena pages
    page_size: int
    max_kv: int  # no sequence is longer; a bound for the host, which changes no result

    @classmethod
    def of(
        cls,
        num_rows: Seq[int],
        starts: Seq[int],
        tables: Seq[Seq[int]],
        page_size: int,
        group: int,
        device: torch.device,
    ) -> Paging:
        """Lay out sequences that feed `num_rows` rows each from position `starts` on, in one upload."""
        step = tile_size(group) // group
        tiles = [(i, first) for i, n in enumerate(num_rows) for first in range(0, n, step)] or [(-1, 0)]
        width = max(1, *map(len, tables))
        flat = [number for tile in tiles for number in tile]
        first = 0
        for i, (n, start) in enumerate(zip(num_rows, starts, strict=True)):
            flat += (first, n, start, i)
            first += n
        for table in tables:
            flat += (*table, *[0] * (width - len(table)))
        packed = send(torch.tensor(flat, dtype=torch.int32), device)
        first_span, first_table = 2 * len(tiles), 2 * len(tiles) + 4 * len(num_rows)
        return cls(
            tiles=packed[:first_span].view(-1, 2),
            spans=packed[first_span:first_table].view(-1, 4),
            tables=packed[first_table:].view(len(tables), width),
            page_size=page_size,
            max_kv=max(1, *(start + n for n, start in zip(num_rows, starts, strict=True))),
        )
