"""Matrices of 4 bits times rows of int8 (W4A8): half the bytes of int8, for one or a few rows at a time.

Every 64 inputs of an output share a scale (a bfloat16: 4.25 bits a weight), and each weight is one of 16 levels. The
rows are rounded as in `int8.py`, and the products of a group are summed as integers; only the groups' sums are floats,
added in the order of the inputs. So this is batch-invariant as well.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any, cast

import torch
from torch import Tensor, nn

from engine.model.linear.int8 import OFFSET, Int8Linear, Packed
from engine.native import PackedMatrix, multiplies, round4, rounds

GROUP = 64  # inputs
# The levels with the least squared error for normal numbers, 64 of them scaled by their largest (Lloyd 1982). They are
# in 32nds, so that four products with a row's bytes fit in 16 bits (`dot_levels` in native/registers.h).
LEVELS = (-32, -24, -19, -15, -11, -8, -5, -2, 2, 5, 8, 11, 15, 19, 24, 32)
_CHUNK = 512  # rows of a matrix that are rounded at once


def fits(weight: Tensor) -> bool:
    """Whether a matrix `[out, in]` consists of whole groups."""
    return not weight.shape[1] % GROUP


def round_weight(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Floats `[out, in]` -> levels uint8 `[out, in / 2]`, two in a byte; scale bfloat16 `[out, in / 64]`.

    C and torch give the same bits. A scale is not finite if a number of its group is not finite.
    """
    if rounds(weight):
        return round4(weight.detach(), LEVELS)
    floats = (part.detach().float().contiguous() for part in weight.split(_CHUNK))
    parts = [round4(part, LEVELS) if rounds(part) else _round(part) for part in floats]
    return torch.cat([levels for levels, _ in parts]), torch.cat([scale for _, scale in parts])


def _round(weight: Tensor) -> tuple[Tensor, Tensor]:
    groups = weight.unflatten(1, (-1, GROUP))
    levels = torch.tensor(LEVELS, dtype=torch.float32)
    scale = groups.abs().amax(-1, keepdim=True).clamp_min(1e-30) / LEVELS[-1]
    index = torch.bucketize(groups / scale, (levels[1:] + levels[:-1]) / 2)
    chosen = levels[index]
    # The scale with the least squared error for the chosen levels.
    scale = (_sum(groups * chosen) / _sum(chosen * chosen)).bfloat16()
    pairs = index.flatten(1).to(torch.uint8).unflatten(1, (-1, 2))
    return pairs[..., 0] | pairs[..., 1] << 4, scale


def _sum(x: Tensor) -> Tensor:
    """Sum over the last dimension, of 64 numbers, by halves: torch's own order depends on the processor's vectors."""
    while x.shape[-1] > 1:
        first, second = x.chunk(2, -1)
        x = first + second
    return x[..., 0]


def levels_of(packed: Tensor) -> Tensor:
    """`[out, in / 2]` -> int8 `[out, in]`: each weight in steps of its group's scale."""
    index = torch.stack([packed & 15, packed >> 4], -1).flatten(1)
    return torch.tensor(LEVELS, dtype=torch.int8)[index.long()]


class PortableInt4:
    """`PackedMatrix` in 4 bits with plain torch, which is slow; float64 holds every group's sum exactly.

    A copy is the same object.
    """

    def __init__(self, packed: Tensor, scale: Tensor, bias: Tensor | None) -> None:
        self.out_features, self.in_features = len(packed), 2 * packed.shape[1]
        self._packed, self._scale, self._bias = packed, scale.float(), bias

    def __deepcopy__(self, _memo: dict[int, Any]) -> PortableInt4:
        return self

    def multiply(self, rows: Tensor, step: Tensor, dtype: torch.dtype) -> Tensor:
        """See `PackedMatrix.multiply`."""
        wide = (rows.double() - OFFSET).unflatten(1, (-1, GROUP)).transpose(0, 1)  # [groups, M, 64]
        outs = []
        for packed, scale in zip(self._packed.split(_CHUNK), self._scale.split(_CHUNK), strict=True):
            levels = levels_of(packed).double().unflatten(1, (-1, GROUP)).transpose(0, 1)  # [groups, out, 64]
            sums = (wide @ levels.transpose(1, 2)).float()
            total = torch.zeros(len(rows), len(packed))
            for group, each in zip(sums, scale.t(), strict=True):
                total += group * each
            outs.append(total)
        out = torch.cat(outs, -1).mul_(step)
        return (out if self._bias is None else out.add_(self._bias)).to(dtype)


class Int4Linear(Int8Linear):
    """`Int8Linear` with weights of 4 bits: `weight_int8` holds two in a byte, `scale` is bfloat16 `[out, in / 64]`."""

    def __init__(self, weight: Tensor, scale: Tensor, bias: Tensor | None, dtype: torch.dtype | None = None) -> None:
        super().__init__(weight, scale, bias, dtype)
        self.in_features = 2 * weight.shape[1]

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor | None, dtype: torch.dtype | None = None) -> Int4Linear:
        """Round a float matrix `[out, in]`."""
        return cls(*round_weight(weight), bias, dtype)

    @classmethod
    def joined(cls, parts: Seq[Int8Linear]) -> Int4Linear:
        """See `Int8Linear.joined`."""
        return cast("Int4Linear", super().joined(parts))

    def _packed_of(self, parts: Seq[Tensor]) -> Packed:
        if multiplies(torch.uint8):
            return PackedMatrix.of_levels(parts, self.scale, self.bias, LEVELS)
        return PortableInt4(torch.cat([*parts]), self.scale, self.bias)


def has_int4(model: nn.Module) -> bool:
    """Whether any matmul of `model` is in 4 bits."""
    return any(isinstance(module, Int4Linear) for module in model.modules())
