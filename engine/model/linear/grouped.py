"""Matrices on a CPU: integer codes in groups (published, or rounded at load), and floats in panels.

Codes are multiplied directly: no weight is rounded twice. Rows are integers, too (`round_rows`). The products of a
group are summed as integers, and the sums of groups are added as floats in the order of the inputs, each product
rounded before it is added. Floats in panels are also summed in the order of the inputs. So a row has the same bits in
any batch, and with codes also on every processor, in C and in torch.

A row has one step, so that a product needs one factor per row. The step is derived from the mean magnitude, and the few
elements that need more than 8 bits get 16: published models have outliers of 30 to 1,000 times the mean (Dettmers et
al. 2022, arXiv 2208.07339).
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from pilotfish.engine.machine.mapped import release_mapped
from pilotfish.engine.native import GroupedCodes, PackedMatrix, multiplies, rows_for
from pilotfish.engine.native.weights import StoredCodes

_CHUNK = 512  # rows of a matrix per block of the conversion to float
# As in native/rows.h.
_LARGEST_CODE = 32512.0  # of a row: 127 * 256
_MEANS = 2.5  # 127 steps are this times the mean magnitude
_TINY = 1e-30  # so that a row of zeros has a step, too


def round_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Floats `[M, n]` -> int16 `[M, n]`, at most 32,512, and float32 step `[M, 1]`: x is about int16 * step.

    Each operation is correctly rounded or in integers, so a row's position and batch do not change its bits. C and
    torch give the same bits. The step is NaN if an element of the row is not finite.
    """
    native = rows_for(x.dtype, x.shape[1])
    if native is not None and x.is_cpu and x.stride(1) == 1:
        return native.round(x)
    wide = x.float()
    peak = wide.abs().amax(-1, keepdim=True).clamp_min_(_TINY) + (wide - wide).sum(-1, keepdim=True)
    fine = _LARGEST_CODE / peak
    # Sums of integers do not depend on the order.
    total = (wide.abs() * fine).round_().nan_to_num_(0, 0, 0).long().sum(-1, keepdim=True)
    steps = total.float().mul_(_MEANS / 127 / x.shape[1]).clamp_(1, 256)
    rounded = (wide * (fine / steps)).round_().nan_to_num_(0, 0, 0)
    return rounded.to(torch.int16), peak.mul_(1 / _LARGEST_CODE).mul_(steps)


def matmul_shape(module: object) -> tuple[int, int] | None:
    """(in, out) of a plain matmul, in float, packed or of codes; None for anything else."""
    sizes = getattr(module, "in_features", None), getattr(module, "out_features", None)
    return None if sizes[0] is None or sizes[1] is None else (sizes[0], sizes[1])


class GroupedLinear(nn.Module):
    """`nn.Linear` over codes in groups, with rows as integers; input and output are float."""

    def __init__(self, codes: GroupedCodes, dtype: torch.dtype | None = None) -> None:
        """Use these codes; `dtype`: of the output; None: the type of the input.

        Raises:
            ValueError: the tensors are inconsistent.
        """
        codes.check()
        super().__init__()
        self.in_features, self.out_features = codes.in_features, len(codes.codes)
        self.dtype = dtype
        self.packed: PackedMatrix | PortableGrouped | None = None
        self._codes: GroupedCodes | None = codes
        bias = codes.bias
        self.bias: Tensor | None
        self.register_buffer("bias", None if bias is None else bias.detach().float(), persistent=False)

    @property
    def codes(self) -> GroupedCodes:
        """The codes, until they are packed."""
        assert self._codes is not None, "already packed"
        return self._codes

    def of_rows(self, which: Tensor) -> GroupedLinear:
        """A matmul of some of the outputs, in any order."""
        return GroupedLinear(self.codes.rows(which), self.dtype)

    @classmethod
    def joined(cls, parts: Seq[GroupedLinear]) -> GroupedLinear:
        """Join matrices with the same input, if they have one form (`joins`); nothing is rounded again."""
        # The codes are packed side by side, without a copy of all of them.
        codes = [part.codes.codes for part in parts]
        place = torch.empty(sum(map(len, codes)), codes[0].shape[1], dtype=codes[0].dtype, device="meta")
        made = cls(GroupedCodes.concatenated([part.codes for part in parts], place), parts[0].dtype)
        made._keep_packed(codes)
        return made

    @classmethod
    def joins(cls, parts: Seq[GroupedLinear]) -> bool:
        """Whether matrices can be joined: one form, and one order of the inputs."""
        several = [part.codes for part in parts]
        orders = [codes.order for codes in several if codes.order is not None]
        is_one_order = len(orders) in (0, len(parts)) and all(torch.equal(order, orders[0]) for order in orders)
        return len({codes.form for codes in several}) == 1 and is_one_order

    def pack(self) -> PackedMatrix | PortableGrouped:
        """Convert the codes to the packed form, and release the plain codes."""
        return self._keep_packed([self.codes.codes]) if self.packed is None else self.packed

    def _keep_packed(self, parts: Seq[Tensor | StoredCodes]) -> PackedMatrix | PortableGrouped:
        codes, self._codes = self.codes, None
        if multiplies(codes.codes.dtype) and rows_for(torch.float32, self.in_features) is not None:
            self.packed = PackedMatrix.of_groups(codes, parts)
        else:
            self.packed = PortableGrouped(replace(codes, codes=torch.cat([part[:] for part in parts])))
        for part in parts:
            release_mapped(part if isinstance(part, Tensor) else part.blocks)
        return self.packed

    def forward(self, x: Tensor) -> Tensor:
        """`[..., in]` -> `[..., out]`."""
        rounded = round_rows(x.reshape(-1, self.in_features))
        return self.of_rounded(*rounded, x.dtype).view(*x.shape[:-1], self.out_features)

    def of_rounded(self, rows: Tensor, step: Tensor, dtype: torch.dtype) -> Tensor:
        """Rows `[M, in]`, rounded as by `round_rows` -> `[M, out]` in `dtype`, unless this module has its own dtype."""
        return self.pack().multiply(rows, step, self.dtype or dtype)


