"""Decodes the data of tensors: floats, or blocks of codes, which convert to `GroupedCodes` without loss.

Layouts and dequantisation are those of ggml (github.com/ggml-org/ggml, `ggml-quants.c`), bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial

import torch
from torch import Tensor

from pilotfish.engine.errors import ModelError
from pilotfish.engine.model.gguf.container import BlockKind, StoredTensor
from pilotfish.engine.native.weights import GroupedCodes, StoredCodes, pack4, splits

_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_CHUNK = 2048  # rows that are converted at once
_IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)  # values of the codes of IQ4
_MXFP4 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)  # twice the 4-bit floats


def raw_of(tensor: StoredTensor) -> Tensor:
    """The data of a tensor, uint8 `[..., bytes of a row]`, mapped from the file; its pages are read when used."""
    end = tensor.start + tensor.num_bytes
    # A private mapping: writes to the tensor do not reach the file.
    upto = torch.from_file(str(tensor.path), shared=False, size=end, dtype=torch.uint8)
    return upto[tensor.start :].view(*tensor.shape[:-1], -1)


def float_type(kind: BlockKind) -> torch.dtype | None:
    """The type of float data; None for codes."""
    return _FLOATS.get(kind.name)


def dequantised(kind: BlockKind, raw: Tensor) -> Tensor:
    """Rows of blocks, uint8 `[..., bytes]` -> `[..., in]`: float32, or the stored float type."""
    if kind.is_float:
        return raw.view(_FLOATS[kind.name])
    flat = raw.reshape(-1, raw.shape[-1])
    found = torch.empty(len(flat), raw.shape[-1] // kind.size * kind.weights)
    for part, out in zip(flat.split(_CHUNK), found.split(_CHUNK), strict=True):
        out.copy_(_plain(kind, part))
    return found.view(*raw.shape[:-1], -1)


def _plain(kind: BlockKind, rows: Tensor) -> Tensor:
    """Rows of blocks, uint8 `[n, bytes]` -> float32 `[n, in]`."""
    if kind.name in _SPLITS:
        return _SPLITS[kind.name](rows.unflatten(-1, (-1, kind.size))).dequantised()
    try:
        from gguf import GGMLQuantizationType, quants
    except ImportError as error:
        raise ModelError(f"{kind.name} requires the package gguf: pip install 'pilotfish[gguf]'") from error
    return torch.from_numpy(quants.dequantize(rows.numpy(), GGMLQuantizationType[kind.name]))


def codes_of(kind: BlockKind, *raws: Tensor) -> GroupedCodes:
    """Rows of blocks, each uint8 `[out, bytes]` -> the matrix of all rows as codes; for types with `size_of_codes`."""
    blocks = (raws[0] if len(raws) == 1 else torch.cat(raws)).unflatten(-1, (-1, kind.size))
    if not splits(kind.name):
        return GroupedCodes.concatenated([_SPLITS[kind.name](chunk) for chunk in blocks.split(_CHUNK)])
    return StoredCodes(kind.name, blocks, _of_zeros(kind)).whole()


def size_of_codes(kind: BlockKind) -> int | None:
    """Bytes of a block's codes, scales and offsets in our kernels' form; None if there is none."""
    return _of_zeros(kind).nbytes if kind.name in _SPLITS else None


@lru_cache
def _of_zeros(kind: BlockKind) -> GroupedCodes:
    """The codes of one block of zero bytes: shows the contents and types of a block of this type."""
    return _SPLITS[kind.name](torch.zeros(1, 1, kind.size, dtype=torch.uint8))


def _halves(blocks: Tensor, *places: int) -> list[Tensor]:
    """The float16 at each of these bytes of blocks `[out, blocks, size]`, each `[out, blocks]`."""
    return [blocks[..., at : at + 2].contiguous().view(torch.float16)[..., 0] for at in places]


def _nibbles(bytes_: Tensor) -> Tensor:
    """`[..., n]` bytes -> `[..., 2 n]`: the low nibbles of all bytes, then the high ones."""
    return torch.cat([bytes_ & 15, bytes_ >> 4], -1)


def _bits(bytes_: Tensor) -> Tensor:
    """`[..., n]` bytes -> their bits, `[..., 8 n]`, the lowest of the first byte first."""
    return (bytes_[..., None] >> torch.arange(8, dtype=torch.uint8) & 1).flatten(-2)


def _q8_0(blocks: Tensor) -> GroupedCodes:
    (scale,) = _halves(blocks, 0)
    return GroupedCodes(blocks[..., 2:].contiguous().view(torch.int8).flatten(1), 8, scale, None)


def _by_group(blocks: Tensor, bits: int, num_floats: int) -> GroupedCodes:
    """A scale and, if there are two floats, an offset; the fifth bits of codes; their low nibbles."""
    scale, *others = _halves(blocks, *range(0, 2 * num_floats, 2))
    offset = others[0] if others else None
    if bits == 4:
        return GroupedCodes(pack4(_nibbles(blocks[..., 2 * num_floats :]).flatten(1)), 4, scale, offset)
    high, low = blocks[..., 2 * num_floats :].split((4, 16), -1)
    return GroupedCodes((_nibbles(low) | _bits(high) << 4).flatten(1), 5, scale, offset)


def _in_two_levels(blocks: Tensor, bits: int) -> GroupedCodes:
    """Q4_K and Q5_K: two float16 per block, times 6 bits each for the step and the offset of a group of 32.

    They are in bytes 4 to 15: 0-3 the steps of groups 0-3, 4-7 their offsets, 8-11 the low bits of groups 4-7, whose
    two high bits are in the first eight bytes.
    """
    scale, offset = _halves(blocks, 0, 2)
    first, second, low = blocks[..., 4:8], blocks[..., 8:12], blocks[..., 12:16]
    steps = torch.cat([first & 63, low & 15 | first >> 2 & 48], -1).to(torch.int8)
    zeros = torch.cat([second & 63, low >> 4 | second >> 2 & 48], -1)
    halves = blocks[..., -128:].unflatten(-1, (4, 32))
    if bits == 4:
        codes = pack4(_nibbles(halves).flatten(1))
    else:
        high = blocks[..., None, 16:48] >> torch.arange(8, dtype=torch.uint8)[:, None] & 1  # [out, blocks, 8, 32]
        codes = (_nibbles(halves).unflatten(-1, (2, 32)).flatten(-3, -2) | high << 4).flatten(1)
    return GroupedCodes(codes, bits, scale, offset.neg(), steps=steps.flatten(1), zeros=zeros.flatten(1))


def _q6_k(blocks: Tensor) -> GroupedCodes:
    (scale,) = _halves(blocks, 208)
    low = _nibbles(blocks[..., :128].unflatten(-1, (2, 64))).unflatten(-1, (4, 32))  # [out, blocks, 2, 4, 32]
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8)[:, None]
    high = blocks[..., 128:192].unflatten(-1, (2, 1, 32)) >> shifts & 3
    codes = low | high << 4
    steps = blocks[..., 192:208].contiguous().view(torch.int8)
    return GroupedCodes(codes.flatten(1), 6, scale, None, steps=steps.flatten(1))


def _q2_k(blocks: Tensor) -> GroupedCodes:
    """Two bits, and four bits each for the step and the offset of a group of 16: bytes 0 to 15."""
    scale, offset = _halves(blocks, 80, 82)
    steps, zeros = (blocks[..., :16] & 15).to(torch.int8), blocks[..., :16] >> 4
    codes = pack4(_crumbs(blocks[..., 16:80]).flatten(1))
    return GroupedCodes(codes, 4, scale, offset.neg(), steps=steps.flatten(1), zeros=zeros.flatten(1))


def _q3_k(blocks: Tensor) -> GroupedCodes:
    """Two bits and a mask of the third one; bytes 96 to 107 hold 6 bits for the step of each group of 16."""
    (scale,) = _halves(blocks, 108)
    high = (blocks[..., None, :32] >> torch.arange(8, dtype=torch.uint8)[:, None] & 1).flatten(-2)
    codes = (
        _crumbs(blocks[..., 32:96]) + 4 + (high << 2)
    )  # less 8 it is low bits - 4, or low bits where the mask is set
    steps = _nibbles(blocks[..., 96:104]) | _fours(blocks[..., 104:108]).mT.flatten(-2) << 4
    return GroupedCodes(pack4(codes.flatten(1)), 4, scale, None, steps=(steps.to(torch.int8) - 32).flatten(1))


def _iq4_nl(blocks: Tensor) -> GroupedCodes:
    (scale,) = _halves(blocks, 0)
    return GroupedCodes(_levels(blocks[..., 2:], _IQ4).flatten(1), 8, scale, None)


def _iq4_xs(blocks: Tensor) -> GroupedCodes:
    """Bytes 4 to 7 hold the low four bits of the steps, two groups of 32 in each; bytes 2 and 3 the two high bits."""
    (scale,) = _halves(blocks, 0)
    low = torch.stack([blocks[..., 4:8] & 15, blocks[..., 4:8] >> 4], -1).flatten(-2)
    steps = (low | _fours(blocks[..., 2:4]).flatten(-2) << 4).to(torch.int8) - 32
    codes = _levels(blocks[..., 8:].unflatten(-1, (8, 16)), _IQ4)
    return GroupedCodes(codes.flatten(1), 8, scale, None, steps=steps.flatten(1))


def _mxfp4(blocks: Tensor) -> GroupedCodes:
    """4-bit floats as 5-bit integers: twice the number, plus 16. A scale is half a power of two.

    Exponents 0 and 1 are subnormal, in bfloat16 and in float32.
    """
    exponent = blocks[..., 0].to(torch.int16)
    scale = torch.where(exponent < 2, 32 << exponent, exponent - 1 << 7).view(torch.bfloat16)
    codes = _levels(blocks[..., 1:], _MXFP4) + 16
    return GroupedCodes(codes.to(torch.uint8).flatten(1), 5, scale, None)


def _fours(bytes_: Tensor) -> Tensor:
    """`[..., n]` bytes -> `[..., n, 4]`: two bits each, the lowest first."""
    return bytes_[..., None] >> torch.arange(0, 8, 2, dtype=torch.uint8) & 3


def _crumbs(bytes_: Tensor) -> Tensor:
    """64 bytes of two-bit codes: the lowest bits of 32 bytes, then the next ones -> `[..., 256]`."""
    return _fours(bytes_.unflatten(-1, (2, 32))).mT.flatten(-3)


def _levels(bytes_: Tensor, levels: tuple[int, ...]) -> Tensor:
    """The int8 values of 4-bit codes."""
    return torch.tensor(levels, dtype=torch.int8)[_nibbles(bytes_).int()]


# By the names of types: blocks, uint8 `[out, blocks, size]` -> codes.
_SPLITS: dict[str, Callable[[Tensor], GroupedCodes]] = {
    "Q4_0": partial(_by_group, bits=4, num_floats=1),
    "Q4_1": partial(_by_group, bits=4, num_floats=2),
    "Q5_0": partial(_by_group, bits=5, num_floats=1),
    "Q5_1": partial(_by_group, bits=5, num_floats=2),
    "Q8_0": _q8_0,
    "Q4_K": partial(_in_two_levels, bits=4),
    "Q5_K": partial(_in_two_levels, bits=5),
    "Q6_K": _q6_k,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
    "MXFP4": _mxfp4,
}
