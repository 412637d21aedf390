"""From logits to tokens: argmax of a row's law plus Gumbel noise, with the bits of noise of `engine.noise`.

A logit of -inf masks its token. Greedy, whole and cut laws stand side by side in one batch, told apart on the device by
their parameters; nothing is sorted. The law of a cut row (top-k, then top-p of what is left, then min-p) is a prefix of
its tokens by descending score and ascending id, so it is found by its last score: eight passes that fix four bits each.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.args import Laws

_BLOCK = 2048  # tokens that one program looks at
_CUT_BLOCK = 1024
_NEVER = tl.constexpr(0x7FFFFFFF)  # a rank behind that of every score


def choose(logits: Tensor, laws: Laws, *, cuts: bool = True) -> Tensor:
    """One token per row of `logits` `[R, vocab]`: int64 `[R]`, the tokens of `engine.sampling.choose`.

    `cuts` says whether any row may have a top-k, top-p or min-p; where none has, a kernel is saved.
    """
    num_rows, vocab = logits.shape
    laws = laws.dense()
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    blocks = triton.cdiv(vocab, _BLOCK)
    chosen = laws.seed.new_empty(num_rows)
    if not num_rows:
        return chosen
    peaks, best = (logits.new_empty((num_rows, blocks), dtype=t) for t in (torch.float32, torch.float64))
    peak_at, best_at = (logits.new_empty((num_rows, blocks), dtype=torch.int32) for _ in range(2))
    last = logits.new_empty((num_rows, 2), dtype=torch.int32)
    reduce = {"BLOCKS": triton.next_power_of_2(blocks)}
    grid = (num_rows, blocks)
    _peaks_kernel[grid](logits, peaks, peak_at, logits.stride(0), vocab, blocks, BLOCK=_BLOCK)
    if cuts:
        _cut_kernel[(num_rows,)](
            logits, laws.temperature, laws.top_k, laws.top_p, peaks, last, logits.stride(0), vocab, blocks,
            BLOCK=_CUT_BLOCK, **reduce, num_warps=8,
        )  # fmt: skip
    _noise_kernel[grid](
        logits, laws.temperature, laws.min_p, laws.seed, laws.position, laws.stream, peaks, peak_at, last, best,
        best_at, logits.stride(0), vocab, blocks, PAIRS=_BLOCK // 2, CUTS=cuts, **reduce,
    )  # fmt: skip
    _pick_kernel[(num_rows,)](
        laws.temperature, peaks, peak_at, best, best_at, chosen, vocab, blocks, **reduce, num_warps=1
    )
    return chosen


@triton.jit
def _first_largest(value, at):
    """The largest value and the lowest id that has it; a value that is no number is passed over."""
    largest = tl.max(value, 0)
    return largest, tl.min(tl.where(value == largest, at, _NEVER), 0)


@triton.jit
def _peak_of(peaks_ptr, at_ptr, row, blocks, BLOCKS: tl.constexpr):
    """Of a row's blocks the first that has the largest value: that value and the id it is at."""
    b = tl.arange(0, BLOCKS)
    value = tl.load(peaks_ptr + row * blocks + b, mask=b < blocks, other=float("-inf"))
    return _first_largest(value, tl.load(at_ptr + row * blocks + b, mask=b < blocks, other=_NEVER))


@triton.jit
def _peaks_kernel(logits_ptr, peaks_ptr, at_ptr, stride, vocab, blocks, BLOCK: tl.constexpr):
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = block * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(logits_ptr + row * stride + token, mask=token < vocab, other=float("-inf")).to(tl.float32)
    largest, at = _first_largest(value, token)
    tl.store(peaks_ptr + row * blocks + block, largest)
    tl.store(at_ptr + row * blocks + block, at)


