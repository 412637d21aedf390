"""Matrices of int8 times rows of int8 (W8A8), in integers. Knows numbers; knows no model.

Each row of a weight (one output) is rounded once to int8 with its own scale; each row of activations is rounded in the
same way in every pass. Products are summed as integers, and a sum of integers does not depend on the order. So a row's
result has the same bits alone, in a batch, on any number of threads, in our C and in both kernels below.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence as Seq
from functools import cache
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from engine.machine.mapped import release_mapped
from engine.native import PackedMatrix, multiplies, round8, rounds, rows_for

log = logging.getLogger(__name__)

OFFSET = 128  # oneDNN reads rows as uint8: 128 means 0
_TINY = 1e-30  # so that a row of zeros has a scale too
_CHUNK = 4096  # rows of a matrix that are converted to float at once


class Kernel(Protocol):
    """One way to multiply; all give the same bits."""

    name: str

    def pack(self, weight: Tensor) -> Tensor:
        """Convert int8 `weight` `[out, in]` to the form that `multiply` reads."""
        ...

    def multiply(self, rows: Tensor, packed: Tensor, scale: Tensor) -> Tensor:
        """uint8 `rows` around 128, `[M, in]` -> float32 `[M, out]`: the integer sums times `scale` `[out]`."""
        ...


class PortableInt8:
    """Plain torch for any machine: slow, but exact, because float64 holds every sum."""

    name = "portable"

    def pack(self, weight: Tensor) -> Tensor:
        """Return the weight as it is."""
        return weight.contiguous()

    def multiply(self, rows: Tensor, packed: Tensor, scale: Tensor) -> Tensor:
        """See `Kernel`."""
        wide = rows.double() - OFFSET
        sums = [(wide @ part.double().t()).float() for part in packed.split(_CHUNK)]
        return torch.cat(sums, -1).mul_(scale)


class OneDNN:
    """oneDNN's integer matmul, through two private operators of torch, which may be missing or change."""

    name = "onednn"

    def __init__(self) -> None:
        self._pack = torch.ops.onednn.qlinear_prepack.default
        self._multiply = torch.ops.onednn.qlinear_pointwise.default
        self._zeros: dict[int, Tensor] = {}  # offsets of weights, which are all 0, by the number of outputs

    def pack(self, weight: Tensor) -> Tensor:
        """Convert the weight to oneDNN's blocked form, which is opaque."""
        return cast("Tensor", self._pack(weight.contiguous(), None))

    def multiply(self, rows: Tensor, packed: Tensor, scale: Tensor) -> Tensor:
        """See `Kernel`."""
        size = len(scale)
        zeros = self._zeros.get(size)
        if zeros is None:
            zeros = self._zeros[size] = torch.zeros(size, dtype=torch.int64)
        # No bias, output scale 1 and offset 0, and no operation after the matmul.
        plain: tuple[Any, ...] = (None, 1.0, 0, torch.float32, "none", [], "")
        return cast("Tensor", self._multiply(rows, 1.0, OFFSET, packed, scale, zeros, *plain))


@cache
def kernel() -> Kernel:
    """Choose the faster kernel that is correct on this machine with this torch. Used only where our C cannot run."""
    try:
        found = OneDNN()
        if _is_right(found):
            return found
        log.warning("int8: oneDNN's sums overflow on this CPU, and there is no C compiler; plain torch serves, slowly")
    except (AttributeError, RuntimeError, NotImplementedError, TypeError) as error:
        log.warning("int8: torch's oneDNN operators cannot be used here (%r); using plain torch, which is slow", error)
    return PortableInt8()


def kernel_name() -> str:
    """The name of the kernel that multiplies on this machine."""
    return "native" if multiplies(torch.int8) else kernel().name


@torch.inference_mode()
def _is_right(candidate: Kernel) -> bool:
    """Compare with plain torch, including extreme numbers: CPUs without VNNI add in 16 bits and may overflow."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randint(-127, 128, (80, 272), dtype=torch.int8, generator=generator)
    rows = torch.randint(1, 256, (5, 272), dtype=torch.uint8, generator=generator)
    weight[:2], rows[:2] = 127, 255
    weight[2], rows[2] = -127, 1
    scale, plain = torch.linspace(0.001, 0.1, 80), PortableInt8()
    want, packed = plain.multiply(rows, weight, scale), candidate.pack(weight)
    return all(torch.equal(candidate.multiply(rows[:m], packed, scale), want[:m]) for m in (1, 2, 5))


def round_weight(weight: Tensor) -> tuple[Tensor, Tensor]:
    """A matrix `[out, in]` of any float type -> int8 of the same shape, float32 scale `[out]`; a few rows at a time.

    C and torch give the same bits. The scale of a row is not finite if one of its numbers is not finite.
    """
    if rounds(weight):
        return round8(weight.detach())
    parts = [_round_part(part.detach().float().contiguous()) for part in weight.split(_CHUNK)]
    return torch.cat([rows for rows, _ in parts]), torch.cat([scale for _, scale in parts])


def _round_part(part: Tensor) -> tuple[Tensor, Tensor]:
    if rounds(part):
        return round8(part)
    rounded, scale = _round(part)
    return rounded.to(torch.int8), scale[:, 0]


def round_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Floats `[M, n]` -> uint8 `[M, n]` and scale `[M, 1]`: x is about (uint8 - 128) * scale; the largest is 255 or 1.

    Each operation is correctly rounded, so a row's place and neighbours cannot change its bits. C and torch give the
    same bits.
    """
    native = rows_for(x.dtype, x.shape[1])
    if native is not None and x.is_cpu and x.stride(1) == 1:
        return native.round(x)
    rounded, scale = _round(x.float())
    return rounded.add_(OFFSET).to(torch.uint8), scale


