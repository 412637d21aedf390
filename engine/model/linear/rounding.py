"""Float matrices to codes in groups of 32 inputs: 8 bits with a scale, 4 to 6 bits with a scale and an offset.

Every operation is elementwise or a sum in a fixed order, so that the codes of a matrix are the same on every machine.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from pilotfish.engine.choices import Rounded
from pilotfish.engine.native.weights import GroupedCodes, pack4, rounded, rounds

GROUP = 32  # inputs that share a scale
_SMALL_GROUP = 16  # if the number of inputs is not a multiple of a group
_CHUNK = 2**20  # elements of a matrix per block of rounding
_TINY = 2.0**-24  # the minimum float16 scale
_TRIES = 9  # number of candidate scales per group
_KEYS_AND_VALUES = ("k_proj", "v_proj")


def group_of(inputs: int) -> int:
    """Group size for this number of inputs; the whole row if it cannot be divided."""
    return next((size for size in (GROUP, _SMALL_GROUP) if not inputs % size), inputs)


def rounded_bytes(weight: Tensor, bits: int) -> int:
    """Bytes of the codes, scales and offsets of a matrix `[out, in]`, which may be on the meta device."""
    outputs, inputs = weight.shape
    groups = inputs // group_of(inputs)
    # A float16 for each group; or 2 bytes for each group, and two float16 for each output.
    return outputs * (inputs * bits // 8 + (2 * groups if bits == 8 else 2 * groups + 4))


def bits_of(weights: Rounded, name: str, weight: Tensor, *, is_head: bool = False) -> int:
    """The bits of the codes of the matrix `[out, in]` of this name.

    Shared keys and values keep 8 bits in `int4`: they are few weights, whose errors affect every head and are a third
    of the loss of 4 bits on Gemma 3 270M.
    """
    is_shared = name.rpartition(".")[2] in _KEYS_AND_VALUES and weight.shape[0] < weight.shape[1]
    return 8 if weights == "int8" or is_head or is_shared else 4


def round_weight(weight: Tensor, bits: int, bias: Tensor | None = None) -> GroupedCodes:
    """A float matrix `[out, in]` -> its codes; `bits`: 4, 5, 6 or 8. Scales are not finite if an element is not.

    With 8 bits a group's largest element becomes 127 or -127. With fewer, scale and offset of a group are the
    candidates with the least squared error, and are themselves rounded, to 1/127 and 1/255 of the largest of their row.
    """
    weight, group = weight.detach(), group_of(weight.shape[1])
    if not rounds(weight, group):
        return _in_torch(weight, bits, bias)
    return rounded(weight, group, bits, bias)


def _in_torch(weight: Tensor, bits: int, bias: Tensor | None) -> GroupedCodes:
    group, chunks = group_of(weight.shape[1]), weight.split(max(1, _CHUNK // weight.shape[1]))
    parts = (chunk.float().unflatten(1, (-1, group)) for chunk in chunks)
    found = [_symmetric(groups) if bits == 8 else _asymmetric(groups, bits) for groups in parts]
    return replace(GroupedCodes.concatenated(found), bias=bias)


def _symmetric(groups: Tensor) -> GroupedCodes:
    scale = (groups.abs().amax(-1, keepdim=True) / 127).clamp_min(_TINY).half()
    codes = (groups / scale.float()).round_().clamp_(-127, 127)
    return GroupedCodes(codes.to(torch.int8).flatten(1), 8, scale[..., 0], None)


def _asymmetric(groups: Tensor, bits: int) -> GroupedCodes:
    most = (1 << bits) - 1
    step, low = _best(groups, most)
    # Two levels: a scale and an offset of the row, and for each group its fraction of them.
    scale = (step.amax(1, keepdim=True) / 127).clamp_min(_TINY).half()
    offset = (low.amin(1, keepdim=True) / 255).clamp_max(-_TINY).half()
    steps = (step / scale.float()).round_().clamp_(1, 127)
    zeros = (low / offset.float()).round_().clamp_(0, 255)
    codes = ((groups - offset.float() * zeros) / (scale.float() * steps)).round_().clamp_(0, most)
    codes = codes.to(torch.uint8).flatten(1)
    return GroupedCodes(
        pack4(codes) if bits == 4 else codes,
        bits,
        scale[..., 0],
        offset[..., 0],
        steps=steps[..., 0].to(torch.int8),
        zeros=zeros[..., 0].to(torch.uint8),
    )


def _best(groups: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """The step and the minimum, at most 0, of each group `[out, groups, 1]` for codes 0 to `most`.

    For each candidate, the step and the minimum with the least squared error for its codes, weighted towards large
    elements.
    """
    weight = groups.abs()
    weight = weight + _sum(weight).div_(groups.shape[-1])
    low, high = groups.amin(-1, keepdim=True).clamp_max(0), groups.amax(-1, keepdim=True)
    sums, of_groups = _sum(weight), _sum(weight * groups)
    best: tuple[Tensor, ...] | None = None
    for index in range(_TRIES):
        per_step = (most - 1 + 0.25 * index) / (high - low).clamp_min(_TINY)
        codes = ((groups - low) * per_step).round_().clamp_(0, most)
        weighted = weight * codes
        first, second, mixed = _sum(weighted), _sum(weighted * codes), _sum(weighted * groups)
        spread = sums * second - first * first
        divisor = torch.where(spread > 0, spread, 1)
        step, offset = (sums * mixed - of_groups * first) / divisor, (second * of_groups - first * mixed) / divisor
        from_zero = (spread <= 0) | (offset > 0)
        step = torch.where(from_zero, mixed / second.clamp_min(_TINY), step)
        offset = torch.where(from_zero, 0, offset)
        off = codes * step + offset - groups
        found = _sum(weight * off * off), step, offset
        if best is None:
            best = found
        else:
            better = found[0] < best[0]
            best = tuple(torch.where(better, new, old) for new, old in zip(found, best, strict=True))
    assert best is not None
    return best[1], best[2]


def _sum(x: Tensor) -> Tensor:
    """Sum over the last dimension by halves: torch's own order depends on the processor's vectors."""
    while x.shape[-1] > 1:
        half = x.shape[-1] // 2
        both = x[..., :half] + x[..., half : 2 * half]
        x = torch.cat([both, x[..., -1:]], -1) if x.shape[-1] % 2 else both
    return x