@triton.jit
def _ranks(logits_ptr, token, vocab, largest, temperature):
    """Scores (logits over temperature, the best at 0) and their ranks: bits of what a score is below 0, ascending."""
    value = tl.load(logits_ptr + token, mask=token < vocab, other=float("-inf")).to(tl.float32)
    score = tl.div_rn(value - largest, tl.maximum(temperature, 1.1754943508222875e-38))
    rank = score.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    return score, tl.where(token < vocab, rank, _NEVER)


@triton.jit
def _before(logits_ptr, vocab, largest, temperature, bounds, BLOCK: tl.constexpr):
    """How many tokens have a rank below each of `bounds`, and their weight: float64 each."""
    count = (bounds * 0).to(tl.float64)
    mass = count
    for first in range(0, vocab, BLOCK):
        token = first + tl.arange(0, BLOCK)
        score, rank = _ranks(logits_ptr, token, vocab, largest, temperature)
        below = rank[:, None] < bounds[None, :]
        count += tl.sum(below.to(tl.float64), 0)
        mass += tl.sum(tl.where(below, tl.exp(score.to(tl.float64))[:, None], 0.0), 0)
    return count, mass


@triton.jit
def _last_rank(logits_ptr, vocab, largest, temperature, most, mass_limit, BLOCK: tl.constexpr):
    """The largest rank before which there are fewer than `most` tokens and less weight than `mass_limit`."""
    rank = vocab * 0
    digit = tl.arange(0, 16)
    for step in range(8):
        bounds = rank + (digit << (28 - 4 * step))
        count, mass = _before(logits_ptr, vocab, largest, temperature, bounds, BLOCK)
        # The first digit has three bits: bounds beyond them have wrapped around and are negative.
        fits = (bounds >= rank) & (count < most) & (mass < mass_limit)
        rank = tl.max(tl.where(fits, bounds, rank), 0)
    return rank


@triton.jit
def _at(logits_ptr, vocab, largest, temperature, rank, BLOCK: tl.constexpr):
    """Tokens and weight before a rank, and the weight of one token of that rank."""
    bounds = tl.zeros([2], tl.int32) + rank
    count, mass = _before(logits_ptr, vocab, largest, temperature, bounds, BLOCK)
    weight = tl.exp(-(rank.to(tl.float32, bitcast=True)).to(tl.float64))
    return tl.max(count, 0), tl.max(mass, 0), tl.where(rank < 0x7F800000, weight, 0.0)


@triton.jit
def _nth(logits_ptr, vocab, largest, temperature, rank, n, BLOCK: tl.constexpr):
    """The id of the n-th token of a rank, from 1; the largest number there is where there are fewer."""
    seen = vocab * 0
    found = seen + _NEVER
    for first in range(0, vocab, BLOCK):
        token = first + tl.arange(0, BLOCK)
        _, mine = _ranks(logits_ptr, token, vocab, largest, temperature)
        same = ((mine == rank) & (token < vocab)).to(tl.int32)
        hit = (same > 0) & ((tl.cumsum(same, 0) + seen).to(tl.float64) == n)
        found = tl.minimum(found, tl.min(tl.where(hit, token, _NEVER), 0))
        seen += tl.sum(same, 0)
    return found


