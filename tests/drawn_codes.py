"""Random codes in groups, in every form that checkpoints hold them in."""

from __future__ import annotations

import torch

from pilotfish.engine.native.weights import GroupedCodes

FORMS = ("scale", "offset", "zeros", "two levels", "two levels and offset")


def codes(
    outputs: int,
    inputs: int,
    form: str,
    bits: int = 4,
    group: int = 32,
    dtype: torch.dtype = torch.float16,
    seed: int = 0,
) -> GroupedCodes:
    """A matrix with the outermost codes and numbers among the others; one level of scales, or two."""
    draw = torch.Generator().manual_seed(seed)
    groups = inputs // group
    blocks = 1 if "two" in form else groups
    scale = (torch.rand(outputs, blocks, generator=draw) * 2 - 1).to(dtype)
    scale[0], scale[-1, 0] = 2.0**-14, 2.0**-24  # the least in whole steps and at all, of float16
    low, high, kind = (-128, 128, torch.int8) if bits == 8 else (0, 256 if bits == 4 else 1 << bits, torch.uint8)
    width = inputs // 2 if bits == 4 else inputs
    numbers = torch.randint(low, high, (outputs, width), generator=draw, dtype=kind)
    numbers[0], numbers[-1] = low, high - 1
    offset = torch.randn(outputs, blocks, generator=draw).to(dtype) if "offset" in form else None
    steps = torch.randint(-128, 128, (outputs, groups), generator=draw, dtype=torch.int8) if "two" in form else None
    has_zeros = form in ("zeros", "two levels and offset")
    least = -128 if bits == 8 else 0
    zeros = torch.randint(least, least + 256, (outputs, groups), generator=draw, dtype=kind) if has_zeros else None
    return GroupedCodes(numbers, bits, scale, offset, steps=steps, zeros=zeros)
