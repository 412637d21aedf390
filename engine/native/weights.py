"""Matrices of codes in groups: rounds weights (`round.c`), splits GGUF blocks (`blocks.c`), packs panels (`panels.c`).

A matrix is divided into slices of rows, and each free thread takes the next slice, so a descheduled thread delays only
one slice.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from collections.abc import Sequence as Seq
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from pilotfish.engine.machine.mapped import in_pages
from pilotfish.engine.machine.threads import most_threads
from pilotfish.engine.native.compiled import BITS, fields, function, library

_SLICE = 2**20  # bytes of the input that a slice reads
_FLOAT_KINDS = {torch.float16: 0, torch.bfloat16: 1, torch.float32: 2}
_TYPES = {4: torch.uint8, 5: torch.uint8, 6: torch.uint8, 8: torch.int8}  # of codes, by their bits
ALIGNED = 16  # inputs: a whole number of vectors
_ALIGNED = {4: ALIGNED, 5: 2 * ALIGNED, 6: ALIGNED, 8: ALIGNED}  # group sizes must be multiples of this, in inputs
_BY_OUTPUT = ("scale", "offset", "bias", "steps", "zeros")  # fields of `GroupedCodes`, each a row for each output
_OF_BLOCKS = ("codes", "scale", "offset", "steps", "zeros")  # of `GroupedCodes`, in the order of blocks.c
_BLOCK_KINDS = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")  # as `KINDS` of blocks.c


def rounds(weight: Tensor, group: int) -> bool:
    """Whether C can round this matrix `[out, in]` in groups of `group` inputs, given its type, device and layout."""
    fits = weight.dtype in BITS and weight.is_cpu and weight.stride(1) == 1 and group in (16, 32)
    return fits and library() is not None


def rounded(weight: Tensor, group: int, bits: int, bias: Tensor | None) -> GroupedCodes:
    """`[out, in]` -> its codes, in C; see `model/linear/rounding.py`."""
    outputs, inputs = weight.shape
    half, groups = torch.float16, inputs // group
    form = (group,) if bits == 8 else (group, bits)
    if bits == 8:
        codes, scale = empty(outputs, inputs, dtype=torch.int8), torch.empty(outputs, groups, dtype=half)
        made, name = GroupedCodes(codes, bits, scale, None, bias=bias), "round_symmetric"
        written = [codes, scale]
    else:
        codes = empty(outputs, inputs // 2 if bits == 4 else inputs, dtype=torch.uint8)
        scale, offset = (torch.empty(outputs, 1, dtype=half) for _ in range(2))
        steps, zeros = (torch.empty(outputs, groups, dtype=kind) for kind in (torch.int8, torch.uint8))
        made = GroupedCodes(codes, bits, scale, offset, bias=bias, steps=steps, zeros=zeros)
        written, name = [codes, scale, offset, steps, zeros], "round_asymmetric"

    def work(first: int, last: int) -> None:
        part, to = weight[first:last], (x[first:].data_ptr() for x in written)
        function(name)(part.data_ptr(), BITS[part.dtype], part.stride(0), *part.shape, *form, *to)

    spread(outputs, inputs * weight.element_size(), work)
    return made


def panels_of(parts: Seq[Tensor], width: int) -> Tensor:
    """Float matrices `[out, in]`, concatenated -> panels `[out / width, in / G, width, G]`, G numbers in 4 bytes."""
    outputs, inputs, group = sum(map(len, parts)), parts[0].shape[1], 4 // parts[0].element_size()
    panels = empty(-(-outputs // width), inputs // group, width, group, dtype=parts[0].dtype)
    panels[outputs // width :].zero_()  # padding: outputs beyond the matrix
    call = function("panels")
    for start, part in zip(accumulate(map(len, parts), initial=0), parts, strict=False):
        dense = part.contiguous()

        def work(first: int, last: int, start: int = start, dense: Tensor = dense) -> None:
            call(dense[first:].data_ptr(), last - first, inputs // group, width, start + first, panels.data_ptr())

        spread(len(dense), inputs * dense.element_size(), work, width)
    return panels


def empty(*shape: int, dtype: torch.dtype) -> Tensor:
    """Allocate memory for weights in large pages, which are faster to map and to access."""
    made = torch.empty(*shape, dtype=dtype)
    in_pages(made, large=True)
    return made


def spread(rows: int, size: int, work: Callable[[int, int], None], multiple: int = 1) -> None:
    """Run `work(first, last)` on slices of rows of `size` bytes; all but the last have a `multiple` of rows."""
    step = max(1, _SLICE // max(1, size) // multiple) * multiple
    firsts = range(0, rows, step)
    if len(firsts) == 1:  # starting a thread takes longer than most slices
        work(0, rows)
        return
    with ThreadPoolExecutor(min(most_threads(), len(firsts) or 1)) as threads:
        for _ in threads.map(lambda first: work(first, min(rows, first + step)), firsts):
            pass


class Groups(ctypes.Structure):
    """`Groups` of matmul.h."""

    _fields_ = (*fields("n", "size block"), *fields("i", "kind has_steps has_offset has_zeros"))


@dataclass(frozen=True, slots=True)
class GroupedCodes:
    """A matrix `[out, in]` of a checkpoint: weight = code * step + offset, by output and group of inputs.

    A copy is the same object, so that models that share weights store them once.

    Usually step = `scale` and offset = `offset`. With two levels, a block of several groups shares these floats: step =
    the block's `scale` times the group's `steps`, and offset = the block's `offset` times the group's `zeros`. With
    only `zeros`, offset = -step times `zeros`: integer zero points.

    Attributes:
        codes: 4 bits: uint8 `[out, in / 2]`, two codes of 0 to 15 in a byte, the first input low; 5 and 6 bits: uint8
            `[out, in]`, codes of 0 to 31 or 63, which take no more than their bits once they are packed; 8 bits: int8
            `[out, in]`. In the blocks of a file where our C splits them.
        bits: 4, 5, 6 or 8.
        scale: float16, bfloat16 or float32 `[out, blocks]`.
        offset: float16, bfloat16 or float32 `[out, blocks]`; without it and `zeros` the middle code means 0: 8, 16 or
            32, and of 8 bits 0.
        order: int64 `[in]`: column j of the codes multiplies input `order[j]`; None where they are in the same order.
        bias: float `[out]` or None.
        steps: int8 `[out, groups]` or None.
        zeros: of the type of the codes, `[out, groups]`, or None.
    """

    codes: Tensor | StoredCodes
    bits: int
    scale: Tensor
    offset: Tensor | None
    order: Tensor | None = None
    bias: Tensor | None = None
    steps: Tensor | None = None
    zeros: Tensor | None = None

    def __deepcopy__(self, _memo: dict[int, Any]) -> GroupedCodes:
        return self

    @property
    def in_features(self) -> int:
        return self.codes.shape[1] * (2 if self.bits == 4 else 1)

    @property
    def groups(self) -> int:
        """Groups of a row."""
        return next(x for x in (self.steps, self.zeros, self.scale) if x is not None).shape[1]

    @property
    def group(self) -> int:
        """Inputs that share a step and an offset."""
        return self.in_features // self.groups

    @property
    def form(self) -> tuple[object, ...]:
        """The properties that joined matrices must share, besides the order of inputs."""
        types = (None if x is None else x.dtype for x in (self.offset, self.steps, self.zeros))
        return self.bits, self.group, self.scale.shape[1], self.scale.dtype, *types

    @property
    def nbytes(self) -> int:
        """Bytes of the packed codes, steps and offsets."""
        parts = (self.scale, self.offset, self.steps, self.zeros)
        codes = len(self.codes) * self.in_features * self.bits // 8
        return codes + sum(part.nbytes for part in parts if part is not None)

    def worth(self) -> tuple[Tensor, Tensor | None]:
        """Steps and offsets as float32 `[out, groups]`; offsets are None if the middle code means 0."""
        each = self.groups // self.scale.shape[1]
        step = self.scale.float().repeat_interleave(each, 1)
        step = step if self.steps is None else step * self.steps.float()
        if self.offset is None:
            return step, None if self.zeros is None else -step * self.zeros.float()
        offset = self.offset.float().repeat_interleave(each, 1)
        return step, offset if self.zeros is None else offset * self.zeros.float()

    def levels(self) -> Tensor:
        """The codes as float32 `[out, in]`, minus the code that means 0."""
        if self.bits == 8:
            return self.codes[:].float()
        plain = unpack4(self.codes[:]) if self.bits == 4 else self.codes[:]
        return plain.float() - (1 << self.bits - 1 if self.offset is None and self.zeros is None else 0)

    def rows(self, which: slice | Tensor) -> GroupedCodes:
        """Some of the outputs, in any order."""

        def some(x: Any) -> Any:  # `index_select` copies whole rows, `x[which]` single elements
            return x[which] if isinstance(which, slice) else x.index_select(0, which)

        parts = {name: some(x) for name in _BY_OUTPUT if (x := getattr(self, name)) is not None}
        return replace(self, codes=some(self.codes), **parts)

    @classmethod
    def concatenated(cls, parts: Seq[GroupedCodes], codes: Tensor | None = None) -> GroupedCodes:
        """Concatenate the outputs of several matrices of one form; `codes`: the codes of the result."""
        joined: dict[str, Any] = {
            name: torch.cat([getattr(part, name) for part in parts])
            for name in _BY_OUTPUT
            if getattr(parts[0], name) is not None
        }
        whole = torch.cat([part.codes[:] for part in parts]) if codes is None else codes
        return replace(parts[0], codes=whole, **joined)

    def dequantised(self) -> Tensor:
        """The weights as float32 `[out, in]`, with inputs in the order of rows."""
        step, offset = self.worth()
        levels = self.levels().unflatten(1, (step.shape[1], -1))
        if self.zeros is not None and self.offset is None:  # one rounding if the scale is a float32
            levels, offset = levels - self.zeros[..., None], None
        groups = levels * step[..., None]
        flat = (groups if offset is None else groups + offset[..., None]).flatten(1)
        return flat if self.order is None else torch.empty_like(flat).index_copy_(1, self.order, flat)

    def check(self) -> None:
        """Raise ValueError, with the field, if the tensors are inconsistent."""
        if _TYPES.get(self.bits) != self.codes.dtype:
            raise ValueError(
                f"codes: {self.codes.dtype} with bits {self.bits}; expected uint8 with 4, 5 or 6, or int8 with 8"
            )
        blocks = [len(self.codes), self.scale.shape[-1]]
        floats = (("scale", self.scale, _FLOAT_KINDS), ("offset", self.offset, _FLOAT_KINDS))
        of_groups = (("steps", self.steps, (torch.int8,)), ("zeros", self.zeros, (self.codes.dtype,)))
        for name, x, dtypes in (*floats, *of_groups):
            if x is None:
                continue
            if x.dtype not in dtypes:
                raise ValueError(f"{name}: {x.dtype}; expected {' or '.join(map(str, dtypes))}")
            shape = blocks if dtypes is _FLOAT_KINDS else [len(self.codes), self.groups]
            if list(x.shape) != shape or self.in_features % x.shape[1] or x.shape[1] % blocks[1]:
                raise ValueError(f"{name}: {list(x.shape)} does not fit codes {list(self.codes.shape)}, scale {blocks}")
            if x.is_floating_point() and not are_finite(x):
                raise ValueError(f"{name}: has NaN or infinite values")
        whole = _ALIGNED[self.bits]
        if self.group % whole and self.groups > 1:  # a single group of any size is multiplied by torch
            raise ValueError(f"scale: groups of {self.group} inputs, bits {self.bits}; expected a multiple of {whole}")
        if self.order is not None and not torch.equal(self.order.sort().values, torch.arange(self.in_features)):
            raise ValueError(f"order: not a permutation of {self.in_features} inputs")


def unpack4(packed: Tensor) -> Tensor:
    """uint8 `[..., n / 2]` -> uint8 `[..., n]`, numbers of 0 to 15; of each byte the low half comes first."""
    pairs: Tensor = torch.stack([packed & 15, packed >> 4], -1)
    return pairs.flatten(-2)


def pack4(codes: Tensor) -> Tensor:
    """The inverse of `unpack4`."""
    return codes[..., 0::2] | codes[..., 1::2] << 4


def are_finite(x: Tensor) -> bool:
    """Whether all elements are finite, in a seventh of the time of `isfinite`: min and max propagate NaN."""
    return not x.numel() or all(bool(most.isfinite()) for most in x.aminmax())


def panels_of_groups(
    matrix: GroupedCodes, parts: Seq[Tensor | StoredCodes], width: int, codes_from: int
) -> tuple[Tensor, Groups]:
    """Pack `parts`, the codes of a matrix, with scales and offsets: returns panels and their layout for C.

    Panels are uint8 `[out / width rounded up, bytes of a panel]`. `codes_from` is added to 8-bit codes, because some
    processors multiply unsigned ones.
    """
    bits, outputs, blocks, groups = matrix.bits, len(matrix.scale), matrix.scale.shape[1], matrix.groups
    words = parts[0].shape[1] // 4 // groups  # of a group's codes before packing
    heads = [x for x in (matrix.scale, matrix.offset) if x is not None]
    if len({x.dtype for x in heads}) > 1:
        heads = [x.float() for x in heads]
    in_groups = [x for x in (matrix.steps, matrix.zeros) if x is not None]
    block_head, group_head = width * sum(x.element_size() for x in heads), width * len(in_groups)
    each = group_head + (words * bits // 2 if bits in (5, 6) else words * 4) * width
    panels = empty(-(-outputs // width), blocks * block_head + groups * each, dtype=torch.uint8)
    panels[outputs // width :].zero_()  # padding: outputs beyond the matrix
    block = block_head + groups // blocks * each
    _put(heads, panels, width, 0, 1, block, 0)
    _put(in_groups, panels, width, block_head, groups // blocks, block, each)
    call = function("codes")
    for start, part in zip(accumulate(map(len, parts), initial=0), parts, strict=False):

        def work(first: int, last: int, start: int = start, part: Tensor | StoredCodes = part) -> None:
            dense = part[first:last].contiguous()
            where = codes_from, width, start + first, groups // blocks, block_head, group_head, panels.data_ptr()
            call(dense.data_ptr(), last - first, groups, words, bits, *where)

        spread(len(part), part.shape[1] * part.dtype.itemsize, work, width)
    has = (x is not None for x in (matrix.steps, matrix.offset, matrix.zeros))
    return panels, Groups(matrix.group, groups // blocks, _FLOAT_KINDS[heads[0].dtype], *has)


def _put(numbers: Seq[Tensor], panels: Tensor, width: int, at: int, per: int, block: int, each: int) -> None:
    """Write `numbers` `[out, n]` from byte `at` of every panel.

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
    """The codes of a matrix in the blocks of a GGUF file; slices of rows are decoded on use.

    So there is never a copy of all codes, whose allocation would take as long as everything else.

    Attributes:
        kind: the type of the blocks, supported by `splits`.
        blocks: uint8 `[out, blocks, bytes]`, mapped from a file.
        one: the codes of one block, `[1, n]`, for sizes.
        order: int64 `[out]`, the row of `blocks` of each output, or None.
    """

    kind: str
    blocks: Tensor
    one: GroupedCodes
    order: Tensor | None = None

    def __len__(self) -> int:
        return len(self.blocks if self.order is None else self.order)

    @property
    def dtype(self) -> torch.dtype:
        return self.one.codes.dtype

    @property
    def shape(self) -> tuple[int, int]:
        return len(self), self.blocks.shape[1] * self.one.codes.shape[1]

    def __getitem__(self, rows: slice) -> Tensor:
        """The codes of some outputs."""
        first, last, _ = rows.indices(len(self))
        return self._split(rows, self._room(_OF_BLOCKS, last - first))["codes"]

    def index_select(self, _dim: int, which: Tensor) -> StoredCodes:
        """Some of the outputs, in any order."""
        return replace(self, order=which if self.order is None else self.order[which])

    def whole(self) -> GroupedCodes:
        """The matrix: these codes with all scales and offsets."""
        made = self._room(_OF_BLOCKS[1:], len(self))

        def work(first: int, last: int) -> None:
            parts = {name: x[first:last] for name, x in made.items()}
            self._split(slice(first, last), self._room(_OF_BLOCKS[:1], last - first) | parts)

        spread(len(self), self.shape[1] * self.dtype.itemsize, work)
        return replace(self.one, codes=self, **made)

    def _room(self, names: Seq[str], rows: int) -> dict[str, Any]:
        """Memory for the fields that the blocks have."""
        found = ((name, getattr(self.one, name)) for name in names)
        blocks = self.blocks.shape[1]
        return {name: torch.empty(rows, blocks * x.shape[1], dtype=x.dtype) for name, x in found if x is not None}

    def _split(self, rows: slice, to: dict[str, Tensor]) -> dict[str, Tensor]:
        blocks = self.blocks[rows] if self.order is None else self.blocks.index_select(0, self.order[rows])
        dense, places = blocks.contiguous(), (to[name].data_ptr() if name in to else None for name in _OF_BLOCKS)
        function("blocks")(dense.data_ptr(), len(dense) * dense.shape[1], _BLOCK_KINDS.index(self.kind), *places)
        return to
