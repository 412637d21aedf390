"""The locations of a batch's rows and keys, as device tensors for attention; and its tile sizes by GPU.

`tuning.json` contains the best values of sweeps on GPUs; other cases use defaults, chosen by the compiler's use of
registers and shared memory (docs/adr/0020-triton-kernels.md).
"""

from __future__ import annotations

import json
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources

import torch
from torch import Tensor

SPLIT = 256  # keys in one of the first splits
PER_LEVEL = 16  # splits of one size; later ones are twice as long
LEVELS = 12  # 16 million positions
ITEM = 9  # fields that describe one program of the attention kernel
PROMPT_ROWS = 32  # minimum rows of a sequence that are treated as a prompt: more than any verification has
_DECODE_ROWS = 8  # query rows that share one read of K/V: a verification of up to 7 drafts
_DECODE_SIZE = 64  # maximum of query rows times heads
DECODE_SUMS = _DECODE_SIZE * 256  # maximum of rows times heads times value size: a program holds two of each sum
_PROMPT_SIZE = 128
SCRATCH = 128 << 20  # maximum bytes for results of programs that share tiles; tiles beyond that are not shared
_SUMS = 2  # float32 numbers of a scratch cell besides its values: the maximum and the sum of weights


def send(numbers: Tensor, device: torch.device) -> Tensor:
    """Copy to the device. Copies from pinned memory are queued; others block until the device is idle."""
    return numbers.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else numbers.to(device)


def send_together(tensors: Seq[Tensor], device: torch.device) -> list[Tensor]:
    """Copy small tensors to the device in one transfer, those with wider elements first."""
    if device.type == "cpu":
        return list(tensors)
    # A view as bytes needs a stride of 1, which `contiguous` does not set for a single number.
    flat = [tensor.clone(memory_format=torch.contiguous_format).flatten().view(torch.uint8) for tensor in tensors]
    parts = send(torch.cat(flat), device).split([len(part) for part in flat])
    return [part.view(tensor.dtype).view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]


@dataclass(frozen=True, slots=True)
class Tile:
    """Query rows of one sequence times query heads of one K/V head, processed by one program."""

    rows: int
    heads: int  # if the K/V head has more, several adjacent tiles share it

    @property
    def size(self) -> int:
        """Rows of its matmuls: a power of two, at least 16."""
        return max(16, 1 << (self.rows * self.heads - 1).bit_length())


