"""Arguments and results of kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

import torch
from torch import Tensor

GROUP = 128  # inputs of a 4-bit matrix that share a scale
WORDS = (
    GROUP // 4
)  # of 16 bits, of a group: word j holds the levels of inputs j, j + 32, j + 64 and j + 96, the first low
TILE_OUTPUTS = 64  # minimum outputs of such a matrix per program
LARGEST = 448.0  # of 8-bit floats with 4 bits of exponent and 3 of mantissa (e4m3)
TINIEST = 1e-12  # so that a row of zeros has a scale, too
LARGEST_CODE = 127  # of a key or a value in int8
TINIEST_PEAK = 1e-30  # so that a vector of zeros has a scale, too
RUNNING, STOPPED, FULL, UNSOUND = range(4)  # values of `Committed.ended`


@dataclass(frozen=True, slots=True)
class MatmulTile:
    """The tile of one program of a matmul."""

    rows: int  # of a mixture: places, which are rows of one expert
    outputs: int  # of the matrix; with a gate, two of them give one result
    warps: int
    stages: int


@dataclass(frozen=True, slots=True)
class Fp8Rows:
    """R rows in 8-bit floats with a scale each, for a matmul; near `rows * scale`."""

    rows: Tensor  # [R, in] float8_e4m3fn
    scale: Tensor  # [R, 1] float32
    shape: torch.Size  # of what was rounded: [..., in]
    dtype: torch.dtype  # of what was rounded


@dataclass(frozen=True, slots=True)
class FusedWeights:
    """The matrices of E experts in stacks, as transformers holds them; `[E, in, out]` where they are `transposed`."""

    up: Tensor  # [E, 2 inner, in], or [E, inner, in] of a gate without `up`
    down: Tensor  # [E, out, inner]
    up_bias: Tensor | None  # [E, 2 inner], or [E, inner]
    down_bias: Tensor | None  # [E, out]
    transposed: bool
    gate: Callable[[Tensor], Tensor]  # between the two, in plain torch: an `engine.native.experts.ExpertGate`
    numbers: tuple[float, float, float, float]  # and its fields: linear, cubic, limit, plus
    squared: bool
    ungated: bool
    interleaved: bool

    @property
    def inner(self) -> int:
        """Width between the two matrices."""
        return self.down.shape[1 if self.transposed else 2]

    @property
    def out_features(self) -> int:
        """Width of the result."""
        return self.down.shape[2 if self.transposed else 1]


@dataclass(frozen=True, slots=True)
class Tracks:
    """The sequences on the device, one per slot; a commit changes them in place."""

    tokens: Tensor  # [S, L] int64
    length: Tensor  # [S] int64, how many of them there are
    max_length: Tensor  # [S] int64, at most L
    ends: Tensor  # [S, E] int64, tokens that end the output; -1 where there are fewer
    running: Tensor  # [S] int64, 1 or 0


@dataclass(frozen=True, slots=True)
class Committed:
    """The result of one round for each of B sequences."""

    drawn: Tensor  # [B, K + 1] int64, of which the first `num_fresh` count
    num_fresh: Tensor  # [B] int64, 0 for one that is not running
    num_accepted: Tensor  # [B] int64, drafts among them
    ended: Tensor  # [B] int64, RUNNING, STOPPED at an end token, FULL, or UNSOUND: its logits were not finite


@dataclass(frozen=True, slots=True)
class Drawn:
    """The tokens drawn from R rows of logits."""

    token: Tensor  # [R] int64
    sound: Tensor  # [R] bool, whether the largest logit of the row is a finite number


@dataclass(frozen=True, slots=True)
class SamplerRows:
    """Sampling parameters of R rows, on the device. Greedy rows (temperature 0) use no other parameter."""

    top_k: Tensor  # [R] int64, the vocabulary size where off
    top_p: Tensor  # [R] float64, 1 where off
    min_p: Tensor  # [R] float64, 0 where off
    seed: Tensor  # [R] int64, the bits of a uint64
    position: Tensor  # [R] int64
    stream: Tensor  # [R] int64
    temperature: Tensor  # [R] float32

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Its fields in order, the wider numbers first."""
        return tuple(getattr(self, field.name) for field in fields(self))

    def rows(self, some: Tensor | slice) -> SamplerRows:
        return SamplerRows(*(tensor[some] for tensor in self.tensors))

    def dense(self) -> SamplerRows:
        """The same with contiguous tensors: a kernel gets only the address of the first element."""
        return SamplerRows(*(tensor.contiguous() for tensor in self.tensors))
