"""From logits to tokens: argmax of a row's law plus Gumbel noise, with the bits of noise of `engine.noise`.

A logit of -inf masks its token. Greedy, whole and cut laws stand side by side in one batch, told apart on the device by
their parameters; where a law is cut, `cuts` finds its end.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.args import Laws
from engine.kernels.cuts import NEVER, Ends, ends_of, ranks

_BLOCK = 2048  # tokens that one program looks at


def choose(logits: Tensor, laws: Laws, *, cuts: bool = True) -> Tensor:
    """One token per row of `logits` `[R, vocab]`: int64 `[R]`, the tokens of `engine.sampling.choose`.

    `cuts` says whether any row may have a top-k, top-p or min-p; where none has, most kernels are saved.
    """
    num_rows, vocab = logits.shape
    laws = laws.dense()
    if not num_rows:
        return laws.seed.new_empty(0)
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    blocks = triton.cdiv(vocab, _BLOCK)
    value = logits.new_empty((num_rows, blocks), dtype=torch.float32)
    at = logits.new_empty((num_rows, blocks), dtype=torch.int32)
    _peaks_kernel[(num_rows, blocks)](logits, value, at, logits.stride(0), vocab, blocks, BLOCK=_BLOCK)
    largest, greedy = _first_of(value, at, vocab)
    ends = ends_of(logits, laws, largest) if cuts else Ends(at, laws.top_p)  # not looked at
    best = logits.new_empty((num_rows, blocks), dtype=torch.float64)
    ties = torch.empty_like(at)
    grid, sizes = (num_rows, blocks), (logits.stride(0), vocab, blocks)
    if cuts:
        _ties_kernel[grid](logits, laws.temperature, largest, ends.rank, ties, *sizes, BLOCK=_BLOCK)
    _noise_kernel[grid](
        logits, laws.temperature, laws.min_p, laws.seed, laws.position, laws.stream, largest, greedy, ends.rank,
        ends.ties, ties, best, at, *sizes, PAIRS=_BLOCK // 2, CUTS=cuts, BLOCKS=triton.next_power_of_2(blocks),
    )  # fmt: skip
    return torch.where(laws.temperature > 0, _first_of(best, at, vocab)[1], greedy)


def _first_of(value: Tensor, at: Tensor, vocab: int) -> tuple[Tensor, Tensor]:
    """Of `[R, blocks]` the largest value of each row, and the lowest id that has it."""
    num_rows, blocks = value.shape
    largest, found = value.new_empty(num_rows), value.new_empty(num_rows, dtype=torch.int64)
    size = triton.next_power_of_2(blocks)
    _first_kernel[(num_rows,)](value, at, largest, found, vocab, blocks, BLOCKS=size, num_warps=1)
    return largest, found


@triton.jit
def _first_largest(value, at):
    """The largest value and the lowest id that has it; a value that is no number is passed over."""
    largest = tl.max(value, 0)
    return largest, tl.min(tl.where(value == largest, at, NEVER), 0)


@triton.jit
def _peaks_kernel(logits_ptr, peaks_ptr, at_ptr, stride, vocab, blocks, BLOCK: tl.constexpr):
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = block * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(logits_ptr + row * stride + token, mask=token < vocab, other=float("-inf")).to(tl.float32)
    largest, at = _first_largest(value, token)
    tl.store(peaks_ptr + row * blocks + block, largest)
    tl.store(at_ptr + row * blocks + block, at)


@triton.jit
def _first_kernel(value_ptr, at_ptr, largest_ptr, found_ptr, vocab, blocks, BLOCKS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    b = tl.arange(0, BLOCKS)
    value = tl.load(value_ptr + row * blocks + b, mask=b < blocks, other=float("-inf"))
    largest, at = _first_largest(value, tl.load(at_ptr + row * blocks + b, mask=b < blocks, other=NEVER))
    tl.store(largest_ptr + row, largest)
    # A row without any number has no largest one: `judge` reports it, and until then a token must be a token.
    tl.store(found_ptr + row, tl.minimum(at, vocab - 1).to(tl.int64))


@triton.jit
def _ties_kernel(
    logits_ptr, temperature_ptr, largest_ptr, end_ptr, ties_ptr, stride, vocab, blocks, BLOCK: tl.constexpr
):
    """How many tokens of a block have the last rank of their row's law; of a greedy row nobody asks."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    temperature = tl.load(temperature_ptr + row)
    if temperature > 0:
        token = block * BLOCK + tl.arange(0, BLOCK)
        rank = ranks(logits_ptr + row * stride, token, vocab, tl.load(largest_ptr + row), temperature)[1]
        same = (rank == tl.load(end_ptr + row)) & (token < vocab)
        tl.store(ties_ptr + row * blocks + block, tl.sum(same.to(tl.int32), 0))


