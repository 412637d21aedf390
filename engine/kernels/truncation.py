"""Top-k, then top-p of the rest, of each row without sorting.

Scores (logits over temperature, the best at 0) have ranks: the bits of their distance below 0, so that likelier tokens
have smaller ranks. The kept tokens are those up to a last rank, and of that rank the first few by id. The last rank of
top-k is found in three steps of 9, 11 and 11 bits, and that of top-p in three more: all blocks of a row add to the
row's bins, and the next launch takes the last bin before which the sum is below the limit. Sums are integers, tokens or
weights in units of 2**-44, so they do not depend on the order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from pilotfish.engine.kernels.args import SamplerRows

BLOCK = 4096  # tokens per program
LARGEST_VOCAB = 2**19  # whose total weight, at most 1 each, fits into int64
NEVER = tl.constexpr(0x7FFFFFFF)  # a rank beyond all scores; a number above every count of tokens
_UNIT = tl.constexpr(float(2**44))  # of a weight of 1
_WEIGHTLESS = tl.constexpr(0x42000000)  # the rank of score -32: weights beyond it round to 0
_STEPS = 3  # of a search
_GROUP = tl.constexpr(32)  # bins
_GROUPS = tl.constexpr(64)
_WIDTH = tl.constexpr(64 + 64 * 32)  # sums of groups, then bins
_ROW = tl.constexpr(2 * 3 * (64 + 64 * 32))  # two searches
_PEELS = tl.constexpr(12)

# Arguments on which Triton does not specialise.
ONCE: dict[str, Any] = {
    "do_not_specialize": ["blocks", "step", "truncated"],
    "do_not_specialize_on_alignment": [
        f"{name}_ptr" for name in (
            "temperature", "top_k", "top_p", "min_p", "seed", "position", "stream", "peaks", "at", "bins", "rank",
            "before", "limit", "last", "allowed", "ties", "best", "best_at", "token", "sound",
        )
    ],
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Search:
    """The buffers shared by the launches of one draw. Empty if no row is truncated."""

    bins: Tensor  # [R, 2, 3, 2112] int64: top-k and top-p, their steps; initially zero
    rank: Tensor  # [R, 2, 3] int32, where the bins of a step begin
    before: Tensor  # [R, 2, 3] float64, tokens or weight before that
    limit: Tensor  # [R] float64, the maximum weight of top-p
    last: Tensor  # [R] int32, the last rank that is kept
    allowed: Tensor  # [R] int32, the number of kept tokens of that rank; NEVER: all
    ties: Tensor  # [R, blocks] int32, tokens of that rank in each block, if not all are kept

    @classmethod
    def empty(cls, num_rows: int, blocks: int, device: torch.device) -> Search:
        """An uninitialised search."""

        def made(dtype: torch.dtype, *shape: int) -> Tensor:
            return torch.empty((num_rows, *shape), dtype=dtype, device=device)

        whole, real = torch.int32, torch.float64
        return cls(
            made(torch.int64, 2, _STEPS, _WIDTH.value), made(whole, 2, _STEPS), made(real, 2, _STEPS), made(real),
            made(whole), made(whole), made(whole, blocks),
        )  # fmt: skip


def find_ends(logits: Tensor, samplers: SamplerRows, peaks: Tensor, search: Search, ties_block: int) -> None:
    """Set `last`, `allowed` and `ties` of `search`, whose bins are zero, for all drawn rows.

    `logits` `[R, vocab]` with adjacent columns, `samplers` contiguous, `peaks` float32 `[R, blocks]`, the maximum of
    each `ties_block` tokens.

    Raises:
        ValueError: the vocabulary is too large.
    """
    (num_rows, vocab), blocks = logits.shape, peaks.shape[1]
    if vocab >= LARGEST_VOCAB:
        raise ValueError(f"the vocabulary has {vocab} tokens; top-k and top-p support at most {LARGEST_VOCAB - 1}")
    size = triton.next_power_of_2(blocks)
    grid = num_rows, triton.cdiv(vocab, BLOCK)
    found = search.bins, search.rank, search.before
    for weighs in (False, True):
        for step in range(_STEPS):
            _search_kernel[grid](
                logits, samplers.temperature, samplers.top_k, samplers.top_p, peaks, *found, search.limit,
                logits.stride(0), vocab, blocks, step, WEIGHS=weighs, BLOCK=BLOCK, BLOCKS=size, num_warps=8,
            )  # fmt: skip
    _end_kernel[num_rows, blocks](
        logits, samplers.temperature, samplers.top_k, samplers.top_p, peaks, *found, search.limit,
        search.last, search.allowed, search.ties, logits.stride(0), vocab, blocks, BLOCK=ties_block, BLOCKS=size,
    )  # fmt: skip


@triton.jit
def ranks(value, token, vocab, largest, temperature):
    """Scores and ranks of logits of a row."""
    score = tl.div_rn(value - largest, tl.maximum(temperature, 1.1754943508222875e-38))
    rank = score.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    return score, tl.where(token < vocab, rank, NEVER)


@triton.jit
def largest_of(peaks_ptr, row, blocks, BLOCKS: tl.constexpr):
    """The largest logit of a row."""
    b = tl.arange(0, BLOCKS)
    return tl.max(tl.load(peaks_ptr + row * blocks + b, mask=b < blocks, other=float("-inf")), 0)


@triton.jit
def _ranked(logits_ptr, peaks_ptr, row, block, vocab, blocks, temperature, BLOCK: tl.constexpr, BLOCKS: tl.constexpr):
    """The tokens of a block, and their ranks."""
    token = block * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(logits_ptr + token, mask=token < vocab, other=float("-inf")).to(tl.float32)
    return token, ranks(value, token, vocab, largest_of(peaks_ptr, row, blocks, BLOCKS), temperature)[1]


@triton.jit
def clear(bins_ptr, row, block, blocks):
    """Clear this program's share of a row's bins."""
    i = tl.arange(0, 1024)
    for first in range(block * 1024, _ROW, blocks * 1024):
        tl.store(bins_ptr + row * _ROW + first + i, 0, mask=first + i < _ROW)


@triton.jit
def _weight(rank):
    """exp(score) in integer units; 0 if the score is not finite."""
    weight = tl.exp(-(rank.to(tl.float32, bitcast=True)).to(tl.float64))
    return (tl.where(rank < 0x7F800000, weight, 0.0) * _UNIT + 0.5).to(tl.int64)


@triton.jit
def _last(sums_ptr, before, limit, SIZE: tl.constexpr):
    """The index of the last sum before which the total is below `limit`, and that total."""
    i = tl.arange(0, SIZE)
    sums = tl.load(sums_ptr + i)
    up_to = before + (tl.cumsum(sums, 0) - sums).to(tl.float64)
    return tl.max(tl.where(up_to < limit, i, 0), 0), tl.max(tl.where(up_to < limit, up_to, before), 0)


@triton.jit
def _stand(bins_ptr, rank_ptr, before_ptr, step, limit):
    """State of a search before a step: the rank found so far, the mass before it, the mass of the last bin."""
    rank, before, within = step * 0, tl.full((), 0, tl.float64), tl.full((), 0, tl.int64)
    if step > 0:
        bins_ptr += (step - 1) * _WIDTH
        before = tl.load(before_ptr + step - 1)
        group, before = _last(bins_ptr, before, limit, _GROUPS)
        bins_ptr += _GROUPS + group * _GROUP
        digit, before = _last(bins_ptr, before, limit, _GROUP)
        within = tl.load(bins_ptr + digit)
        rank = tl.load(rank_ptr + step - 1) + ((group * _GROUP + digit) << (33 - 11 * step))
    return rank, before, within


@triton.jit
def _tally(bins_ptr, rank, start, step, mine, WEIGHS: tl.constexpr):
    """Add the tokens that are `mine` and within 2048 bins from `start` to these bins, or their weights.

    A block has few distinct leading digits and many tokens of each: they are summed here, digit by digit. Later digits
    have few tokens, or many distinct values: these are added one by one.
    """
    bin_of = (rank >> (22 - 11 * step)) - (start >> (22 - 11 * step))
    bin_of = tl.where(mine & (bin_of >= 0) & (bin_of < _GROUPS * _GROUP), bin_of, NEVER)
    lowest, peeled = tl.min(bin_of, 0), 0
    if lowest < NEVER:
        weight = _weight(rank) if WEIGHS else (rank * 0 + 1).to(tl.int64)
        while (lowest < NEVER) & (peeled < _PEELS):
            total = tl.sum(tl.where(bin_of == lowest, weight, 0), 0)
            tl.atomic_add(bins_ptr + lowest // _GROUP, total, sem="relaxed")
            tl.atomic_add(bins_ptr + _GROUPS + lowest, total, sem="relaxed")
            bin_of = tl.where(bin_of == lowest, NEVER, bin_of)
            lowest = tl.min(bin_of, 0)
            peeled += 1
        if lowest < NEVER:
            left = bin_of < NEVER
            tl.atomic_add(bins_ptr + bin_of // _GROUP, weight, mask=left, sem="relaxed")
            tl.atomic_add(bins_ptr + _GROUPS + bin_of, weight, mask=left, sem="relaxed")


@triton.jit
def _end_of_top_k(top_k, vocab, bins_ptr, rank_ptr, before_ptr):
    """The last rank, and the numbers of its kept and dropped tokens."""
    last, allowed, surplus = vocab * 0 + NEVER, top_k.to(tl.float64), tl.full((), 0, tl.int64)
    if top_k < vocab:
        last, before, within = _stand(bins_ptr, rank_ptr, before_ptr, vocab * 0 + 3, top_k.to(tl.float64))
        allowed = top_k.to(tl.float64) - before
        surplus = within - allowed.to(tl.int64)
    return last, allowed, surplus


@triton.jit(**ONCE)
def _search_kernel(
    logits_ptr, temperature_ptr, top_k_ptr, top_p_ptr, peaks_ptr, bins_ptr, rank_ptr, before_ptr, limit_ptr, stride,
    vocab, blocks, step, WEIGHS: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """One step of the search for the end of top-k, or, with weights, of top-p: the total of each next digit of ranks.

    Top-k counts tokens; top-p sums the weights of those that top-k keeps.
    """
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    temperature, top_k, top_p = tl.load(temperature_ptr + row), tl.load(top_k_ptr + row), tl.load(top_p_ptr + row)
    is_cut = top_p < 1 if WEIGHS else top_k < vocab
    if (temperature > 0) & is_cut:
        bins_ptr, rank_ptr, before_ptr = bins_ptr + row * _ROW, rank_ptr + row * 6, before_ptr + row * 6
        last, limit = vocab * 0 + NEVER, top_k.to(tl.float64)
        if WEIGHS:
            last, _, surplus = _end_of_top_k(top_k, vocab, bins_ptr, rank_ptr, before_ptr)
            bins_ptr, rank_ptr, before_ptr = bins_ptr + 3 * _WIDTH, rank_ptr + 3, before_ptr + 3
            limit = tl.full((), 0, tl.float64)
            if step == 1:  # the bins of the first step include all ranks up to the last of top-k
                total = tl.sum(tl.load(bins_ptr + tl.arange(0, _GROUPS)), 0) - surplus * _weight(last)
                limit = top_p * total.to(tl.float64)
                if block == 0:
                    tl.store(limit_ptr + row, limit)
            elif step == 2:
                limit = tl.load(limit_ptr + row)
        start, before, _ = _stand(bins_ptr, rank_ptr, before_ptr, step, limit)
        if block == 0:
            tl.store(rank_ptr + step, start)
            tl.store(before_ptr + step, before)
        logits_ptr += row * stride
        token, rank = _ranked(logits_ptr, peaks_ptr, row, block, vocab, blocks, temperature, BLOCK, BLOCKS)
        mine = (rank <= last) & (rank < _WEIGHTLESS) if WEIGHS else token < vocab
        _tally(bins_ptr + step * _WIDTH, rank, start, step, mine, WEIGHS)


@triton.jit(**ONCE)
def _end_kernel(
    logits_ptr, temperature_ptr, top_k_ptr, top_p_ptr, peaks_ptr, bins_ptr, rank_ptr, before_ptr, limit_ptr, last_ptr,
    allowed_ptr, ties_ptr, stride, vocab, blocks, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """The last kept rank; if it is partly kept, the number of its tokens in each block."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    temperature, top_p = tl.load(temperature_ptr + row), tl.load(top_p_ptr + row)
    if temperature > 0:
        bins_ptr, rank_ptr, before_ptr = bins_ptr + row * _ROW, rank_ptr + row * 6, before_ptr + row * 6
        last, allowed, surplus = _end_of_top_k(tl.load(top_k_ptr + row), vocab, bins_ptr, rank_ptr, before_ptr)
        if top_p < 1:
            limit = tl.load(limit_ptr + row)
            bins_ptr, rank_ptr, before_ptr = bins_ptr + 3 * _WIDTH, rank_ptr + 3, before_ptr + 3
            found, before, within = _stand(bins_ptr, rank_ptr, before_ptr, vocab * 0 + 3, limit)
            weight = tl.maximum(_weight(found), 1)
            by_weight = tl.ceil((limit - before) / weight.to(tl.float64))
            allowed = tl.where(found == last, tl.minimum(allowed, by_weight), by_weight)
            last, surplus = found, within // weight - allowed.to(tl.int64)
        is_split = surplus > 0
        if block == 0:
            tl.store(last_ptr + row, last)
            tl.store(allowed_ptr + row, tl.where(is_split, allowed.to(tl.int32), NEVER))
        if is_split:
            token, rank = _ranked(
                logits_ptr + row * stride, peaks_ptr, row, block, vocab, blocks, temperature, BLOCK, BLOCKS
            )
            same = (rank == last) & (token < vocab)
            tl.store(ties_ptr + row * blocks + block, tl.sum(same.to(tl.int32), 0))