def tile_of(group: int, *, prompt: bool = False) -> Tile:
    """The tile of a model with `group` query heads per K/V head, for decoding and verification or for prompts.

    It is the same for every batch: another size may use another instruction, with another order of sums.
    group 1 -> 8 rows x 1 head, 4 -> 8 x 4, 16 -> 4 x 16, 48 -> 1 x 48, 71 -> 1 x 36; prompts 4 -> 32 x 4, 71 -> 3 x 36.
    """
    heads = -(-group // -(-group // _DECODE_SIZE))
    if prompt:
        return Tile(_PROMPT_SIZE // heads, heads)
    return Tile(min(_DECODE_ROWS, _DECODE_SIZE // heads), heads)


def split_of(position: int, split: int = SPLIT, per_level: int = PER_LEVEL) -> int:
    """The split of a key position, a function of the position only.

    With splits of 4, two per level: positions 0..3 -> 0, 4..7 -> 1, 8..15 -> 2, 16..23 -> 3, 24..39 -> 4.
    """
    level = (position // (split * per_level) + 1).bit_length() - 1
    return level * per_level + (position - split * per_level * ((1 << level) - 1)) // (split << level)


@dataclass(frozen=True, slots=True)
class PlanSizes:
    """Lengths of a plan's lists and the size of unmerged results, which do not depend on sequence lengths."""

    wanted: int  # requested programs per K/V head
    items: int  # programs per K/V head: the first of each tile, and the others
    merges: int  # tiles that several programs may share
    cells: int  # of scratch: one row of one head of one part


def plan_sizes(
    num_tiles: int, tile: Tile, num_rows: int, heads: int, kv_heads: int, dim: int, max_splits: int, programs: int
) -> PlanSizes:
    """Sizes for `programs` in total, divided among tiles by their keys: at least one, at most their splits.

    One tile, 8 K/V heads, 24 splits, 528 programs: 24 of each head, one tile to merge. 32 tiles, 81 splits: 98, 32.
    """
    wanted = -(-programs // kv_heads)
    others = min(wanted, num_tiles * (max_splits - 1))
    merges = min(num_tiles, others)
    most = min(merges * tile.rows, num_rows) * heads * max_splits
    return PlanSizes(wanted, num_tiles + others, merges, min(most, SCRATCH // _cell_bytes(dim)))


def scratch_bytes(num_rows: int, heads: int, dim: int, max_kv: int) -> int:
    """Maximum temporary bytes of one layer's attention, for `num_rows` rows with up to `max_kv` keys.

    32 heads of 128: 1 row at 131072 keys 1.3 MB, 5 rows at 8192 keys 2 MB, 160 rows at 131072 keys the maximum.
    """
    cells = num_rows * heads * (split_of(max_kv - 1) + 1) if max_kv > SPLIT else 0
    return min(SCRATCH, cells * _cell_bytes(dim))


def padded(dim: int) -> int:
    """Columns of a head in a kernel: a power of two, at least the minimum of a matmul."""
    return max(16, 1 << (dim - 1).bit_length())


def _cell_bytes(dim: int) -> int:
    return 4 * (padded(dim) + _SUMS)


@dataclass(frozen=True, slots=True)
class Paging:
    """N tiles and M tiles of prompts over B sequences; everything that changes between steps is in the tensors.

    Two sequences, tiles of two query rows, A feeds three rows from position 5 on, B one row at position 9:

        spans [[0, 3, 5, a], [3, 1, 9, b]]        a and b are rows of `tables`
        tiles [[0, 2], [0, 0], [1, 0]]            a tile of sequence -1 is idle
    """

    tiles: Tensor  # [N, 2] int32: the sequence, and the first of its new rows in the tile
    spans: Tensor  # [B, 4] int32: first row in the batch, number of rows, position of the first, row of `tables`
    tables: Tensor  # [S, W] int32, arena pages
    page_size: int
    max_kv: int  # a bound on sequence lengths, for the host; does not change results
    prompts: Tensor | None = None  # [M, 2] int32 like `tiles`, but larger tiles, for sequences with many rows

    @classmethod
    def of(
        cls, num_rows: Seq[int], starts: Seq[int], tables: Seq[Seq[int]], page_size: int, group: int,
        device: torch.device, *, fixed: bool = False,
    ) -> Paging:  # fmt: skip
        """Lay out sequences with `num_rows` rows each from position `starts`, in one upload.

        `fixed`: use decoding tiles for all rows, so that a row's bits do not depend on their number.
        """
        large = [not fixed and n >= PROMPT_ROWS for n in num_rows]
        tiles = _tiles_of([0 if big else n for n, big in zip(num_rows, large, strict=True)], tile_of(group).rows)
        prompts = _tiles_of(
            [n if big else 0 for n, big in zip(num_rows, large, strict=True)], tile_of(group, prompt=True).rows
        )
        width = max(1, *map(len, tables))
        flat = [number for tile in (*tiles, *prompts) for number in tile]
        first = 0
        for i, (n, start) in enumerate(zip(num_rows, starts, strict=True)):
            flat += (first, n, start, i)
            first += n
        for table in tables:
            flat += (*table, *[0] * (width - len(table)))
        packed = send(torch.tensor(flat, dtype=torch.int32), device)
        sizes = [2 * len(tiles), 2 * len(prompts), 4 * len(num_rows), len(tables) * width]
        tiled, prompted, spans, paged = packed.split(sizes)
        return cls(
            tiles=tiled.view(-1, 2),
            spans=spans.view(-1, 4),
            tables=paged.view(len(tables), width),
            page_size=page_size,
            max_kv=max(1, *(start + n for n, start in zip(num_rows, starts, strict=True))),
            prompts=prompted.view(-1, 2),
        )


def _tiles_of(num_rows: Seq[int], step: int) -> list[tuple[int, int]]:
    """[3, 1] in steps of 2 -> [(0, 2), (0, 0), (1, 0)]: those with the most keys, which take longest, come first."""
    return [(i, first) for i, n in enumerate(num_rows) for first in reversed(range(0, n, step))]


# ---------------------------------------------------------------------------------------------------------- by GPU


@dataclass(frozen=True, slots=True)
class Tuning:
    """Parameters that change attention's speed, and of its results at most the last bits, equally for every batch."""

    block_n: int  # keys per block of a program, a power of two
    num_warps: int
    num_stages: int = 3  # 3 keeps two blocks of K and of V in shared memory: one is loaded while the other is processed
    programs: int = 528  # minimum for long sequences: four per multiprocessor of a large GPU


def tuning_for(dtype: torch.dtype, group: int, dim: int, prompt: bool) -> Tuning:
    """The result of a sweep for this GPU, or the default; `group` query heads per K/V head, `prompt`: large tiles."""
    found = _recorded().get(key_of(_capability(), dtype, group, dim, prompt))
    return found or default_for(dtype, group, dim, prompt)


def key_of(capability: str, dtype: torch.dtype, group: int, dim: int, prompt: bool) -> str:
    """9.0, bfloat16, 4, 128, False -> 9.0/bfloat16/4/128/decode."""
    return f"{capability}/{str(dtype).removeprefix('torch.')}/{group}/{dim}/{'prompt' if prompt else 'decode'}"


def default_for(dtype: torch.dtype, group: int, dim: int, prompt: bool) -> Tuning:
    """The widest without register spills and, for decoding, with two programs per multiprocessor."""
    if dtype.itemsize > 2 or dim > 256:
        return Tuning(16, 8)
    is_large = group > 4 and not prompt  # decoding in tiles of 64 rows, on four warps
    return Tuning(32 if dim > 128 or is_large else 64, 8 if dim > 128 or prompt else 4)


@lru_cache
def _capability() -> str:
    if not torch.cuda.is_available():
        return "none"
    return ".".join(map(str, torch.cuda.get_device_capability()))


@lru_cache
def _recorded() -> dict[str, Tuning]:
    text = (resources.files("pilotfish.engine.kernels") / "tuning.json").read_text("utf-8")
    return {key: Tuning(**fields) for key, fields in json.loads(text).items()}
