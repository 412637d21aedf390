"""All experts of a mixture: the places of a batch are grouped by expert on the device, and matmuls run group by group.

A place is a row of the batch and one of its chosen experts; a tile is some places of one expert. A program multiplies
one tile by a block of outputs of its expert's matrix. It adds all inputs in order, so a row's sums are equal in any
tile of that size. Nothing is read on the host, and shapes depend only on the number of places: the maximum number of
tiles is launched, and programs of empty ones end immediately.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pilotfish.engine.kernels.args import FusedWeights, MatmulTile

_SEEN = 512  # places per block of a program
_SUMMED = 512  # outputs of one row per program of the sum


_FEW, _MANY = MatmulTile(16, 64, 4, 5), MatmulTile(64, 128, 8, 3)
_INPUTS = 64  # of one step of a sum


def mix(
    x: Tensor,  # [T, in], its rows dense
    chosen: Tensor,  # [T, k] integers; invalid experts add nothing
    weights: Tensor,  # [T, k]
    stacks: FusedWeights,
) -> Tensor:  # [T, out]
    """As `reference.mix`. A row's bits depend on other rows only through the tile size, which their number selects.

    The larger tile uses tensor cores; it is selected if experts have, on average, at least as many places as the
    smaller tile.
    """
    x, chosen, weights = x.contiguous(), chosen.contiguous(), weights.contiguous()
    (rows, each), out = chosen.shape, torch.empty((len(x), stacks.out_features), dtype=x.dtype, device=x.device)
    if not rows:
        return out
    num_places, num_experts = rows * each, len(stacks.down)
    is_prompt = x.dtype != torch.float32 and num_places >= _FEW.rows * num_experts
    tile = _MANY if is_prompt else _FEW
    tiles = min(num_places, num_places // tile.rows + num_experts)
    order, table = _grouped(chosen, num_experts, tile.rows, tiles)
    inner, given = (
        torch.empty((num_places, size), dtype=x.dtype, device=x.device) for size in (stacks.inner, stacks.out_features)
    )
    halves = 0 if stacks.ungated else 1 if stacks.interleaved else 2
    for source, matrix, bias, target, shared, kind in (
        (x, stacks.up, stacks.up_bias, inner, each, halves), (inner, stacks.down, stacks.down_bias, given, 1, -1)
    ):  # fmt: skip
        inputs, outputs = matrix.shape[1:] if stacks.transposed else matrix.shape[:0:-1]
        assert inputs * outputs < 2**31, "a matrix too large for 32-bit offsets"
        _experts_kernel[(triton.cdiv(outputs, tile.outputs), tiles)](
            source, matrix, bias if bias is not None else source, target, order, table, *stacks.numbers,
            INPUTS=inputs, OUTPUTS=outputs, EACH=shared, TRANSPOSED=stacks.transposed, HAS_BIAS=bias is not None,
            GATE=kind, SQUARED=stacks.squared, BLOCK_M=tile.rows, BLOCK_N=tile.outputs, BLOCK_K=_INPUTS,
            num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
    _sum_kernel[(rows, triton.cdiv(stacks.out_features, _SUMMED))](
        given, chosen, weights, out, EXPERTS=num_experts, OUTPUTS=stacks.out_features, EACH=each, BLOCK=_SUMMED,
        num_warps=4,
    )  # fmt: skip
    return out


def _grouped(chosen: Tensor, num_experts: int, places: int, tiles: int) -> tuple[Tensor, Tensor]:
    """Places by expert, int32 `[T k]`; and tiles of them: int32 `[tiles, 3]`, expert (-1: idle), first, how many.

    Experts 2, 0, 2, 2 in tiles of two: [1, 0, 2, 3], [[0, 0, 1], [2, 1, 2], [2, 3, 1], [-1, ...]].
    """
    bins = triton.next_power_of_2(num_experts + 1)
    order = torch.empty(chosen.numel(), dtype=torch.int32, device=chosen.device)
    table = torch.empty((tiles, 3), dtype=torch.int32, device=chosen.device)
    starts = torch.empty(bins, dtype=torch.int32, device=chosen.device)
    _tiles_kernel[(1,)](
        chosen, starts, table, chosen.numel(), tiles, EXPERTS=num_experts, BINS=bins, PLACES=places, BLOCK=_SEEN,
        num_warps=4,
    )  # fmt: skip
    _order_kernel[(num_experts,)](chosen, starts, order, chosen.numel(), BLOCK=_SEEN, num_warps=4)
    return order, table


@triton.jit(do_not_specialize=["num_places", "num_tiles"])
def _tiles_kernel(
    chosen_ptr, starts_ptr, table_ptr, num_places, num_tiles,
    EXPERTS: tl.constexpr, BINS: tl.constexpr, PLACES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Count the places of each expert, compute their offsets, and split them into tiles."""
    counts = tl.zeros([BINS], tl.int32)
    for first in range(0, num_places, BLOCK):
        p = first + tl.arange(0, BLOCK)
        expert = tl.load(chosen_ptr + p, mask=p < num_places, other=EXPERTS).to(tl.int32)
        is_known = (expert >= 0) & (expert < EXPERTS)
        counts += tl.histogram(tl.where(is_known, expert, EXPERTS), BINS)  # an additional bin for invalid ones
    expert = tl.arange(0, BINS)
    counts = tl.where(expert < EXPERTS, counts, 0)
    starts = tl.cumsum(counts) - counts
    tl.store(starts_ptr + expert, starts)
    tiles = (counts + PLACES - 1) // PLACES
    at = tl.cumsum(tiles) - tiles
    for i in range(tl.max(tiles)):
        tile_ptr, mine = table_ptr + (at + i) * 3, i < tiles
        tl.store(tile_ptr, expert, mask=mine)
        tl.store(tile_ptr + 1, starts + i * PLACES, mask=mine)
        tl.store(tile_ptr + 2, tl.minimum(counts - i * PLACES, PLACES), mask=mine)
    for first in range(tl.sum(tiles), num_tiles, BLOCK):
        idle = first + tl.arange(0, BLOCK)
        tl.store(table_ptr + idle * 3, idle * 0 - 1, mask=idle < num_tiles)


