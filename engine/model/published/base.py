"""Matrices as published checkpoints hold them: codes, scales, zero points. Knows tensors; no file and no model.

A reader of a format turns the tensors of a checkpoint into `Codes`, which keep the tensors and compute nothing until
they are asked. So the same reader works on tensors of the meta device, of which only types and shapes are known.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import torch
from torch import Tensor, nn

from engine.errors import ModelError
from engine.machine.mapped import release_mapped
from engine.model.linear.grouped import GroupedCodes, GroupedLinear

_SMALLEST_GROUP = 16  # inputs; groups of our kernels are multiples of it
_MIDDLE = {4: 8, 8: 0}  # the code that means 0 where there are no zero points: of 4 bits unsigned, of 8 bits signed
_SCALES = (torch.float16, torch.bfloat16, torch.float32)


class Codes(Protocol):
    """One weight of a checkpoint that is not stored as floats."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the float weight."""
        ...

    def num_bytes(self) -> int | None:
        """Bytes of the form that our integer kernels multiply; None where there is none, so that it is dequantised."""
        ...

    def dequantised(self) -> Tensor:
        """The weight in float32, as the format defines it, to the last bit."""
        ...

    def linear(self, bias: Tensor | None, dtype: torch.dtype | None) -> nn.Module | None:
        """A matmul of these codes, none rounded again; `dtype` is that of its output. None where there is none."""
        ...


Weights: TypeAlias = "dict[str, Tensor | Codes]"  # by the names that a float checkpoint of the model has


@dataclass(frozen=True, slots=True)
class CodeParts:
    """The parts of integer codes: weight = (code - zero) * scale.

    Attributes:
        codes: 4 bits: uint8 `[out, in / 2]`, two codes of 0 to 15 in a byte, the first input low; 8 bits: int8
            `[out, in]`.
        scale: a float type, `[out, groups]`.
        zero: int32 `[out, groups]`, in steps of a code; None for 8 (4 bits) or 0 (8 bits).
        order: int64 `[in]`: column j of the codes multiplies input `order[j]`; None where they are in the same order.
    """

    codes: Tensor
    scale: Tensor
    zero: Tensor | None = None
    order: Tensor | None = None


@dataclass(frozen=True, slots=True)
class IntegerCodes:
    """A matrix of integers of 4 or 8 bits in groups of inputs, with a scale and perhaps a zero point for each group.

    Attributes:
        name: of the weight, for messages.
        shape: (out, in).
        bits: 4 or 8.
        groups: groups of an output.
        scale_type: how scales are stored.
        has_zero: whether there are zero points, as far as is known before they are read.
        read: reads the parts.
        sources: tensors of the checkpoint that are not needed once the parts have been read.
    """

    name: str
    shape: tuple[int, int]
    bits: int
    groups: int
    scale_type: torch.dtype
    has_zero: bool
    read: Callable[[], CodeParts]
    sources: tuple[Tensor, ...] = ()

    def num_bytes(self) -> int | None:
        """See `Codes`."""
        if not self._fits():
            return None
        out, width = self.shape
        of_scales = out * self.groups * (self.scale_type.itemsize + self.has_zero)
        return out * width * self.bits // 8 + of_scales

    def _fits(self) -> bool:
        group, rest = divmod(self.shape[1], self.groups)
        return not rest and not group % _SMALLEST_GROUP and self.scale_type in _SCALES

    def dequantised(self) -> Tensor:
        """See `Codes`: the difference of code and zero point is exact, so that only the product is rounded."""
        parts = self._parts()
        plain = (unpack4(parts.codes) if self.bits == 4 else parts.codes).float().unflatten(1, (self.groups, -1))
        zero = _MIDDLE[self.bits] if parts.zero is None else parts.zero.float()[..., None]
        flat = plain.sub_(zero).mul_(parts.scale.float()[..., None]).flatten(1)
        self._release()
        return flat if parts.order is None else torch.empty_like(flat).index_copy_(1, parts.order, flat)

    def linear(self, bias: Tensor | None, dtype: torch.dtype | None) -> nn.Module | None:
        """See `Codes`."""
        if not self._fits():
            return None
        parts = self._parts()
        made = GroupedLinear(self._grouped(parts, bias), dtype)
        self._release()
        return made

    def _grouped(self, parts: CodeParts, bias: Tensor | None) -> GroupedCodes:
        zeros = offset = None
        if parts.zero is not None:
            zeros = parts.zero.to(parts.codes.dtype)
            if not torch.equal(zeros.int(), parts.zero):  # 128, beside codes of -128 to 127
                zeros, offset = None, -parts.zero * parts.scale.float()
        return GroupedCodes(parts.codes, self.bits, parts.scale, offset, parts.order, bias, zeros=zeros)

    def _parts(self) -> CodeParts:
        parts = self.read()
        if not parts.scale.float().abs().amax().isfinite():
            raise ModelError(f"the scales of {self.name} have a number that is not finite")
        return parts

    def _release(self) -> None:
        for tensor in self.sources:
            release_mapped(tensor)


