"""Where the law of a row ends after top-k, then top-p of what is left, without sorting anything.

Scores (logits over temperature, the best at 0) have ranks: the bits of how far a score lies below 0, so that likelier
tokens have smaller ranks. A law is all tokens up to a last rank, and of that rank the first few by id. The last rank is
found four bits at a time: all blocks of a row count and weigh what falls into 16 bins, then one program per row takes
the last bin before which there is still less than the law may hold. Sums are float64 and in an order that hangs on the
vocabulary alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.args import Laws

BLOCK = 1024  # tokens that one program counts
NEVER = tl.constexpr(0x7FFFFFFF)  # a rank behind that of every score
_DIGITS = range(28, -1, -4)


@dataclass(frozen=True, slots=True)
class Ends:
    """The end of R laws. Rows that nothing cuts, and greedy ones, end behind every score."""

    rank: Tensor  # [R] int32, the last rank
    ties: Tensor  # [R] float64, how many tokens of that rank belong to the law


def ends_of(logits: Tensor, laws: Laws, largest: Tensor) -> Ends:
    """`logits` `[R, vocab]` with adjacent columns, `largest` float32 `[R]`: the largest of each row."""
    num_rows, vocab = logits.shape
    blocks = triton.cdiv(vocab, BLOCK)
    rank = torch.zeros(num_rows, dtype=torch.int32, device=logits.device)
    ties = torch.full((num_rows,), float("inf"), dtype=torch.float64, device=logits.device)
    before = torch.zeros((num_rows, 2), dtype=torch.float64, device=logits.device)  # tokens and weight before `rank`
    limit = torch.full_like(ties, float("inf"))
    bins = logits.new_empty((num_rows, blocks, 2, 16), dtype=torch.float64)
    count = partial(
        _bins_kernel[(num_rows, blocks)], logits, laws.temperature, laws.top_k, laws.top_p, largest, rank, bins,
        logits.stride(0), vocab, blocks, BLOCK=BLOCK,
    )  # fmt: skip
    take = partial(
        _digit_kernel[(num_rows,)], laws.temperature, laws.top_k, laws.top_p, rank, ties, before, limit, bins, vocab,
        blocks, BLOCKS=triton.next_power_of_2(blocks), num_warps=4,
    )  # fmt: skip
    for by_mass in (False, True):
        for shift in _DIGITS:
            first, last = shift == _DIGITS[0], shift == _DIGITS[-1]
            count(shift=shift, FIRST=first, BY_MASS=by_mass)
            take(shift=shift, FIRST=first, LAST=last, BY_MASS=by_mass)
    return Ends(rank, ties)


@triton.jit
def ranks(logits_ptr, token, vocab, largest, temperature):
    """Scores and ranks of some tokens of a row."""
    value = tl.load(logits_ptr + token, mask=token < vocab, other=float("-inf")).to(tl.float32)
    score = tl.div_rn(value - largest, tl.maximum(temperature, 1.1754943508222875e-38))
    rank = score.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    return score, tl.where(token < vocab, rank, NEVER)


@triton.jit
def _is_cut(temperature_ptr, top_k_ptr, top_p_ptr, row, vocab, BY_MASS: tl.constexpr):
    """Whether this half of the search is for a row: the second only where there is a top-p."""
    has_p = tl.load(top_p_ptr + row) < 1
    is_cut = has_p if BY_MASS else (has_p | (tl.load(top_k_ptr + row) < vocab))
    return is_cut & (tl.load(temperature_ptr + row) > 0)


@triton.jit
def _bins_kernel(
    logits_ptr, temperature_ptr, top_k_ptr, top_p_ptr, largest_ptr, rank_ptr, bins_ptr, stride, vocab, blocks, shift,
    BLOCK: tl.constexpr, FIRST: tl.constexpr, BY_MASS: tl.constexpr,
):  # fmt: skip
    """Tokens of a block, and their weight, by the next four bits of their rank, as far as the bits before agree."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if _is_cut(temperature_ptr, top_k_ptr, top_p_ptr, row, vocab, BY_MASS):
        token = block * BLOCK + tl.arange(0, BLOCK)
        largest, temperature = tl.load(largest_ptr + row), tl.load(temperature_ptr + row)
        score, rank = ranks(logits_ptr + row * stride, token, vocab, largest, temperature)
        start = vocab * 0 if FIRST else tl.load(rank_ptr + row)  # the second search begins anew
        bin_of = (rank >> shift) - (start >> shift)
        mine = (token < vocab) & (bin_of >= 0) & (bin_of < 16)
        digit = tl.arange(0, 16)
        count, mass = tl.zeros([16], tl.float64), tl.zeros([16], tl.float64)
        if tl.max(mine.to(tl.int32), 0) > 0:  # after a few digits hardly any block has one
            here = mine[:, None] & (bin_of[:, None] == digit[None, :])
            count = tl.sum(here.to(tl.float64), 0)
            mass = tl.sum(tl.where(here, tl.exp(score.to(tl.float64))[:, None], 0.0), 0)
        bins_ptr += (row * blocks + block) * 32
        tl.store(bins_ptr + digit, count)
        tl.store(bins_ptr + 16 + digit, mass)