def _round(x: Tensor) -> tuple[Tensor, Tensor]:
    peak = x.abs().amax(-1, keepdim=True).clamp_min_(_TINY)
    return (x * (127 / peak)).round_(), peak.mul_(1 / 127)


class Packed(Protocol):
    """A matrix in the form that a kernel multiplies: `PackedMatrix`, or the form of another kernel."""

    def multiply(self, rows: Tensor, step: Tensor, dtype: torch.dtype) -> Tensor:
        """See `PackedMatrix.multiply`."""
        ...


class _Packed:
    """Does what `PackedMatrix` does in int8, with another kernel. A copy is the same object."""

    def __init__(self, weight: Tensor, scale: Tensor, bias: Tensor | None) -> None:
        self.out_features, self.in_features = weight.shape
        self._weight, self._scale, self._bias = kernel().pack(weight), scale, bias

    def __deepcopy__(self, _memo: dict[int, Any]) -> _Packed:
        return self

    def multiply(self, rows: Tensor, step: Tensor, dtype: torch.dtype) -> Tensor:
        """See `PackedMatrix.multiply`."""
        sums = kernel().multiply(rows, self._weight, self._scale)
        native = rows_for(dtype, self.out_features)
        if native is not None:
            return native.scale(sums, step, self._bias, dtype)
        sums.mul_(step)
        return (sums if self._bias is None else sums.add_(self._bias)).to(dtype)


class Int8Linear(nn.Module):
    """`nn.Linear` with an int8 weight and rows rounded to int8; input and output are float."""

    def __init__(self, weight: Tensor, scale: Tensor, bias: Tensor | None, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.dtype = dtype  # of the output; None for the type of the input
        self.packed: Packed | None = None
        # Buffers, so that modules which share weights can share them.
        self.weight_int8: Tensor | None
        self.scale: Tensor
        self.bias: Tensor | None
        self.register_buffer("weight_int8", weight, persistent=False)
        self.register_buffer("scale", scale, persistent=False)
        self.register_buffer("bias", None if bias is None else bias.detach().float(), persistent=False)

    @property
    def weight(self) -> Tensor:
        """An empty tensor of a type that rows may have: Mamba's models ask their head for it."""
        return torch.empty(0)

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor | None, dtype: torch.dtype | None = None) -> Int8Linear:
        """Round a float matrix `[out, in]`."""
        return cls(*round_weight(weight), bias, dtype)

    @classmethod
    def joined(cls, parts: Seq[Int8Linear]) -> Int8Linear:
        """Join matrices that read the same rows; nothing is rounded again, because every output has its own scale."""
        weights, biases = [part.weight_int8 for part in parts], [part.bias for part in parts]
        assert all(w is not None for w in weights), "already packed"
        has_bias, unpacked = all(bias is not None for bias in biases), cast("list[Tensor]", weights)
        shape = sum(map(len, unpacked)), unpacked[0].shape[1]
        made = cls(
            torch.empty(shape, dtype=unpacked[0].dtype, device="meta"),
            torch.cat([part.scale for part in parts]),
            torch.cat(cast("list[Tensor]", biases)) if has_bias else None,
            parts[0].dtype,
        )
        made._keep_packed(unpacked)
        return made

    @classmethod
    def joins(cls, parts: Seq[Int8Linear]) -> bool:
        """Whether `joined` can join `parts`, which are of this class and read the same rows."""
        return True

    def pack(self) -> Packed:
        """Convert the weight once to the form that is multiplied, and release the plain weight."""
        if self.packed is None:
            assert self.weight_int8 is not None
            return self._keep_packed([self.weight_int8])
        return self.packed

    def _keep_packed(self, parts: Seq[Tensor]) -> Packed:
        self.weight_int8, self.packed = None, self._packed_of(parts)
        for part in parts:
            release_mapped(part)
        return self.packed

    def _packed_of(self, parts: Seq[Tensor]) -> Packed:
        is_ours = multiplies(torch.int8) and rows_for(torch.float32, self.in_features) is not None
        if is_ours:
            return PackedMatrix.of(parts, self.scale, self.bias)
        return _Packed(torch.cat([*parts]), self.scale, self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """`[..., in]` -> `[..., out]`."""
        rows = x.view(-1, self.in_features)
        if not len(rows):  # in the middle of a prompt no logits are needed
            return x.new_empty(*x.shape[:-1], self.out_features)
        return self.of_rounded(*round_rows(rows), x.dtype).view(*x.shape[:-1], self.out_features)

    def of_rounded(self, rows: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
        """Rows `[M, in]`, rounded as by `round_rows` -> `[M, out]` in `dtype`, unless this module has its own dtype."""
        return self.pack().multiply(rows, scale, self.dtype or dtype)


def matmul_shape(module: object) -> tuple[int, int] | None:
    """(in, out) of a plain matmul, in float, packed or int8; None for anything else."""
    sizes = getattr(module, "in_features", None), getattr(module, "out_features", None)
    return cast("tuple[int, int]", sizes) if None not in sizes else None


def has_int8(model: nn.Module) -> bool:
    """Whether any matmul of `model` is in int8."""
    return any(isinstance(module, Int8Linear) for module in model.modules())
