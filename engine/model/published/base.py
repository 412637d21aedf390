"""Matrices of published checkpoints: codes, scales, zero points.

A reader of a format converts the tensors of a checkpoint to `Codes`, which are evaluated lazily, so the same reader
works on meta tensors, which have only types and shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor, nn

from pilotfish.engine.errors import ModelError
from pilotfish.engine.native.weights import GroupedCodes, are_finite, pack4, unpack4

_SMALLEST_GROUP = 16  # inputs; groups of our kernels are multiples of it
_SCALES = (torch.float16, torch.bfloat16, torch.float32)


@dataclass(frozen=True, slots=True, eq=False)
class Codes:
    """One quantised weight of a checkpoint.

    Attributes:
        shape: of the float weight.
        dequantised: computes the float32 weight, bitwise as defined by the format.
        num_bytes: of the form for our integer kernels; None: there is none, so it is dequantised.
        grouped: returns that form, without rounding codes again.
        rows: of a table that is read by row: ids `[n]` -> float32 `[n, in]`.
        matrices: of a fused weight, each `[out, in]`, by experts.
    """

    shape: tuple[int, ...]
    dequantised: Callable[[], Tensor]
    num_bytes: int | None = None
    grouped: Callable[[], GroupedCodes] | None = None
    rows: Callable[[Tensor], Tensor] | None = None
    matrices: Seq[Codes] = ()


class CodedEmbedding(nn.Module):
    """`nn.Embedding` over a table of codes, whose rows are dequantised when they are looked up."""

    def __init__(self, codes: Codes, dtype: torch.dtype, scale: float | None) -> None:
        """Look up `codes.rows`, multiplied by `scale` (Gemma)."""
        super().__init__()
        self.codes = codes
        self.num_embeddings, self.embedding_dim = codes.shape
        self.weight = nn.Parameter(torch.empty(0, dtype=dtype), requires_grad=False)  # only holds a type
        self.scale: Tensor | None
        self.register_buffer("scale", None if scale is None else torch.tensor(scale), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        """Token ids `[...]` -> rows `[..., embedding_dim]`."""
        assert self.codes.rows is not None
        rows = self.codes.rows(ids.reshape(-1))
        found = rows.to(self.weight.dtype).view(*ids.shape, self.embedding_dim)
        return found if self.scale is None else found * self.scale.to(found.dtype)


Weights: TypeAlias = "dict[str, Tensor | Codes]"  # by the names of a float checkpoint


def integers(
    name: str, shape: tuple[int, int], bits: int, scale: Tensor, read: Callable[[], GroupedCodes], *, has_zero: bool
) -> Codes:
    """A matrix of integers of 4 or 8 bits in groups of inputs, with a scale and perhaps a zero point for each group.

    Args:
        name: of the weight, for messages.
        shape: (out, in).
        bits: 4 or 8.
        scale: of any order, one for each output and group.
        read: reads codes, scales, zero points and the order of inputs; the middle code is 0 without zero points.
        has_zero: whether zero points are expected, before reading.
    """
    out, width = shape
    group, rest = divmod(width * out, scale.numel())
    fits = not rest and not group % _SMALLEST_GROUP and scale.dtype in _SCALES
    size = out * width * bits // 8 + scale.numel() * (scale.dtype.itemsize + has_zero)

    def grouped() -> GroupedCodes:
        found = read()
        if not are_finite(found.scale):
            raise ModelError(f"the scales of {name} have NaN or infinite values")
        return found

    return Codes(shape, lambda: grouped().dequantised(), size if fits else None, grouped)


def of_groups(codes: GroupedCodes) -> Codes:
    """A matrix that already has that form."""
    shape = len(codes.codes), codes.in_features
    return Codes(shape, codes.dequantised, codes.nbytes, lambda: codes, lambda ids: codes.rows(ids).dequantised())


def fused(matrices: Seq[Codes], *, transposed: bool) -> Codes:
    """The matrices of experts, `[experts, out, in]`, or `[experts, in, out]` if `transposed`."""
    one, sizes = matrices[0].shape, [size for matrix in matrices if (size := matrix.num_bytes) is not None]
    shape = len(matrices), *(one[::-1] if transposed else one)

    def dequantised() -> Tensor:
        made = torch.empty(shape)
        for place, matrix in zip(made, matrices, strict=True):
            (place.t() if transposed else place).copy_(matrix.dequantised())
        return made

    return Codes(shape, dequantised, sum(sizes) if len(sizes) == len(matrices) else None, matrices=matrices)


def with_codes(
    tensors: Mapping[str, Tensor],
    kinds: Collection[str],
    holds_codes: Callable[[str, Tensor], bool],
    make: Callable[[str], Codes],
) -> Weights:
    """The weights of a checkpoint with several tensors per matrix: `x.qweight`, `x.scales` and others.

    Args:
        tensors: by their names.
        kinds: name suffixes of the tensors of a quantised matrix.
        holds_codes: whether a tensor with such a suffix contains the codes.
        make: reads the matrix of a module path.

    Raises:
        ModelError: `make` raises it.
    """
    parts = {key: key.rpartition(".")[::2] for key in tensors}
    matrices = {path: make(path) for key, (path, kind) in parts.items() if holds_codes(kind, tensors[key])}
    weights: Weights = {f"{path}.weight": codes for path, codes in matrices.items()}
    floats = {key: x for key, x in tensors.items() if parts[key][0] not in matrices or parts[key][1] not in kinds}
    return weights | floats


def unpacked(words: Tensor, bits: int) -> Tensor:
    """int32 `[n, words]` -> uint8 `[n, numbers]` of 4 or 8 bits, from the low bits of a word upwards."""
    flat = words.contiguous().view(torch.uint8)
    return unpack4(flat) if bits == 4 else flat


def in_words(
    words: Tensor, bits: int, scale: Tensor, zero: Tensor | None, index: Tensor | None, name: str
) -> GroupedCodes:
    """Codes of consecutive inputs in words, from the low bits upwards, each plus half of its range.

    Args:
        words: int32 `[out, in * bits / 32]`.
        bits: 4 or 8.
        scale: `[out, groups]`.
        zero: uint8 `[out, groups]`, zero points of 0 to 15 or 255; None for half of the range.
        index: `[in]`, the group of each input; None where they are in order.
        name: of `index`, for messages.
    """
    flat = words.contiguous().view(torch.uint8)
    order = None if index is None else in_groups(index, scale.shape[1], name)
    if order is not None:
        flat = flat[:, order] if bits == 8 else pack4(unpack4(flat)[:, order])
    if bits == 8:
        flat, zero = signed8(flat), None if zero is None else signed8(zero)
    return GroupedCodes(flat, bits, scale.contiguous(), None, order, zeros=None if zero is None else zero.contiguous())


def signed8(codes: Tensor) -> Tensor:
    """uint8 0 to 255 as int8, minus 128."""
    return (codes ^ 128).view(torch.int8)


def in_groups(index: Tensor, groups: int, name: str) -> Tensor | None:
    """The order that sorts inputs by group; None if they are sorted. `index` `[in]`: the group of each input.

    Raises:
        ModelError: groups are of unequal sizes.
    """
    index = index.long()
    sizes = torch.bincount(index, minlength=groups) if not (index < 0).any() else index
    if len(sizes) != groups or len(index) % groups or (sizes != len(index) // groups).any():
        raise ModelError(f"{name} has groups of unequal sizes; expected {groups} equal groups of {len(index)} inputs")
    order = index.argsort(stable=True)
    return None if torch.equal(order, torch.arange(len(order))) else order


def taken(tensors: Mapping[str, Tensor], name: str, beside: str) -> Tensor:
    """The tensor `name`. Raises ModelError if it is missing although `beside` is present."""
    found = tensors.get(name)
    if found is None:
        raise ModelError(f"the checkpoint has {beside} but no {name}")
    return found


def words_of(tensors: Mapping[str, Tensor], name: str) -> Tensor:
    """The codes `name`. Raises ModelError unless they are a matrix of words."""
    found = tensors[name]
    if found.ndim != 2 or found.dtype != torch.int32:
        raise ModelError(f"{name} is {found.dtype} {list(found.shape)}; expected int32 of two dimensions")
    return found


def expect(name: str, tensor: Tensor, shape: tuple[int, ...], *kinds: torch.dtype) -> Tensor:
    """Return the tensor. Raises ModelError for another shape or type; default type: any float type of scales."""
    if tuple(tensor.shape) != shape or tensor.dtype not in (kinds or _SCALES):
        kind = " or ".join(str(kind).removeprefix("torch.") for kind in kinds or _SCALES)
        found = str(tensor.dtype).removeprefix("torch.")
        raise ModelError(f"{name} is {found} {list(tensor.shape)}; expected {kind} {list(shape)}")
    return tensor
