"""Rounds weights (`round.c`) and packs them into panels (`panels.c`), on all threads. Knows only numbers.

A matrix is cut into slices of rows, and each free thread takes the next slice. So a thread that has lost its core
delays only one slice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sized
from collections.abc import Sequence as Seq
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from typing import TypeVar

import torch
from torch import Tensor

from engine.machine.mapped import in_pages
from engine.machine.threads import most_threads
from engine.native.compiled import BITS, function, library

AnySliced = TypeVar("AnySliced", bound=Sized)
_SLICE = 2**20  # bytes of the input that a slice reads


def rounds(weight: Tensor, group: int) -> bool:
    """Whether C can round a matrix `[out, in]` in groups of so many inputs, in its present type, device and layout."""
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
    """Float matrices `[out, in]`, stacked -> panels `[out / width, in / G, width, G]`, G numbers in 4 bytes."""
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
