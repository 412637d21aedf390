"""Splits blocks of codes as GGUF files hold them into codes, scales and offsets (`blocks.c`). Knows only numbers."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence as Seq

from torch import Tensor

from engine.native.compiled import function, library
from engine.native.weights import empty, placed, spread

_KINDS = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")  # as `KINDS` of blocks.c
_I64, _PTR = ctypes.c_int64, ctypes.c_void_p


def splits(kind: str) -> bool:
    """Whether there is compiled code for blocks of this type."""
    return kind in _KINDS and library() is not None


def split_blocks(kind: str, parts: Seq[Tensor], block: Seq[Tensor | None]) -> list[Tensor | None]:
    """Blocks, uint8 `[out, blocks, bytes]` each, stacked along the outputs -> codes, scale, offset, steps, zeros.

    `block` are these five of one block, `[1, n]`, or None: those of a row have as many times the numbers.
    """
    outputs, blocks = sum(map(len, parts)), parts[0].shape[1]
    made = [None if x is None else empty(outputs, blocks * x.shape[1], dtype=x.dtype) for x in block]
    call = function("blocks", (_PTR, _I64, _I64, *[_PTR] * 5))
    for start, part in placed(parts):
        dense = part.contiguous().flatten(1)

        def work(first: int, last: int, start: int = start, dense: Tensor = dense) -> None:
            to = (None if x is None else x[start + first :].data_ptr() for x in made)
            call(dense[first:].data_ptr(), (last - first) * blocks, _KINDS.index(kind), *to)

        spread(dense, work)
    return made
