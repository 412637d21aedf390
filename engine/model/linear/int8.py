"""Matrices of int8 times rows of int8 (W8A8), in integers. Knows numbers; knows no model.

Each row of a weight (one output) is rounded to int8 with a scale of its own, once; each row of activations likewise,
every time. Their products are summed as integers, and sums of integers have no order: a row's result is the same
bits alone, in a batch, on any number of threads, and in our C as in either of the two kernels below.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence as Seq
from functools import cache
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from engine.machine.mapped import let_go
from engine.native import PackedMatrix, multiplies, round8, rounds, rows_for

log = logging.getLogger(__name__)

OFFSET = 128  # oneDNN takes rows as uint8: 128 stands for 0
_TINY = 1e-30  # a row of zeros has a scale too
_CHUNK = 4096  # rows of a matrix that are widened at once


class Kernel(Protocol):
    """One way to multiply; all give the same bits."""

    name: str

    def pack(self, weight: Tensor) -> Tensor:
        """Bring int8 `weight` `[out, in]` into the form that `multiply` reads."""
        ...

    def multiply(self, rows: Tensor, packed: Tensor, scale: Tensor) -> Tensor:
        """uint8 `rows` around 128, `[M, in]` -> float32 `[M, out]`: the integer sums times `scale` `[out]`."""
        ...


class PortableInt8:
    """Plain torch on any machine, slowly: float64 holds every sum exactly."""

    name = "portable"

    def pack(self, weight: Tensor) -> Tensor:
        """As it is."""
        return weight.contiguous()

    def multiply(self, rows: Tensor, packed: Tensor, scale: Tensor) -> Tensor:
        """See `Kernel`."""
        wide = rows.double() - OFFSET
        sums = [(wide @ part.double().t()).float() for part in packed.split(_CHUNK)]
        return torch.cat(sums, -1).mul_(scale)


class OneDNN:
    """oneDNN's integer matmul, behind two private operators of torch: they may be missing, or change."""

    name = "onednn"

    def __init__(self) -> None:
        self._pack = torch.ops.onednn.qlinear_prepack.default
        self._multiply = torch.ops.onednn.qlinear_pointwise.default
        self._zeros: dict[int, Tensor] = {}  # offsets of weights: there are none

    def pack(self, weight: Tensor) -> Tensor:
        """Blocked for the machine's integer instructions; opaque."""
        return cast("Tensor", self._pack(weight.contiguous(), None))

    def multiply(self, rows: Tensor, packed: Tensor, scale: Tensor) -> Tensor:
        """See `Kernel`."""
        size = len(scale)
        zeros = self._zeros.get(size)
        if zeros is None:
            zeros = self._zeros[size] = torch.zeros(size, dtype=torch.int64)
        # No bias, output scale 1 and offset 0, nothing after it.
        plain: tuple[Any, ...] = (None, 1.0, 0, torch.float32, "none", [], "")
        return cast("Tensor", self._multiply(rows, 1.0, OFFSET, packed, scale, zeros, *plain))


@cache
def kernel() -> Kernel:
    """The faster one that computes right here with this torch; asked once, and where our C does not serve."""
    try:
        found = OneDNN()
        if _is_right(found):
            return found
        log.warning("int8: oneDNN's sums overflow on this CPU, and there is no C compiler; plain torch serves, slowly")
    except (AttributeError, RuntimeError, NotImplementedError, TypeError) as error:
        log.warning("int8: torch's oneDNN operators cannot be used here (%r); using plain torch, which is slow", error)
    return PortableInt8()


def kernel_name() -> str:
    """What multiplies here."""
    return "native" if multiplies(torch.int8) else kernel().name


@torch.inference_mode()
def _is_right(candidate: Kernel) -> bool:
    """Against plain torch, with the extremes among the numbers: CPUs without VNNI add in 16 bits and may overflow."""
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

    In C or in torch the bits are the same. The scale of a row is not finite where one of its numbers is not.
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
    """Floats `[M, n]` -> uint8 `[M, n]` and scale `[M, 1]`, x about (uint8 - 128) * scale; the largest is 255 or 1.

    Each operation is exact to the last bit by itself, so that a row's place and neighbours cannot matter; in C or in
    torch the bits are the same.
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
    """A matrix in the form that is multiplied: `PackedMatrix`, or another kernel's."""

    def multiply(self, rows: Tensor, step: Tensor, dtype: torch.dtype) -> Tensor:
        """See `PackedMatrix.multiply`."""
        ...


class _Packed:
    """`PackedMatrix` in int8 by another kernel. Copies share it."""

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
    """`nn.Linear` with an int8 weight and rows rounded to int8; what goes in and comes out is float."""

    def __init__(self, weight: Tensor, scale: Tensor, bias: Tensor | None, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.dtype = dtype  # of what comes out; that of what goes in, where it is None
        self.packed: Packed | None = None
        # Buffers, so that modules which share weights can share them.
        self.weight_int8: Tensor | None
        self.scale: Tensor
        self.bias: Tensor | None
        self.register_buffer("weight_int8", weight, persistent=False)
        self.register_buffer("scale", scale, persistent=False)
        self.register_buffer("bias", None if bias is None else bias.detach().float(), persistent=False)

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor | None, dtype: torch.dtype | None = None) -> Int8Linear:
        """Round a float matrix `[out, in]`."""
        return cls(*round_weight(weight), bias, dtype)

    @classmethod
    def joined(cls, parts: Seq[Int8Linear]) -> Int8Linear:
        """One matrix of several that read the same rows: every output has a scale of its own, so nothing is rounded."""
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

    def pack(self) -> Packed:
        """Bring the weight into the form that is multiplied, once, and let go of the plain one."""
        if self.packed is None:
            assert self.weight_int8 is not None
            return self._keep_packed([self.weight_int8])
        return self.packed

    def _keep_packed(self, parts: Seq[Tensor]) -> Packed:
        self.weight_int8, self.packed = None, self._packed_of(parts)
        for part in parts:
            let_go(part)
        return self.packed

    def _packed_of(self, parts: Seq[Tensor]) -> Packed:
        is_ours = multiplies(torch.int8) and rows_for(torch.float32, self.in_features) is not None
        if is_ours:
            return PackedMatrix.of(parts, self.scale, self.bias)
        return _Packed(torch.cat([*parts]), self.scale, self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """`[..., in]` -> `[..., out]`."""
        rows = x.view(-1, self.in_features)
        if not len(rows):  # no logits are wanted in the middle of a prompt
            return x.new_empty(*x.shape[:-1], self.out_features)
        return self.of_rounded(*round_rows(rows), x.dtype).view(*x.shape[:-1], self.out_features)

    def of_rounded(self, rows: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
        """`[M, in]`, rounded by `round_rows` or as it does -> `[M, out]`, in `dtype` unless this has one of its own."""
        return self.pack().multiply(rows, scale, self.dtype or dtype)


def matmul_shape(module: object) -> tuple[int, int] | None:
    """(in, out) of a plain matmul, in float, packed or int8; None for anything else."""
    sizes = getattr(module, "in_features", None), getattr(module, "out_features", None)
    return cast("tuple[int, int]", sizes) if None not in sizes else None


def has_int8(model: nn.Module) -> bool:
    """Whether any matmul of `model` is in int8."""
    return any(isinstance(module, Int8Linear) for module in model.modules())
