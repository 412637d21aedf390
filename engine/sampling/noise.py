"""Counter-based random numbers: a pure function of (seed, position, stream, token).

Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3", section 3.3) in int64
tensor arithmetic, so that CPU and CUDA compute the same bits. A word is an unsigned 32-bit number held in int64.
On a CPU our C computes the same words where there is a compiler (`native/noise.c`).
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from enum import IntEnum
from typing import NamedTuple

import torch
from torch import Tensor

from pilotfish.engine.native.compiled import function, library
from pilotfish.engine.types import Sequence

_WORD = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)  # golden ratio, sqrt(3) - 1
_ROUNDS = 10
_NUMBERS_AT_ONCE = 2**16  # on a CPU: larger blocks do not fit into the cache and are 3 to 7 times slower

Words = tuple[Tensor, Tensor, Tensor, Tensor]


class Stream(IntEnum):
    """The use of a random number. No two uses share a number: a draft's noise must not decide its own acceptance."""

    COUPLED = 0  # the same for target and draft, on purpose: `verify.coupled`
    DRAFT = 1  # the draft's own choice under the rejection rule
    ACCEPT = 2
    RESAMPLE = 3
    FILLER = 4  # placeholder ids of a drafting pass (`proposers.heads.uno`)


def philox(counter: Words, key: tuple[Tensor, Tensor]) -> Words:
    """Ten rounds over a 128-bit counter with a 64-bit key; tensors broadcast against each other."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        # A product of two words overflows into the sign bit of int64; its bits are right, and masks make words again.
        left, right = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1 = (right >> 32) & _WORD ^ c1 ^ k0, right & _WORD
        c2, c3 = (left >> 32) & _WORD ^ c3 ^ k1, left & _WORD
        k0, k1 = (k0 + _KEY_STEPS[0]) & _WORD, (k1 + _KEY_STEPS[1]) & _WORD
    return c0, c1, c2, c3


def uniform(seed: Tensor, position: Tensor, stream: Stream) -> Tensor:
    """One number in (0, 1) per row, float64 of the shape of `seed`; `seed` int64 (the bits of a uint64)."""
    zero = torch.zeros_like(position)
    words = philox((zero, position & _WORD, zero + int(stream), zero), _key(seed))
    return _open_unit(words[0], words[1])


def gumbel(seed: Tensor, position: Tensor, stream: Tensor, num_tokens: int) -> Tensor:
    """Standard Gumbel noise for tokens 0 .. num_tokens - 1 of each row: float64 `[rows, num_tokens]`.

    `seed`, `position`, `stream` are int64 `[rows]`. A token's noise does not depend on `num_tokens`.
    """
    num_pairs = (num_tokens + 1) // 2
    if _runs_in_c(seed):
        size = len(seed), 2 * num_pairs
        return _gumbel(_in_c("uniform", (seed, position, stream), (len(seed), num_pairs), size))[:, :num_tokens]
    pairs = torch.arange(num_pairs, device=seed.device)
    at_once = max(1, _NUMBERS_AT_ONCE // num_tokens) if seed.device.type == "cpu" else max(1, len(seed))
    rows = [slice(i, i + at_once) for i in range(0, len(seed), at_once)]
    noise = [seed.new_zeros((0, num_tokens), dtype=torch.float64)]
    for r in rows:  # two neighbouring tokens from each Philox call: [rows, 1] x [P] -> [rows, 2 P]
        w0, w1, w2, w3 = _token_words(seed[r, None], position[r, None], stream[r, None], pairs)
        both = torch.stack([_open_unit(w0, w1), _open_unit(w2, w3)], -1)
        noise.append(_gumbel(both.flatten(1))[:, :num_tokens])
    return torch.cat(noise)


def gumbel_at(seed: Tensor, position: Tensor, stream: Tensor, tokens: Tensor) -> Tensor:
    """The same noise for the given `tokens` `[rows, S]` only: float64 `[rows, S]`."""
    if _runs_in_c(seed):
        return _gumbel(_in_c("uniform_at", (seed, position, stream, tokens), tokens.shape, tokens.shape))
    words = _token_words(seed[:, None], position[:, None], stream[:, None], tokens // 2)
    odd = tokens % 2 == 1
    return _gumbel(_open_unit(torch.where(odd, words[2], words[0]), torch.where(odd, words[3], words[1])))


def _token_words(seed: Tensor, position: Tensor, stream: Tensor, pair: Tensor) -> Words:
    # The last counter word is 1 here and 0 in `uniform`, so both never use the same counter.
    return philox((pair, position & _WORD, stream, torch.ones_like(position)), _key(seed))


def _key(seed: Tensor) -> tuple[Tensor, Tensor]:
    return seed & _WORD, (seed >> 32) & _WORD


def _open_unit(high: Tensor, low: Tensor) -> Tensor:
    """52 random bits as the middle of one of 2**52 equal cells of (0, 1), exact in float64."""
    bits = (high << 20) | (low >> 12)
    return (bits.double() + 0.5) * 2.0**-52


def _gumbel(uniform: Tensor) -> Tensor:
    # -log(-log(u)). The winner of an argmax has u near 1, where 52 bits still give -log(u) enough precision.
    # It stays float64: in float32 two tokens would sometimes tie, and the order of tokens would decide.
    return torch.log_(torch.log(uniform).neg_()).neg_()


def _runs_in_c(seed: Tensor) -> bool:
    """Whether C can compute the noise for these seeds; it cannot for traced tensors, which have a shape but no data."""
    return type(seed) is Tensor and seed.is_cpu and library() is not None


def _in_c(name: str, given: tuple[Tensor, ...], sizes: Seq[int], shape: Seq[int]) -> Tensor:
    """Numbers in (0, 1) from a function of `native/noise.c`: int64 tensors -> float64 of `shape`."""
    dense, out = [tensor.contiguous() for tensor in given], torch.empty(shape, dtype=torch.float64)
    function(name)(*(tensor.data_ptr() for tensor in dense), *sizes, out.data_ptr())
    return out


class LogitsRow(NamedTuple):
    """The row from which the token after `sequence` and the drafts `before` is drawn, with noise from `stream`."""

    sequence: Sequence
    before: tuple[int, ...]
    stream: Stream

    @property
    def position(self) -> int:
        """The absolute position of that token, from 0."""
        return len(self.sequence.tokens) + len(self.before)