@triton.jit
def _gumbel(high, low):
    """As `engine.noise._gumbel`, to the last bit but for how two libraries round a logarithm."""
    bits = (high.to(tl.int64) << 20) | (low >> 12).to(tl.int64)
    return -tl.log(-tl.log((bits.to(tl.float64) + 0.5) * 2.220446049250313e-16))


@triton.jit
def _noise_kernel(
    logits_ptr, temperature_ptr, min_p_ptr, seed_ptr, position_ptr, stream_ptr, largest_ptr, greedy_ptr, end_ptr,
    allowed_ptr, ties_ptr, best_ptr, best_at_ptr, stride, vocab, blocks,
    PAIRS: tl.constexpr, CUTS: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """The best of a block of tokens of one row under noise; one Philox call feeds two neighbouring tokens."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    temperature = tl.load(temperature_ptr + row)
    if temperature > 0:
        largest, logits_ptr = tl.load(largest_ptr + row), logits_ptr + row * stride
        pair = block * PAIRS + tl.arange(0, PAIRS)
        position, stream = tl.load(position_ptr + row).to(tl.int32), tl.load(stream_ptr + row).to(tl.int32)
        w0, w1, w2, w3 = tl.philox(tl.load(seed_ptr + row), pair, pair * 0 + position, pair * 0 + stream, pair * 0 + 1)
        even, even_rank = ranks(logits_ptr, 2 * pair, vocab, largest, temperature)
        odd, odd_rank = ranks(logits_ptr, 2 * pair + 1, vocab, largest, temperature)
        even_in, odd_in = 2 * pair < vocab, 2 * pair + 1 < vocab
        if CUTS:
            end, allowed = tl.load(end_ptr + row), tl.load(allowed_ptr + row)
            b = tl.arange(0, BLOCKS)
            earlier = tl.sum(tl.load(ties_ptr + row * blocks + b, mask=b < block, other=0), 0)
            even_tie, odd_tie = (even_in & (even_rank == end)).to(tl.int32), (odd_in & (odd_rank == end)).to(tl.int32)
            before = earlier + tl.cumsum(even_tie + odd_tie, 0) - even_tie - odd_tie  # ties with a lower id
            even_in = even_in & ((even_rank < end) | ((even_rank == end) & (before < allowed)))
            odd_in = odd_in & ((odd_rank < end) | ((odd_rank == end) & (before + even_tie < allowed)))
            min_p, first = tl.load(min_p_ptr + row), tl.load(greedy_ptr + row)
            even_in = (even_in & (tl.exp(even.to(tl.float64)) >= min_p)) | (2 * pair == first)
            odd_in = (odd_in & (tl.exp(odd.to(tl.float64)) >= min_p)) | (2 * pair + 1 == first)
        noisy = tl.where(even_in, _gumbel(w0, w1) + even.to(tl.float64), float("-inf"))
        best, at = _first_largest(noisy, 2 * pair)
        noisy = tl.where(odd_in, _gumbel(w2, w3) + odd.to(tl.float64), float("-inf"))
        other, other_at = _first_largest(noisy, 2 * pair + 1)
        is_other = (other > best) | ((other == best) & (other_at < at))
        tl.store(best_ptr + row * blocks + block, tl.where(is_other, other, best))
        tl.store(best_at_ptr + row * blocks + block, tl.where(is_other, other_at, at))
