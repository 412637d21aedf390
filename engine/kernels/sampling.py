"""Sampling with the bits of `engine.sampling.noise`, and the commit of a round's tokens.

A token is the argmax of scaled logits plus Gumbel noise; a logit of -inf masks its token. A batch may mix greedy rows
and rows with and without truncation, which differ only in their parameters. `kernels.truncation` finds the last kept
token of a row. Ten launches with it, three without. `commit` combines `engine.verify.coupled` and
`engine.engine.Engine._keep` in one small kernel, for rounds on the device.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pilotfish.engine.kernels.args import Committed, Drawn, SamplerRows, Tracks
from pilotfish.engine.kernels.truncation import NEVER, ONCE, Search, clear, find_ends, largest_of, ranks

_BLOCK = 2048  # tokens per program


def choose(logits: Tensor, samplers: SamplerRows, *, truncated: bool = True) -> Drawn:
    """One token per row of `logits` `[R, vocab]`, the tokens of `engine.sampling.distribution.choose`.

    `truncated`: whether any row may have a top-k, top-p or min-p; otherwise most kernels are skipped. Triton compiles
    again only for another vocabulary, another type of logits or another alignment of their rows.
    """
    num_rows, vocab = logits.shape
    samplers = samplers.dense()
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    blocks = triton.cdiv(vocab, _BLOCK)
    size = triton.next_power_of_2(blocks)
    peaks = logits.new_empty((num_rows, blocks), dtype=torch.float32)
    at = logits.new_empty((num_rows, blocks), dtype=torch.int32)
    best, best_at = torch.empty_like(peaks, dtype=torch.float64), torch.empty_like(at)
    drawn = Drawn(samplers.seed.new_empty(num_rows), samplers.seed.new_empty(num_rows, dtype=torch.bool))
    if not num_rows:
        return drawn
    search = Search.empty(num_rows if truncated else 0, blocks, logits.device)
    grid, sizes = (num_rows, blocks), (logits.stride(0), vocab, blocks, int(truncated))
    _peaks_kernel[grid](logits, peaks, at, search.bins, *sizes, BLOCK=_BLOCK)
    if truncated:
        find_ends(logits, samplers, peaks, search, _BLOCK)
    _noise_kernel[grid](
        logits, samplers.temperature, samplers.min_p, samplers.seed, samplers.position, samplers.stream, peaks,
        search.last, search.allowed, search.ties, best, best_at, *sizes, BLOCK=_BLOCK, BLOCKS=size,
    )  # fmt: skip
    _first_kernel[(num_rows,)](
        samplers.temperature, peaks, at, best, best_at, drawn.token, drawn.sound, vocab, blocks, BLOCKS=size,
        num_warps=1,
    )  # fmt: skip
    return drawn


@triton.jit
def _first_largest(value, at):
    """The largest value and the lowest id that has it; NaN is ignored."""
    largest = tl.max(value, 0)
    return largest, tl.min(tl.where(value == largest, at, NEVER), 0)


@triton.jit(**ONCE)
def _peaks_kernel(logits_ptr, peaks_ptr, at_ptr, bins_ptr, stride, vocab, blocks, truncated, BLOCK: tl.constexpr):
    """The largest logit of a block and the first token that has it; clears the bins of the search.

    NaN counts as infinite, as in `argmax`, so that the maximum of a row shows whether it is valid.
    """
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = block * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(logits_ptr + row * stride + token, mask=token < vocab, other=float("-inf")).to(tl.float32)
    largest, at = _first_largest(tl.where(value == value, value, float("inf")), token)
    tl.store(peaks_ptr + row * blocks + block, largest)
    tl.store(at_ptr + row * blocks + block, at)
    if truncated:
        clear(bins_ptr, row, block, blocks)


@triton.jit
def _gumbel(high, low):
    """As `engine.sampling.noise._gumbel`, bit for bit except for the libraries' rounding of logarithms."""
    bits = (high.to(tl.int64) << 20) | (low >> 12).to(tl.int64)
    return -tl.log(-tl.log((bits.to(tl.float64) + 0.5) * 2.220446049250313e-16))