class SideBySide(nn.Module):
    """Matrices of several forms with the same input, which is rounded once; their outputs are concatenated."""

    def __init__(self, parts: Seq[GroupedLinear]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)
        self.in_features, self.out_features = parts[0].in_features, sum(part.out_features for part in parts)

    @classmethod
    def of(cls, parts: Seq[GroupedLinear]) -> GroupedLinear | SideBySide:
        """Join adjacent matrices of one form, and concatenate the outputs of the rest; nothing is rounded again."""
        runs: list[list[GroupedLinear]] = []
        for part in parts:
            if runs and GroupedLinear.joins([runs[-1][0], part]):
                runs[-1].append(part)
            else:
                runs.append([part])
        joined = [GroupedLinear.joined(run) if len(run) > 1 else run[0] for run in runs]
        return joined[0] if len(joined) == 1 else cls(joined)

    def forward(self, x: Tensor) -> Tensor:
        """`[..., in]` -> `[..., out]`."""
        rounded = round_rows(x.reshape(-1, self.in_features))
        products = [cast("GroupedLinear", part).of_rounded(*rounded, x.dtype) for part in self.parts]
        return torch.cat(products, -1).view(*x.shape[:-1], self.out_features)


def kernel_name() -> str:
    """The implementation that multiplies codes on this machine."""
    return "native" if multiplies(torch.int8) else "portable"


class PortableGrouped:
    """`PackedMatrix` of grouped codes in plain torch, which is slow; float64 represents every group's sum exactly.

    A copy is the same object.
    """

    def __init__(self, codes: GroupedCodes) -> None:
        self._codes = codes
        self.out_features, self.in_features = len(codes.codes), codes.in_features

    def __deepcopy__(self, _memo: dict[int, Any]) -> PortableGrouped:
        return self

    def multiply(self, rows: Tensor, step: Tensor, dtype: torch.dtype) -> Tensor:
        codes, signed = self._codes, rows.double()
        signed = signed if codes.order is None else signed[:, codes.order]
        inputs = signed.unflatten(1, (-1, codes.group)).transpose(0, 1)  # [groups, M, group]
        parts = (codes.rows(slice(first, first + _CHUNK)) for first in range(0, self.out_features, _CHUNK))
        out = torch.cat([_products(inputs, part) for part in parts], -1).mul_(step)
        return (out if codes.bias is None else out.add_(codes.bias.float())).to(dtype)


def _products(inputs: Tensor, codes: GroupedCodes) -> Tensor:
    """`[groups, M, group]` in float64 -> `[M, out]`: the groups' sums are added in their order."""
    levels = codes.levels().double().unflatten(1, (len(inputs), -1)).transpose(0, 1)  # [groups, out, group]
    sums, plain = (inputs @ levels.transpose(1, 2)).float(), inputs.sum(-1, keepdim=True).float()
    step, offset = codes.worth()
    total = torch.zeros(sums.shape[1:])
    for group in range(len(sums)):
        total += sums[group] * step[:, group]
        if offset is not None:
            total += plain[group] * offset[:, group]
    return total


class PackedLinear(nn.Module):
    """`nn.Linear` over a packed matrix."""

    def __init__(self, packed: PackedMatrix, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.packed, self.dtype = packed, dtype  # dtype of the output; None for the type of the input
        self.in_features, self.out_features = packed.in_features, packed.out_features

    def forward(self, x: Tensor) -> Tensor:
        """`[..., in]` -> `[..., out]`."""
        dtype = self.dtype or x.dtype
        rows = x.reshape(-1, self.in_features).to(self.packed.dtype).contiguous()
        out = self.packed.multiply(rows, None, dtype)
        return out.view(*x.shape[:-1], self.out_features)


def packed_of(matmul: nn.Module) -> tuple[PackedMatrix, ...] | None:
    """The C matrices of `matmul`, if `matmul` returns their products without a type conversion; else None."""
    if isinstance(matmul, SideBySide):
        parts = [packed_of(part) for part in matmul.parts]
        return None if None in parts else tuple(matrix for part in parts if part is not None for matrix in part)
    if not isinstance(matmul, GroupedLinear | PackedLinear) or matmul.dtype is not None:
        return None
    found = matmul.pack() if isinstance(matmul, GroupedLinear) else matmul.packed
    return (found,) if isinstance(found, PackedMatrix) else None
