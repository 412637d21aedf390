"""Rounds weights (`round.c`), splits GGUF blocks (`blocks.c`) and packs panels (`panels.c`), on all threads.

A matrix is cut into slices of rows, and each free thread takes the next slice, so a thread that has lost its core
delays one slice only.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sized
from collections.abc import Sequence as Seq
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TypeVar

import torch
from torch import Tensor

from engine.machine.mapped import in_pages
from engine.machine.threads import most_threads
from engine.native.compiled import BITS, fields, function, library

AnySliced = TypeVar("AnySliced", bound=Sized)
_SLICE = 2**20  # bytes of the input that a slice reads
_FLOAT_KINDS = {torch.float16: 0, torch.bfloat16: 1, torch.float32: 2}
_BLOCK_KINDS = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")  # as `KINDS` of blocks.c


def rounds(weight: Tensor, group: int) -> bool:
    """Whether C can round a matrix `[out, in]` in groups of `group` inputs, in its present type, device and layout."""
    fits = weight.dtype in BITS and weight.is_cpu and weight.stride(1) == 1 and group in (16, 32)
    return fits and library() is not None


def round_symmetric(weight: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """`[out, in]` -> codes int8 of the same shape, scale float16 `[out, groups]`; see `model/linear/rounding.py`."""
    outputs, inputs = weight.shape
    codes, scale = empty(outputs, inputs, dtype=torch.int8), torch.empty(outputs, inputs // group, dtype=torch.float16)
    _round("round_symmetric", weight, (group,), (codes, scale))
    return codes, scale


def round_asymmetric(weight: Tensor, group: int, bits: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`[out, in]` -> codes, scale, offset, steps and zeros of `GroupedCodes`; see `model/linear/rounding.py`."""
    outputs, inputs = weight.shape
    codes = empty(outputs, inputs // 2 if bits == 4 else inputs, dtype=torch.uint8)
    scale, offset = (torch.empty(outputs, 1, dtype=torch.float16) for _ in range(2))
    steps, zeros = (torch.empty(outputs, inputs // group, dtype=kind) for kind in (torch.int8, torch.uint8))
    made = codes, scale, offset, steps, zeros
    _round("round_asymmetric", weight, (group, bits), made)
    return made


def _round(name: str, weight: Tensor, form: tuple[int, ...], made: Seq[Tensor]) -> None:
    """Let a function of round.c write the rows of what is `made` of the rows of a matrix."""

    def work(first: int, last: int) -> None:
        part, to = weight[first:last], (x[first:].data_ptr() for x in made)
        function(name)(part.data_ptr(), BITS[part.dtype], part.stride(0), *part.shape, *form, *to)

    spread(len(weight), weight.shape[1] * weight.element_size(), work)


def panels_of(parts: Seq[Tensor], width: int) -> Tensor:
    """Float matrices `[out, in]`, concatenated -> panels `[out / width, in / G, width, G]`, G numbers in 4 bytes."""
    outputs, inputs, group = sum(map(len, parts)), parts[0].shape[1], 4 // parts[0].element_size()
    panels = empty(-(-outputs // width), inputs // group, width, group, dtype=parts[0].dtype)
    panels[outputs // width :].zero_()  # padding: outputs beyond the matrix
    call = function("panels")
    for start, part in placed(parts):
        dense = part.contiguous()

        def work(first: int, last: int, start: int = start, dense: Tensor = dense) -> None:
            call(dense[first:].data_ptr(), last - first, inputs // group, width, start + first, panels.data_ptr())

        spread(len(dense), inputs * dense.element_size(), work, width)
    return panels


def placed(parts: Seq[AnySliced]) -> Iterator[tuple[int, AnySliced]]:
    """Pairs of (first output, part)."""
    return zip(accumulate(map(len, parts), initial=0), parts, strict=False)


def empty(*shape: int, dtype: torch.dtype) -> Tensor:
    """Allocate memory for weights in large pages, which the system provides faster and addresses faster."""
    made = torch.empty(*shape, dtype=dtype)
    in_pages(made, large=True)
    return made


def spread(rows: int, size: int, work: Callable[[int, int], None], multiple: int = 1) -> None:
    """Run `work(first, last)` for slices of rows of `size` bytes, each but the last a `multiple` of rows."""
    step = max(1, _SLICE // max(1, size) // multiple) * multiple
    firsts = range(0, rows, step)
    if len(firsts) == 1:  # a thread takes longer to start than most slices
        work(0, rows)
        return
    with ThreadPoolExecutor(min(most_threads(), len(firsts) or 1)) as threads:
        for _ in threads.map(lambda first: work(first, min(rows, first + step)), firsts):
            pass


class Groups(ctypes.Structure):
    """`Groups` of matmul.h."""

    _fields_ = (*fields("n", "size block"), *fields("i", "kind has_steps has_offset has_zeros"))


@dataclass(frozen=True, slots=True)
class GroupScales:
    """What the codes of a matrix `[out, in]` are worth: weight = code * step + offset, for each output and group.

    Attributes:
        scale: float16, bfloat16 or float32 `[out, blocks]`; a block is one or several groups.
        steps: int8 `[out, groups]`: a group's step is this times the scale of its block; None where it is the scale.
        offset: `[out, blocks]`, of the type of `scale`, or None.
        zeros: uint8, or int8 for codes of 8 bits, `[out, groups]`: a group's offset is this times `offset`, or times
            minus its step where `offset` is None.
    """

    scale: Tensor
    steps: Tensor | None = None
    offset: Tensor | None = None
    zeros: Tensor | None = None

    @property
    def groups(self) -> int:
        finest = next((x for x in (self.steps, self.zeros) if x is not None), self.scale)
        return finest.shape[1]

    def form(self, inputs: int) -> Groups:
        """Describe a matrix with these scales for C."""
        has = (x is not None for x in (self.steps, self.offset, self.zeros))
        block = self.groups // self.scale.shape[1]
        return Groups(inputs // self.groups, block, _FLOAT_KINDS[self.scale.dtype], *has)


def panels_of_groups(
    parts: Seq[Tensor | StoredCodes], bits: int, scales: GroupScales, width: int, codes_from: int
) -> Tensor:
    """Pack codes, joined along the outputs, and their scales -> uint8 `[out / width rounded up, bytes of a panel]`.

    Codes of 4 bits are uint8 `[out, in / 2]`, two in a byte, the first input low; of 5 and 6 bits uint8 `[out, in]`; of
    8 bits int8 `[out, in]`, to which `codes_from` is added, because some processors multiply unsigned ones.
    """
    outputs, blocks, groups = sum(map(len, parts)), scales.scale.shape[1], scales.groups
    words = parts[0].shape[1] // 4 // groups  # of a group's codes, as they come
    heads = [x for x in (scales.scale, scales.offset) if x is not None]
    in_groups = [x for x in (scales.steps, scales.zeros) if x is not None]
    block_head, group_head = width * sum(x.element_size() for x in heads), width * len(in_groups)
    each = group_head + (words * bits // 2 if bits in (5, 6) else words * 4) * width
    panels = empty(-(-outputs // width), blocks * block_head + groups * each, dtype=torch.uint8)
    panels[outputs // width :].zero_()  # padding: outputs beyond the matrix
    block = block_head + groups // blocks * each
    _put(heads, panels, width, 0, 1, block, 0)
    _put(in_groups, panels, width, block_head, groups // blocks, block, each)
    call = function("codes")
    for start, part in placed(parts):

        def work(first: int, last: int, start: int = start, part: Tensor | StoredCodes = part) -> None:
            dense = part[first:last].contiguous()
            where = codes_from, width, start + first, groups // blocks, block_head, group_head, panels.data_ptr()
            call(dense.data_ptr(), last - first, groups, words, bits, *where)

        spread(len(part), part.shape[1] * part.dtype.itemsize, work, width)
    return panels


def _put(numbers: Seq[Tensor], panels: Tensor, width: int, at: int, per: int, block: int, each: int) -> None:
    """Write each of `numbers` `[out, n]` from byte `at` of every panel, one after the other.

    Number g of an output goes `g / per` blocks of `block` bytes and `g % per` groups of `each` bytes further.
    """
    call = function("numbers")
    for part in numbers:
        dense, size = part.contiguous(), part.element_size()

        def work(first: int, last: int, dense: Tensor = dense, size: int = size, at: int = at) -> None:
            to = panels[first // width :].data_ptr() + at
            rows = dense[first:].data_ptr(), last - first, dense.shape[1]
            call(*rows, size, width, per, block, each, to, panels.shape[1])

        spread(len(dense), dense.shape[1] * size, work, width)
        at += width * size


def splits(kind: str) -> bool:
    """Whether there is compiled code for blocks of this type."""
    return kind in _BLOCK_KINDS and library() is not None


@dataclass(frozen=True, slots=True)
class StoredCodes:
    """The codes of a matrix in the blocks of a GGUF file, of which slices of rows are split when they are used.

    So there is never a copy of all codes: allocating it would take as long as all the rest.

    Attributes:
        kind: the type of the blocks, of those that are split (`splits`).
        blocks: uint8 `[out, blocks, bytes]`, mapped from a file.
        one: codes, scale, offset, steps and zeros of one block, each `[1, n]` or None: those of a row have as many
            times the numbers.
        order: int64 `[out]`, the row of `blocks` that each output is, or None.
    """

    kind: str
    blocks: Tensor
    one: Seq[Tensor | None]
    order: Tensor | None = None

    def __len__(self) -> int:
        return len(self.blocks)

    @property
    def dtype(self) -> torch.dtype:
        return self._codes.dtype

    @property
    def shape(self) -> tuple[int, int]:
        return len(self), self.blocks.shape[1] * self._codes.shape[1]

    def __getitem__(self, rows: slice) -> Tensor:
        """The codes of some outputs."""
        first, last, _ = rows.indices(len(self))
        codes, *others = (self._room(x, last - first) for x in self.one)
        assert codes is not None
        self._split(rows, [codes, *others])
        return codes

    def rows(self, which: Tensor) -> StoredCodes:
        """Some of the outputs, in any order."""
        return replace(self, order=which if self.order is None else self.order[which])

    def scales(self) -> list[Tensor | None]:
        """Scale, offset, steps and zeros of all outputs."""
        made = [self._room(x, len(self)) for x in self.one[1:]]

        def work(first: int, last: int) -> None:
            to = [None if x is None else x[first:last] for x in made]
            self._split(slice(first, last), [self._room(self._codes, last - first), *to])

        spread(len(self), self.shape[1] * self.dtype.itemsize, work)
        return made

    @property
    def _codes(self) -> Tensor:
        codes = self.one[0]
        assert codes is not None
        return codes

    def _room(self, one: Tensor | None, rows: int) -> Tensor | None:
        return None if one is None else torch.empty(rows, self.blocks.shape[1] * one.shape[1], dtype=one.dtype)

    def _split(self, rows: slice, to: Seq[Tensor | None]) -> None:
        blocks = self.blocks[rows] if self.order is None else self.blocks.index_select(0, self.order[rows])
        dense, places = blocks.contiguous(), (None if x is None else x.data_ptr() for x in to)
        function("blocks")(dense.data_ptr(), len(dense) * dense.shape[1], _BLOCK_KINDS.index(self.kind), *places)