@triton.jit
def _earlier(tie, other_tie, ties_ptr, block, BLOCKS: tl.constexpr):
    """The number of tokens of the last rank before each pair of this block."""
    b = tl.arange(0, BLOCKS)
    pair = (tie.to(tl.int32) + other_tie.to(tl.int32)).to(tl.int32)
    return tl.sum(tl.load(ties_ptr + b, mask=b < block, other=0), 0) + tl.cumsum(pair, 0) - pair


@triton.jit(**ONCE)
def _noise_kernel(
    logits_ptr, temperature_ptr, min_p_ptr, seed_ptr, position_ptr, stream_ptr, peaks_ptr, last_ptr, allowed_ptr,
    ties_ptr, best_ptr, best_at_ptr, stride, vocab, blocks, truncated, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """The best token of a block of one row with noise; one Philox call serves two adjacent tokens."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    temperature = tl.load(temperature_ptr + row)
    if temperature > 0:
        token = block * BLOCK + tl.arange(0, BLOCK)
        value = tl.load(logits_ptr + row * stride + token, mask=token < vocab, other=float("-inf")).to(tl.float32)
        even, odd = tl.split(tl.reshape(value, [BLOCK // 2, 2]))
        pair = block * (BLOCK // 2) + tl.arange(0, BLOCK // 2)
        largest = largest_of(peaks_ptr, row, blocks, BLOCKS)
        even, even_rank = ranks(even, 2 * pair, vocab, largest, temperature)
        odd, odd_rank = ranks(odd, 2 * pair + 1, vocab, largest, temperature)
        even_in, odd_in = 2 * pair < vocab, 2 * pair + 1 < vocab
        if truncated:
            last, allowed, min_p = tl.load(last_ptr + row), tl.load(allowed_ptr + row), tl.load(min_p_ptr + row)
            if allowed < NEVER:
                even_tie, odd_tie = even_in & (even_rank == last), odd_in & (odd_rank == last)
                earlier = _earlier(even_tie, odd_tie, ties_ptr + row * blocks, block, BLOCKS)
                even_in = even_in & ((even_rank < last) | (earlier < allowed))
                odd_in = odd_in & ((odd_rank < last) | (earlier + even_tie.to(tl.int32) < allowed))
            even_in, odd_in = even_in & (even_rank <= last), odd_in & (odd_rank <= last)
            if min_p > 0:
                even_in = even_in & (tl.exp(even.to(tl.float64)) >= min_p)
                odd_in = odd_in & (tl.exp(odd.to(tl.float64)) >= min_p)
        best, at = tl.full((), float("-inf"), tl.float64), block * 0 + NEVER
        if tl.max((even_in | odd_in).to(tl.int32), 0) > 0:
            position, stream = tl.load(position_ptr + row).to(tl.int32), tl.load(stream_ptr + row).to(tl.int32)
            seed, zero = tl.load(seed_ptr + row), pair * 0
            w0, w1, w2, w3 = tl.philox(seed, pair, zero + position, zero + stream, zero + 1)
            noisy = tl.where(even_in, _gumbel(w0, w1) + even.to(tl.float64), float("-inf"))
            other = tl.where(odd_in, _gumbel(w2, w3) + odd.to(tl.float64), float("-inf"))
            best, at = _first_largest(tl.where(other > noisy, other, noisy), 2 * pair + (other > noisy).to(tl.int32))
        tl.store(best_ptr + row * blocks + block, best)
        tl.store(best_at_ptr + row * blocks + block, at)


@triton.jit(**ONCE)
def _first_kernel(
    temperature_ptr, peaks_ptr, at_ptr, best_ptr, best_at_ptr, token_ptr, sound_ptr, vocab, blocks,
    BLOCKS: tl.constexpr,
):  # fmt: skip
    """The best token of all blocks of a row."""
    row = tl.program_id(0).to(tl.int64)
    b = tl.arange(0, BLOCKS)
    inside, i = b < blocks, row * blocks + b
    value = tl.load(peaks_ptr + i, mask=inside, other=float("-inf"))
    largest, token = _first_largest(value, tl.load(at_ptr + i, mask=inside, other=NEVER))
    if tl.load(temperature_ptr + row) > 0:
        noisy = tl.load(best_ptr + i, mask=inside, other=float("-inf"))
        token = _first_largest(noisy, tl.load(best_at_ptr + i, mask=inside, other=NEVER))[1]
    # A row of NaN has no maximum: `verify_rows` reports it, but until then the token must be a valid id.
    tl.store(token_ptr + row, tl.minimum(token, vocab - 1).to(tl.int64))
    tl.store(sound_ptr + row, tl.abs(largest) < float("inf"))


def commit(drawn: Tensor, drafts: Tensor, num_sound: Tensor, slots: Tensor, tracks: Tracks) -> Committed:
    """Keep drafts while they equal the drawn tokens, up to an end token or the maximum length; append, advance, end.

    `drawn` int64 `[B, K + 1]`, the target's tokens; `drafts` int64 `[B, K]`, -1: none; `num_sound` int64 `[B]`, leading
    rows of logits without NaN; `slots` int64 `[B]`, each at most once.
    """
    num, width = drawn.shape
    found = [torch.empty_like(slots) for _ in range(3)]
    if num:
        _commit_kernel[(num,)](
            drawn, drafts, num_sound, slots, tracks.tokens, tracks.length, tracks.max_length, tracks.ends,
            tracks.running, *found, drawn.stride(0), drafts.stride(0), tracks.tokens.stride(0), width,
            BLOCK=max(32, triton.next_power_of_2(width)), ENDS=tracks.ends.shape[1], num_warps=1,
        )  # fmt: skip
    return Committed(drawn, *found)


@triton.jit(  # compiled once for all K up to 31
    do_not_specialize=["drawn_stride", "drafts_stride", "tokens_stride", "width"],
    do_not_specialize_on_alignment=["drawn_ptr", "drafts_ptr", "num_sound_ptr", "slots_ptr"],
)
def _commit_kernel(
    drawn_ptr, drafts_ptr, num_sound_ptr, slots_ptr, tokens_ptr, length_ptr, max_length_ptr, ends_ptr, running_ptr,
    num_fresh_ptr, num_accepted_ptr, ended_ptr, drawn_stride, drafts_stride, tokens_stride,
    width, BLOCK: tl.constexpr, ENDS: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + b)
    i = tl.arange(0, BLOCK)
    drawn = tl.load(drawn_ptr + b * drawn_stride + i, mask=i < width, other=-2)
    draft = tl.load(drafts_ptr + b * drafts_stride + i, mask=i < width - 1, other=-1)
    num_kept = tl.min(tl.where(drawn == draft, BLOCK, i), 0)  # the entry beyond the drafts never matches
    length, running = tl.load(length_ptr + slot), tl.load(running_ptr + slot)
    ends = i < 0
    for e in tl.static_range(ENDS):
        ends = ends | (drawn == tl.load(ends_ptr + slot * ENDS + e))
    num_sound = tl.load(num_sound_ptr + b)
    to_end = tl.min(tl.where(ends, i + 1, BLOCK + 1), 0)
    room = tl.load(max_length_ptr + slot) - length
    num_fresh = tl.minimum(tl.minimum(num_kept + 1, to_end), tl.minimum(room, num_sound)) * running
    tl.store(tokens_ptr + slot * tokens_stride + length + i, drawn, mask=i < num_fresh)
    ended = tl.where(num_fresh == num_sound, 3, 0) * tl.where(num_sound < num_kept + 1, 1, 0)
    ended = tl.where(num_fresh == room, 2, ended)
    ended = tl.where(num_fresh == to_end, 1, ended) * running
    tl.store(length_ptr + slot, length + num_fresh)
    tl.store(running_ptr + slot, tl.where(ended > 0, 0, running))
    tl.store(num_fresh_ptr + b, num_fresh)
    tl.store(num_accepted_ptr + b, tl.minimum(num_kept, num_fresh))
    tl.store(ended_ptr + b, ended)
