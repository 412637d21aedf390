"""Rows in 16 bits times a matrix in 4 bits (W4A16): levels are converted to floats in registers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pilotfish.engine.kernels import is_interpreted
from pilotfish.engine.kernels.args import GROUP, TILE_OUTPUTS, WORDS, MatmulTile

MERGED_ROWS = 64  # maximum number of rows for which the groups of one output may be split among programs
_PROGRAMS = 396  # three per multiprocessor of an H100: fewer would not use the full memory bandwidth
_FEWEST = 4  # groups of a split


_FEW, _SOME = MatmulTile(16, TILE_OUTPUTS, 4, 5), MatmulTile(MERGED_ROWS, TILE_OUTPUTS, 4, 3)
_MANY = MatmulTile(128, 128, 8, 2)


def w4_matmul(
    x: Tensor,  # [M, in], bfloat16 or float16, its rows dense
    words: Tensor,  # [in / GROUP, out, WORDS] int16
    scale: Tensor,  # [in / GROUP, out]
    bias: Tensor | None,  # [out]
    arrived: Tensor,  # [at least out / TILE_OUTPUTS] int32, zeros before and after; one for each matrix
) -> Tensor:  # [M, out]
    """As `reference.w4_matmul`. The order of a row's sums depends on the tile, one of three, selected by M.

    Not for concurrent passes: programs that share outputs count in `arrived` to find the last one.
    """
    rows, (groups, outputs, _) = len(x), words.shape
    out = torch.empty((rows, outputs), dtype=x.dtype, device=x.device)
    assert words.numel() < 2**31, "a matrix too large for offsets of 32 bits"
    if not rows:
        return out
    tile = _FEW if rows <= _FEW.rows else _SOME if rows <= _SOME.rows else _MANY
    tiles = triton.cdiv(outputs, tile.outputs)
    splits = max(1, min(_PROGRAMS // tiles, groups // _FEWEST)) if rows <= MERGED_ROWS else 1
    per_split = triton.cdiv(groups, splits)
    splits = triton.cdiv(groups, per_split)
    parts = torch.empty((splits if splits > 1 else 0, rows, outputs), dtype=torch.float32, device=x.device)
    _w4_kernel[(tiles, splits, triton.cdiv(rows, tile.rows))](
        x, words, scale, bias if bias is not None else x, parts, arrived, out, rows, outputs, groups, per_split,
        splits, GROUP=GROUP, WORDS=WORDS, BLOCK_M=tile.rows, BLOCK_N=tile.outputs, HAS_BIAS=bias is not None,
        INTERPRETED=is_interpreted(), num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return out


@triton.constexpr_function
def _instructions(shift, dtype):
    """For two 16-bit words in a register. With the exponent of 128 (float16: 1024) the last bit is worth 1."""
    kind, base, one, zero = (
        ("bf16x2", "0x43004300", "0x3f803f80", "0xc308c308") if dtype == tl.bfloat16
        else ("f16x2", "0x64006400", "0x3c003c00", "0xe408e408")
    )  # fmt: skip
    return f"""{{
        .reg .b32 bits, one, zero;
        shr.u32 bits, $1, {shift};
        lop3.b32 bits, bits, 0x000f000f, {base}, 0xea;
        mov.b32 one, {one};
        mov.b32 zero, {zero};
        fma.rn.{kind} $0, bits, one, zero;
    }}"""


@triton.jit
def _level(word, INDEX: tl.constexpr, DTYPE: tl.constexpr, INTERPRETED: tl.constexpr):
    """The level in bits 4 * INDEX to 4 * INDEX + 3 of each word, as a float: 0 .. 15 means -8 .. 7."""
    if INTERPRETED:
        found = (((word >> 4 * INDEX) & 15).to(tl.float32) - 8.0).to(DTYPE)
    else:  # the compiler would shift both words of a register one by one
        found = tl.inline_asm_elementwise(
            _instructions(4 * INDEX, DTYPE), "=r,r", [word], dtype=tl.int16, is_pure=True, pack=2
        ).to(DTYPE, bitcast=True)
    return found


@triton.jit(do_not_specialize=["rows", "groups", "per_split", "splits"])
def _w4_kernel(
    x_ptr, words_ptr, scale_ptr, bias_ptr, parts_ptr, arrived_ptr, out_ptr, rows, outputs, groups, per_split, splits,
    GROUP: tl.constexpr, WORDS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HAS_BIAS: tl.constexpr,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    """A block of rows, outputs and groups of inputs. The matrix is the left operand, which may be in registers."""
    tile, split = tl.program_id(0), tl.program_id(1)
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    j = tl.arange(0, WORDS)
    real_n, real_m = n < outputs, m < rows
    words_ptr += n[:, None].to(tl.int64) * WORDS + j[None, :]
    x_ptr += m[:, None].to(tl.int64) * (groups * GROUP) + j[None, :]
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    first, last = split * per_split, tl.minimum((split + 1) * per_split, groups) - 1
    scale_ptr += n
    scale = tl.load(scale_ptr + first * outputs, mask=real_n, other=0.0)
    for group in range(first, last + 1):
        # Loaded one iteration ahead, because the compiler does not prefetch these.
        next_scale = tl.load(scale_ptr + tl.minimum(group + 1, last) * outputs, mask=real_n, other=0.0)
        word = tl.load(words_ptr + group * outputs * WORDS, mask=real_n[:, None], other=0)
        part = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        for i in tl.static_range(4):
            some_x = tl.load(x_ptr + group * GROUP + i * WORDS, mask=real_m[:, None], other=0.0)
            part = tl.dot(_level(word, i, x_ptr.dtype.element_ty, INTERPRETED), some_x.trans(), part)
        acc += part * scale.to(tl.float32)[:, None]
        scale = next_scale
    at = m[None, :].to(tl.int64) * outputs + n[:, None]
    real = real_n[:, None] & real_m[None, :]
    if splits > 1:
        every = rows.to(tl.int64) * outputs
        tl.store(parts_ptr + split * every + at, acc, mask=real)
        tl.debug_barrier()  # all results of this program are written before it signals
        is_last = tl.atomic_add(arrived_ptr + tile, 1, sem="acq_rel") == splits - 1
        if is_last:
            tl.store(arrived_ptr + tile, 0)
            acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
            for i in range(splits):  # in a fixed order, whichever program is last
                acc += tl.load(parts_ptr + i * every + at, mask=real, other=0.0, cache_modifier=".cg")
    else:
        is_last = True
    if is_last:
        if HAS_BIAS:
            acc += tl.load(bias_ptr + n, mask=real_n, other=0.0).to(tl.float32)[:, None]
        tl.store(out_ptr + at, acc.to(out_ptr.dtype.element_ty), mask=real)
