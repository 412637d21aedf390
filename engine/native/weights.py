"""Rounds weights (`round.c`) and packs them into panels (`panels.c`), on all threads. Knows only numbers.

A matrix is cut into slices of rows, and each free thread takes the next slice. So a thread that has lost its core
delays only one slice.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate

import torch
from torch import Tensor

from engine.machine.mapped import in_large_pages
from engine.machine.threads import most_threads
from engine.native.attention import BITS
from engine.native.compiled import function, library

GROUP = 64  # inputs that share a scale, in 4 bits
_SLICE = 2**20  # bytes of the input that a slice reads
_I64, _PTR, _INT = ctypes.c_int64, ctypes.c_void_p, ctypes.c_int
_SIGNATURES: dict[str, tuple[type, ...]] = {
    "round8": (_PTR, _INT, _I64, _I64, _I64, _PTR, _PTR),
    "round4": (_PTR, _INT, _I64, _I64, _I64, _PTR, _PTR, _PTR),
    "panels": (_PTR, _I64, _I64, _I64, _I64, _PTR, _PTR),
    "panels4": (_PTR, _PTR, _I64, _I64, _I64, _I64, _PTR, _PTR, _PTR),
}


def _function(name: str) -> Callable[..., None]:
    return function(name, _SIGNATURES[name])


def rounds(weight: Tensor) -> bool:
    """Whether C can round a matrix `[out, in]` in its present type, device and layout."""
    return library() is not None and weight.dtype in BITS and weight.is_cpu and weight.stride(1) == 1


def round8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """`[out, in]` -> int8 of the same shape, float32 scale `[out]`, NaN where a number of the row is not finite."""
    (outputs, inputs), call = weight.shape, _function("round8")
    out, scale = empty(outputs, inputs, dtype=torch.int8), torch.empty(outputs)

    def work(first: int, last: int) -> None:
        part = weight[first:last]
        call(
            part.data_ptr(), BITS[part.dtype], part.stride(0), *part.shape, out[first:].data_ptr(),
            scale[first:].data_ptr(),
        )  # fmt: skip

    spread(weight, work)
    return out, scale


def round4(weight: Tensor, levels: Seq[int]) -> tuple[Tensor, Tensor]:
    """`[out, in]` -> uint8 `[out, in / 2]`, indices of two of 16 `levels` in a byte, the first one low.

    Also returns bfloat16 `[out, in / 64]`: the value of one step of a level in each group of inputs.
    """
    (outputs, inputs), call = weight.shape, _function("round4")
    out = empty(outputs, inputs // 2, dtype=torch.uint8)
    scale = torch.empty(outputs, inputs // GROUP, dtype=torch.bfloat16)
    table = torch.tensor(levels, dtype=torch.float32)

    def work(first: int, last: int) -> None:
        part = weight[first:last]
        call(
            part.data_ptr(), BITS[part.dtype], part.stride(0), *part.shape, table.data_ptr(), out[first:].data_ptr(),
            scale[first:].data_ptr(),
        )  # fmt: skip

    spread(weight, work)
    return out, scale


def panels_of(parts: Seq[Tensor], width: int) -> tuple[Tensor, Tensor | None]:
    """Matrices `[out, in]`, stacked -> panels `[out / width, in / G, width, G]`, G numbers in 4 bytes.

    For int8 weights it also returns int32 `[out]`, padded to whole panels: the amount that rows around 128 add to the
    sums.
    """
    outputs, inputs, group = sum(map(len, parts)), parts[0].shape[1], 4 // parts[0].element_size()
    panels = empty(-(-outputs // width), inputs // group, width, group, dtype=parts[0].dtype)
    panels[outputs // width :].zero_()  # padding: outputs beyond the matrix
    offset = torch.zeros(len(panels) * width, dtype=torch.int32) if parts[0].dtype == torch.int8 else None
    to, call = (panels.data_ptr(), None if offset is None else offset.data_ptr()), _function("panels")
    for start, part in placed(parts):
        dense = part.contiguous()

        def work(first: int, last: int, start: int = start, dense: Tensor = dense) -> None:
            call(dense[first:].data_ptr(), last - first, inputs // group, width, start + first, *to)

        spread(dense, work, width)
    return panels, offset


def panels_of_levels(parts: Seq[Tensor], scale: Tensor, levels: Seq[int], width: int) -> tuple[Tensor, Tensor]:
    """Bytes and scales as from `round4` -> bytes `[out / width, words, width * 4]`, see matmul.h.

    Also returns float32 `[out]`, padded to whole panels: the amount that rows around 128 add to the sums.
    """
    assert scale.dtype == torch.bfloat16, "C reads these"
    outputs, groups = scale.shape
    words = 8 * groups + (groups + 1) // 2
    panels = empty(-(-outputs // width), words, 4 * width, dtype=torch.uint8)
    panels[outputs // width :].zero_()  # padding: outputs beyond the matrix
    offset, table, scale = torch.zeros(len(panels) * width), torch.tensor(levels, dtype=torch.int8), scale.contiguous()
    to, call = (table.data_ptr(), panels.data_ptr(), offset.data_ptr()), _function("panels4")
    for start, part in placed(parts):
        dense = part.contiguous()

        def work(first: int, last: int, start: int = start, dense: Tensor = dense) -> None:
            steps = scale[start + first :].data_ptr()
            call(dense[first:].data_ptr(), steps, last - first, groups, width, start + first, *to)

        spread(dense, work, width)
    return panels, offset


def placed(parts: Seq[Tensor]) -> Iterator[tuple[int, Tensor]]:
    """Pairs of (first output, part)."""
    return zip(accumulate(map(len, parts), initial=0), parts, strict=False)


def empty(*shape: int, dtype: torch.dtype) -> Tensor:
    """Allocate memory for weights in large pages, which the system provides faster and addresses faster."""
    made = torch.empty(*shape, dtype=dtype)
    in_large_pages(made)
    return made


def spread(matrix: Tensor, work: Callable[[int, int], None], multiple: int = 1) -> None:
    """Run `work(first, last)` for slices of the rows of `matrix`, each but the last a `multiple` of rows."""
    rows, size = len(matrix), max(1, matrix.shape[1] * matrix.element_size())
    step = max(1, _SLICE // size // multiple) * multiple
    firsts = range(0, rows, step)
    with ThreadPoolExecutor(min(most_threads(), len(firsts) or 1)) as threads:
        for _ in threads.map(lambda first: work(first, min(rows, first + step)), firsts):
            pass