@triton.jit(do_not_specialize=["num_places"])
def _order_kernel(chosen_ptr, starts_ptr, order_ptr, num_places, BLOCK: tl.constexpr):
    """Write the places of one expert, in the order of the batch."""
    expert = tl.program_id(0)
    at, stop = tl.load(starts_ptr + expert), tl.load(starts_ptr + expert + 1)
    if at < stop:
        for first in range(0, num_places, BLOCK):
            p = first + tl.arange(0, BLOCK)
            mine = (tl.load(chosen_ptr + p, mask=p < num_places, other=-1) == expert).to(tl.int32)
            tl.store(order_ptr + at + tl.cumsum(mine) - 1, p, mask=mine > 0)
            at += tl.sum(mine)


@triton.jit
def _bent(x, linear, cubic, SQUARED: tl.constexpr):
    """The activation of a gate; `x` is already clamped to its limit."""
    over = tl.maximum(x, 0.0)
    return over * over if SQUARED else x / (1.0 + tl.exp(-(linear * x + cubic * x * x * x)))


@triton.jit
def _gated(acc, linear, cubic, limit, plus, GATE: tl.constexpr, SQUARED: tl.constexpr):
    """Outputs by places, as in `ExpertGate`: gates and ups alternate (1), or are concatenated (2)."""
    if GATE == 0:
        acc = _bent(tl.minimum(acc, limit), linear, cubic, SQUARED)
    elif GATE > 0:
        half: tl.constexpr = acc.shape[0] // 2
        if GATE == 1:
            pairs = tl.permute(tl.reshape(acc, [half, 2, acc.shape[1]]), (0, 2, 1))
        else:
            pairs = tl.permute(tl.reshape(acc, [2, half, acc.shape[1]]), (1, 2, 0))
        gate, up = tl.split(pairs)
        up = tl.minimum(tl.maximum(up, -limit), limit) + plus
        acc = _bent(tl.minimum(gate, limit), linear, cubic, SQUARED) * up
    return acc


