"""Packs codes in groups, as checkpoints hold them, into panels (`Groups` in matmul.h). Knows only numbers."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.native.blocks import StoredCodes
from engine.native.compiled import fields, function
from engine.native.weights import empty, placed, spread

_KINDS = {torch.float16: 0, torch.bfloat16: 1, torch.float32: 2}


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
        """The number of groups of an output."""
        finest = next((x for x in (self.steps, self.zeros) if x is not None), self.scale)
        return finest.shape[1]

    def form(self, inputs: int) -> Groups:
        """Describe a matrix with these scales for C."""
        has = (x is not None for x in (self.steps, self.offset, self.zeros))
        block = self.groups // self.scale.shape[1]
        return Groups(inputs // self.groups, block, _KINDS[self.scale.dtype], *has)


def panels_of_groups(
    parts: Seq[Tensor | StoredCodes], bits: int, scales: GroupScales, width: int, codes_from: int
) -> Tensor:
    """Pack codes, stacked along the outputs, and their scales -> uint8 `[out / width rounded up, bytes of a panel]`.

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
