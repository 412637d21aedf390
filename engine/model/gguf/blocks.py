"""What the data of tensors means: floats, or blocks of codes that lose nothing as `GroupedCodes`.

Layouts and the arithmetic of dequantisation are those of ggml (github.com/ggml-org/ggml, `ggml-quants.c`): floats are
equal to its reference to the last bit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from engine.model.gguf.container import Container, StoredTensor
from engine.model.gguf.kinds import BlockKind
from engine.model.linear.grouped import GroupedCodes, GroupedLinear

_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_FIELDS = ("codes", "scale", "offset", "steps", "zeros")  # of `GroupedCodes`, each a row for each output
_CHUNK = 2048  # rows that are converted at once


def raw_of(container: Container, tensor: StoredTensor) -> Tensor:
    """The data of a tensor, uint8 `[..., bytes of a row]`, mapped from the file; its pages are read when used."""
    # A private mapping: nothing that writes to the tensor would reach the file.
    whole = torch.from_file(str(container.path), shared=False, size=container.size, dtype=torch.uint8)
    return whole[tensor.start : tensor.start + tensor.num_bytes].view(tensor.shape_of_bytes)


def float_type(kind: BlockKind) -> torch.dtype | None:
    """The type of numbers that are stored as floats; None for codes."""
    return _FLOATS.get(kind.name)


def dequantised(kind: BlockKind, raw: Tensor) -> Tensor:
    """Rows of blocks, uint8 `[..., bytes]` -> the numbers `[..., in]`: float32, or the type they are stored in."""
    if kind.is_float:
        return raw.view(_FLOATS[kind.name])
    flat, split = raw.reshape(-1, raw.shape[-1]), _SPLITS[kind.name]
    found = torch.empty(len(flat), raw.shape[-1] // kind.size * kind.weights)
    for part, out in zip(flat.split(_CHUNK), found.split(_CHUNK), strict=True):
        out.copy_(GroupedLinear(split(part.unflatten(-1, (-1, kind.size)))).dequantised())
    return found.view(*raw.shape[:-1], -1)


def codes_of(kind: BlockKind, raw: Tensor) -> GroupedCodes:
    """Rows of blocks, uint8 `[out, bytes]` -> the same matrix as codes; not for floats."""
    parts = [_SPLITS[kind.name](part.unflatten(-1, (-1, kind.size))) for part in raw.split(_CHUNK)]
    fields = {name: [getattr(part, name) for part in parts] for name in _FIELDS}
    joined: dict[str, Any] = {name: torch.cat(found) for name, found in fields.items() if found[0] is not None}
    return replace(parts[0], **joined)


def size_of_codes(kind: BlockKind) -> int:
    """Bytes of the codes, scales and offsets of a block, as `codes_of` returns them."""
    found = _SPLITS[kind.name](torch.zeros(1, 1, kind.size, dtype=torch.uint8))
    return sum(part.nbytes for name in _FIELDS if (part := getattr(found, name)) is not None)


def _halves(blocks: Tensor, *places: int) -> list[Tensor]:
    """The float16 at each of these bytes of blocks `[out, blocks, size]`, each `[out, blocks]`."""
    return [blocks[..., at : at + 2].contiguous().view(torch.float16)[..., 0] for at in places]


def _nibbles(bytes_: Tensor) -> Tensor:
    """`[..., n]` bytes -> `[..., 2 n]`: the low halves of all bytes, then the high ones."""
    return torch.cat([bytes_ & 15, bytes_ >> 4], -1)


def _bits(bytes_: Tensor) -> Tensor:
    """`[..., n]` bytes -> their bits, `[..., 8 n]`, the lowest of the first byte first."""
    return (bytes_[..., None] >> torch.arange(8, dtype=torch.uint8) & 1).flatten(-2)


def _pairs(codes: Tensor) -> Tensor:
    """Codes 0 to 15, `[out, ..., n]` -> `[out, in / 2]`, two of neighbouring inputs in a byte, the first one low."""
    flat = codes.flatten(1)
    return flat[:, 0::2] | flat[:, 1::2] << 4


def _q8_0(blocks: Tensor) -> GroupedCodes:
    (scale,) = _halves(blocks, 0)
    return GroupedCodes(blocks[..., 2:].contiguous().view(torch.int8).flatten(1), 8, scale, None)


def _q4_0(blocks: Tensor) -> GroupedCodes:
    (scale,) = _halves(blocks, 0)
    return GroupedCodes(_pairs(_nibbles(blocks[..., 2:])), 4, scale, None)


def _q4_1(blocks: Tensor) -> GroupedCodes:
    scale, offset = _halves(blocks, 0, 2)
    return GroupedCodes(_pairs(_nibbles(blocks[..., 4:])), 4, scale, offset)


def _q5_0(blocks: Tensor) -> GroupedCodes:
    (scale,) = _halves(blocks, 0)
    codes = _nibbles(blocks[..., 6:]) | _bits(blocks[..., 2:6]) << 4
    return GroupedCodes((codes.to(torch.int8) - 16).flatten(1), 8, scale, None)


def _q5_1(blocks: Tensor) -> GroupedCodes:
    scale, offset = _halves(blocks, 0, 2)
    codes = _nibbles(blocks[..., 8:]) | _bits(blocks[..., 4:8]) << 4
    return GroupedCodes(codes.to(torch.int8).flatten(1), 8, scale, offset)


def _q4_k(blocks: Tensor) -> GroupedCodes:
    codes = _nibbles(blocks[..., 16:].unflatten(-1, (4, 32)))  # [out, blocks, 4, 64]
    return _in_two_levels(blocks, _pairs(codes), 4)


def _q5_k(blocks: Tensor) -> GroupedCodes:
    low = _nibbles(blocks[..., 48:].unflatten(-1, (4, 32))).unflatten(-1, (2, 32)).flatten(-3, -2)
    high = blocks[..., None, 16:48] >> torch.arange(8, dtype=torch.uint8)[:, None] & 1  # [out, blocks, 8, 32]
    return _in_two_levels(blocks, (low | high << 4).to(torch.int8).flatten(1), 8)


def _in_two_levels(blocks: Tensor, codes: Tensor, bits: int) -> GroupedCodes:
    """Codes of Q4_K and Q5_K: two float16 of a block, times 6 bits each for the step and the offset of a group of 32.

    Bytes 4 to 15 hold them: 0-3 the steps of groups 0-3, 4-7 their offsets, 8-11 the low bits of groups 4-7, whose two
    high bits are those of the first eight bytes.
    """
    scale, offset = _halves(blocks, 0, 2)
    first, second, low = blocks[..., 4:8], blocks[..., 8:12], blocks[..., 12:16]
    steps = torch.cat([first & 63, low & 15 | first >> 2 & 48], -1).to(torch.int8)
    zeros = torch.cat([second & 63, low >> 4 | second >> 2 & 48], -1)
    return GroupedCodes(codes, bits, scale, offset.neg(), steps=steps.flatten(1), zeros=zeros.flatten(1))


def _q6_k(blocks: Tensor) -> GroupedCodes:
    (scale,) = _halves(blocks, 208)
    low = _nibbles(blocks[..., :128].unflatten(-1, (2, 64))).unflatten(-1, (4, 32))  # [out, blocks, 2, 4, 32]
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8)[:, None]
    high = blocks[..., 128:192].unflatten(-1, (2, 1, 32)) >> shifts & 3
    codes = (low | high << 4).to(torch.int8) - 32
    steps = blocks[..., 192:208].contiguous().view(torch.int8)
    return GroupedCodes(codes.flatten(1), 8, scale, None, steps=steps.flatten(1))


# By the names of types: blocks, uint8 `[out, blocks, size]` -> codes.
_SPLITS: dict[str, Callable[[Tensor], GroupedCodes]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