@triton.jit
def _sums(bins_ptr, blocks, start, BLOCKS: tl.constexpr):
    """What all blocks have before each of 16 bins, `start` included; `[16]`."""
    block, digit = tl.arange(0, BLOCKS), tl.arange(0, 16)
    found = tl.load(bins_ptr + block[:, None] * 32 + digit[None, :], mask=(block < blocks)[:, None], other=0.0)
    total = tl.sum(found, 0)
    return start + tl.sum(tl.where(digit[:, None] < digit[None, :], total[:, None], 0.0), 0)


@triton.jit
def _digit_kernel(
    temperature_ptr, top_k_ptr, top_p_ptr, rank_ptr, ties_ptr, before_ptr, limit_ptr, bins_ptr, vocab, blocks, shift,
    BLOCKS: tl.constexpr, FIRST: tl.constexpr, LAST: tl.constexpr, BY_MASS: tl.constexpr,
):  # fmt: skip
    """Take the last bin before which there are fewer tokens than top-k and less weight than the limit."""
    row = tl.program_id(0).to(tl.int64)
    if _is_cut(temperature_ptr, top_k_ptr, top_p_ptr, row, vocab, BY_MASS):
        rank = vocab * 0 if FIRST else tl.load(rank_ptr + row)
        before_count = 0.0 if FIRST else tl.load(before_ptr + 2 * row)
        before_mass = 0.0 if FIRST else tl.load(before_ptr + 2 * row + 1)
        bins_ptr += row * blocks * 32
        count = _sums(bins_ptr, blocks, before_count, BLOCKS)
        mass = _sums(bins_ptr + 16, blocks, before_mass, BLOCKS)
        digit = tl.arange(0, 16)
        most = tl.load(top_k_ptr + row).to(tl.float64)
        limit = tl.load(limit_ptr + row)
        fits = (count < most) & (mass < limit) & (digit <= (NEVER - rank) >> shift)
        best = tl.max(tl.where(fits, digit, 0), 0)
        rank += best << shift
        count = tl.sum(tl.where(digit == best, count, 0.0), 0)
        mass = tl.sum(tl.where(digit == best, mass, 0.0), 0)
        tl.store(rank_ptr + row, rank)
        tl.store(before_ptr + 2 * row, count)
        tl.store(before_ptr + 2 * row + 1, mass)
        if LAST:
            weight = tl.exp(-(rank.to(tl.float32, bitcast=True)).to(tl.float64))
            weight = tl.where(rank < 0x7F800000, weight, 0.0)  # of a score that is a number
            ties = most - count
            if BY_MASS:
                ties = tl.minimum(ties, tl.where(weight > 0, tl.ceil((limit - mass) / weight), ties))
            else:
                left = mass + tl.where(weight > 0, ties * weight, 0.0)
                tl.store(limit_ptr + row, tl.load(top_p_ptr + row) * left)
            tl.store(ties_ptr + row, ties)
    elif LAST and not BY_MASS:
        tl.store(rank_ptr + row, NEVER)