@triton.jit
def _experts_kernel(
    x_ptr, matrix_ptr, bias_ptr, out_ptr, order_ptr, table_ptr, linear, cubic, limit, plus,
    INPUTS: tl.constexpr, OUTPUTS: tl.constexpr, EACH: tl.constexpr, TRANSPOSED: tl.constexpr,
    HAS_BIAS: tl.constexpr, GATE: tl.constexpr, SQUARED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One tile times a block of outputs of its expert's matrix, which is the left operand because it has more rows."""
    tile_ptr = table_ptr + tl.program_id(1) * 3
    expert = tl.load(tile_ptr)
    if expert >= 0:
        first, places = tl.load(tile_ptr + 1), tl.load(tile_ptr + 2)
        m, k = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_K)
        real_m = m < places
        place = tl.load(order_ptr + first + m, mask=real_m, other=0)
        # A block of both halves has its gates first, followed by their ups.
        block, c = tl.program_id(0) * BLOCK_N, tl.arange(0, BLOCK_N)
        width: tl.constexpr = OUTPUTS // 2 if GATE > 0 else OUTPUTS  # of the result
        span: tl.constexpr = BLOCK_N // 2 if GATE > 0 else BLOCK_N
        if GATE == 2:
            column = tl.program_id(0) * span + c % span
            n, real_n = c // span * width + column, column < width
        else:
            n, real_n = block + c, block + c < OUTPUTS
        matrix_ptr += expert.to(tl.int64) * (INPUTS * OUTPUTS)
        at = n[:, None] + k[None, :] * OUTPUTS if TRANSPOSED else n[:, None] * INPUTS + k[None, :]
        x_at = (place // EACH)[:, None].to(tl.int64) * INPUTS + k[None, :]
        acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        for begin in range(0, INPUTS, BLOCK_K):
            real_k = (begin + k < INPUTS)[None, :]
            step: tl.constexpr = OUTPUTS if TRANSPOSED else 1
            some = tl.load(matrix_ptr + at + begin * step, mask=real_n[:, None] & real_k, other=0.0)
            rows = tl.load(x_ptr + x_at + begin, mask=real_m[:, None] & real_k, other=0.0)
            acc = tl.dot(some, rows.trans(), acc, input_precision="ieee")
        if HAS_BIAS:
            acc += tl.load(bias_ptr + expert * OUTPUTS + n, mask=real_n, other=0.0).to(tl.float32)[:, None]
        acc = _gated(acc, linear, cubic, limit, plus, GATE, SQUARED)
        column = tl.program_id(0) * span + tl.arange(0, span)
        out_at = place[None, :].to(tl.int64) * width + column[:, None]
        real = real_m[None, :] & (column < width)[:, None]
        tl.store(out_ptr + out_at, acc.to(out_ptr.dtype.element_ty), mask=real)


@triton.jit
def _sum_kernel(
    given_ptr, chosen_ptr, weights_ptr, out_ptr,
    EXPERTS: tl.constexpr, OUTPUTS: tl.constexpr, EACH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The sum of the results of one row's experts times their weights, in the order of selection."""
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for i in range(EACH):
        place = row * EACH + i
        expert, weight = tl.load(chosen_ptr + place) + n * 0, tl.load(weights_ptr + place).to(tl.float32)
        is_known = (expert >= 0) & (expert < EXPERTS)  # rows of invalid experts are uninitialised
        given = tl.load(given_ptr + place * OUTPUTS + n, mask=(n < OUTPUTS) & is_known, other=0.0)
        total += tl.where(is_known, weight, 0.0) * given.to(tl.float32)
    tl.store(out_ptr + row * OUTPUTS + n, total.to(out_ptr.dtype.element_ty), mask=n < OUTPUTS)