@triton.jit
def _cut_kernel(
    logits_ptr, temperature_ptr, top_k_ptr, top_p_ptr, peaks_ptr, last_ptr, stride, vocab, blocks,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Where the law of a row ends: the last rank, and the last id of that rank."""
    row = tl.program_id(0).to(tl.int64)
    temperature, top_k, top_p = tl.load(temperature_ptr + row), tl.load(top_k_ptr + row), tl.load(top_p_ptr + row)
    rank, last = vocab * 0 + _NEVER, vocab * 0 + _NEVER
    if (temperature > 0) & ((top_k < vocab) | (top_p < 1)):
        b = tl.arange(0, BLOCKS)
        largest = tl.max(tl.load(peaks_ptr + row * blocks + b, mask=b < blocks, other=float("-inf")), 0)
        logits_ptr += row * stride
        most = top_k.to(tl.float64)
        if top_k < vocab:
            rank = _last_rank(logits_ptr, vocab, largest, temperature, most, float("inf"), BLOCK)
        count, mass, weight = _at(logits_ptr, vocab, largest, temperature, rank, BLOCK)
        ties = most - count
        if top_p < 1:
            limit = top_p * (mass + tl.where(weight > 0, ties * weight, 0.0))
            rank = tl.minimum(rank, _last_rank(logits_ptr, vocab, largest, temperature, most, limit, BLOCK))
            count, mass, weight = _at(logits_ptr, vocab, largest, temperature, rank, BLOCK)
            ties = tl.minimum(most - count, tl.ceil((limit - mass) / weight))
        last = _nth(logits_ptr, vocab, largest, temperature, rank, ties, BLOCK)
    tl.store(last_ptr + 2 * row, rank)
    tl.store(last_ptr + 2 * row + 1, last)


@triton.jit
def _gumbel(high, low):
    """As `engine.noise._gumbel`, to the last bit but for how two libraries round a logarithm."""
    bits = (high.to(tl.int64) << 20) | (low >> 12).to(tl.int64)
    return -tl.log(-tl.log((bits.to(tl.float64) + 0.5) * 2.220446049250313e-16))


@triton.jit
def _noise_kernel(
    logits_ptr, temperature_ptr, min_p_ptr, seed_ptr, position_ptr, stream_ptr, peaks_ptr, peak_at_ptr, last_ptr,
    best_ptr, best_at_ptr, stride, vocab, blocks, PAIRS: tl.constexpr, CUTS: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """The best of a block of tokens of one row under noise; one Philox call feeds two neighbouring tokens."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    temperature = tl.load(temperature_ptr + row)
    if temperature > 0:
        largest, largest_at = _peak_of(peaks_ptr, peak_at_ptr, row, blocks, BLOCKS)
        pair = block * PAIRS + tl.arange(0, PAIRS)
        position, stream = tl.load(position_ptr + row).to(tl.int32), tl.load(stream_ptr + row).to(tl.int32)
        w0, w1, w2, w3 = tl.philox(tl.load(seed_ptr + row), pair, pair * 0 + position, pair * 0 + stream, pair * 0 + 1)
        best, best_at = float("-inf"), vocab - 1
        for odd in tl.static_range(2):
            token = 2 * pair + odd
            score, rank = _ranks(logits_ptr + row * stride, token, vocab, largest, temperature)
            kept = token < vocab
            if CUTS:
                last_rank, last = tl.load(last_ptr + 2 * row), tl.load(last_ptr + 2 * row + 1)
                kept = kept & ((rank < last_rank) | ((rank == last_rank) & (token <= last)))
                likely = tl.exp(score.to(tl.float64)) >= tl.load(min_p_ptr + row)
                kept = (kept & likely) | (token == largest_at)
            drawn = _gumbel(w2, w3) if odd else _gumbel(w0, w1)
            value, at = _first_largest(tl.where(kept, drawn + score.to(tl.float64), float("-inf")), token)
            better = (value > best) | ((value == best) & (at < best_at))
            best, best_at = tl.where(better, value, best), tl.where(better, at, best_at)
        tl.store(best_ptr + row * blocks + block, best)
        tl.store(best_at_ptr + row * blocks + block, best_at)


@triton.jit
def _pick_kernel(
    temperature_ptr, peaks_ptr, peak_at_ptr, best_ptr, best_at_ptr, chosen_ptr, vocab, blocks, BLOCKS: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    at = _peak_of(peaks_ptr, peak_at_ptr, row, blocks, BLOCKS)[1]
    if tl.load(temperature_ptr + row) > 0:
        at = _peak_of(best_ptr, best_at_ptr, row, blocks, BLOCKS)[1]
    # A row without any number has no largest one: `judge` reports it, and until then a token must be a token.
    tl.store(chosen_ptr + row, tl.minimum(at, vocab - 1).to(tl.int64))