@dataclass(frozen=True, slots=True)
class FloatCodes:
    """A weight of small floats with scales, which no kernel here multiplies without rounding it again.

    Attributes:
        shape: of the float weight.
        read: computes it in float32.
        sources: tensors of the checkpoint that are not needed afterwards.
    """

    shape: tuple[int, ...]
    read: Callable[[], Tensor]
    sources: tuple[Tensor, ...] = ()

    def num_bytes(self) -> int | None:
        """See `Codes`."""
        return None

    def dequantised(self) -> Tensor:
        """See `Codes`."""
        made = self.read()
        for tensor in self.sources:
            release_mapped(tensor)
        return made

    def linear(self, bias: Tensor | None, dtype: torch.dtype | None) -> nn.Module | None:
        """See `Codes`."""
        return None


def with_codes(
    tensors: Mapping[str, Tensor],
    kinds: Collection[str],
    holds_codes: Callable[[str, Tensor], bool],
    make: Callable[[str], Codes],
) -> Weights:
    """The weights of a checkpoint that has several tensors for a matrix: `x.qweight`, `x.scales` and others.

    Args:
        tensors: by their names.
        kinds: the last parts of the names of tensors that belong to a matrix of codes.
        holds_codes: whether a tensor of such a last part holds the codes of a matrix.
        make: reads the matrix of a module by its path.

    Raises:
        ModelError: `make` raises it.
    """
    parts = {key: key.rpartition(".")[::2] for key in tensors}
    matrices = {path: make(path) for key, (path, kind) in parts.items() if holds_codes(kind, tensors[key])}
    weights: Weights = {f"{path}.weight": codes for path, codes in matrices.items()}
    floats = {key: x for key, x in tensors.items() if parts[key][0] not in matrices or parts[key][1] not in kinds}
    return weights | floats


def unpack4(packed: Tensor) -> Tensor:
    """uint8 `[..., n / 2]` -> uint8 `[..., n]`, numbers of 0 to 15; of each byte the low half comes first."""
    pairs: Tensor = torch.stack([packed & 15, packed >> 4], -1)
    return pairs.flatten(-2)


def pack4(codes: Tensor) -> Tensor:
    """The inverse of `unpack4`."""
    return codes[..., 0::2] | codes[..., 1::2] << 4


def signed8(codes: Tensor) -> Tensor:
    """uint8 numbers of 0 to 255 as int8, less 128."""
    return (codes ^ 128).view(torch.int8)


def in_groups(index: Tensor, groups: int, name: str) -> Tensor | None:
    """The order that sorts inputs by group; None where they are sorted. `index` `[in]` is the group of each input.

    Raises:
        ModelError: groups are of unequal sizes.
    """
    index = index.long()
    sizes = torch.bincount(index, minlength=groups) if not (index < 0).any() else index
    if len(sizes) != groups or len(index) % groups or (sizes != len(index) // groups).any():
        raise ModelError(f"{name} puts {len(index)} inputs into groups of unequal sizes; expected {groups} equal ones")
    order = index.argsort(stable=True)
    return None if torch.equal(order, torch.arange(len(order))) else order


def taken(tensors: Mapping[str, Tensor], name: str, beside: str) -> Tensor:
    """The tensor `name`; ModelError where it is missing beside the tensor `beside`."""
    found = tensors.get(name)
    if found is None:
        raise ModelError(f"the checkpoint lacks {name}, which belongs to {beside}")
    return found


def expect(name: str, tensor: Tensor, shape: tuple[int, ...], *kinds: torch.dtype) -> Tensor:
    """The tensor itself; ModelError where its shape or type is another. No types stand for any float type of scales."""
    if tuple(tensor.shape) != shape or tensor.dtype not in (kinds or _SCALES):
        kind = " or ".join(str(kind).removeprefix("torch.") for kind in kinds or _SCALES)
        found = str(tensor.dtype).removeprefix("torch.")
        raise ModelError(f"{name} is {found} {list(tensor.shape)}; expected {kind} {list(shape)}")
    return tensor
