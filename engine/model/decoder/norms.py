"""Norms of rows, in float32."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pilotfish.engine.kernels.args import Fp8Rows
from pilotfish.engine.model.decoder.ops import LayerOps
from pilotfish.engine.model.linear.activations import ELEMENTWISE
from pilotfish.engine.native import rows_for
from pilotfish.engine.native.rows import WeightAndEps

if TYPE_CHECKING:
    from pilotfish.engine.model.decoder.architecture import HeadNorm, NormForm
    from pilotfish.engine.model.decoder.weights import WeightReader


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight, in float32, with the mean's divisor included in weight and eps."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        super().__init__()
        size = weight.numel()
        self.scale = nn.Parameter(weight.detach().float() * size**0.5, requires_grad=False)
        self.eps = eps * size
        self.ops: LayerOps | None = None
        self.weight_of_kernels: Tensor | None
        self.register_buffer("weight_of_kernels", None, persistent=False)

    @property
    def parts(self) -> WeightAndEps:
        """In the form of our C."""
        return self.scale.data, self.eps

    @property
    def width(self) -> int:
        return self.scale.numel()

    def use(self, ops: LayerOps) -> None:
        """Run these operations, whose norms divide by the mean of squares."""
        self.ops, self.weight_of_kernels = ops, self.scale.detach() / self.width**0.5

    @property
    def for_kernels(self) -> tuple[Tensor, float]:
        """Weight and eps in the form of the kernels."""
        assert self.weight_of_kernels is not None
        return self.weight_of_kernels, self.eps / self.width

    def of_sum(
        self, x: Tensor, residual: Tensor | None, before: RMSNorm | None, *, rounds: bool
    ) -> tuple[Tensor | Fp8Rows, Tensor]:
        """The norm of x + residual, and the sum; `before`: a norm applied to x first; `rounds`: round for fp8."""
        assert self.ops is not None
        run = self.ops.add_norm_round if rounds else self.ops.add_norm
        return run(x, residual, *self.for_kernels, None if before is None else before.for_kernels)

    def forward(self, x: Tensor) -> Tensor:
        """`[..., size]`, in the type of `x`."""
        if self.ops is not None:
            return self.ops.add_norm(x, None, *self.for_kernels)[0]
        native = rows_for(x.dtype, x.shape[-1])
        if native is not None and x.is_cpu and x.stride(-1) == 1:
            return native.norm(x.reshape(-1, x.shape[-1]), self.scale, self.eps).view(x.shape)
        wide = x.float()
        return (wide * (wide * wide).sum(-1, keepdim=True).add_(self.eps).rsqrt_()).mul_(self.scale).to(x.dtype)


class LayerNorm(nn.Module):
    """(x - mean) / sqrt(variance + eps) * weight + bias, in float32; with a weight `[heads, size]` for each head."""

    def __init__(self, weight: Tensor, bias: Tensor | None, eps: float) -> None:
        super().__init__()
        self.bias: Tensor | None
        self.weight, self.eps = nn.Parameter(weight.detach().float(), requires_grad=False), eps
        self.register_buffer("bias", None if bias is None else bias.float(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """`[..., *weight.shape]`, in the type of `x`."""
        made = F.layer_norm(x.float(), x.shape[-1:], eps=self.eps) * self.weight
        return (made if self.bias is None else made + self.bias).to(x.dtype)


class HeadsRMSNorm(nn.Module):
    """RMSNorm of each head, with separate weights `[heads, size]`."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(weight.detach().float(), requires_grad=False), eps

    def forward(self, x: Tensor) -> Tensor:
        """`[..., heads, size]`, in the type of `x`."""
        wide = x.float()
        return (wide * (wide.square().mean(-1, keepdim=True) + self.eps).rsqrt() * self.weight).to(x.dtype)


class GatedNorm(nn.Module):
    """RMSNorm of parts of a row, and a gate before or after it, in float32."""

    weight: Tensor

    def __init__(
        self, weight: Tensor, eps: float, *, norm_first: bool, gate: Callable[[Tensor], Tensor] = F.silu
    ) -> None:
        """`weight`: `[size]` for all parts, or `[parts, size]`; `gate`: the activation of the gate."""
        super().__init__()
        self.norm, self.norm_first = RMSNorm(torch.ones(weight.shape[-1]), eps), norm_first
        self._gate = ELEMENTWISE[gate]
        self.register_buffer("weight", weight.float(), persistent=False)

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """float32 `[T, parts, size]`, and a gate of this shape -> `[T, parts, size]`."""
        opened = self._gate(gate.reshape(len(gate), -1).float()).view(x.shape)
        if self.norm_first:
            return cast("Tensor", self.norm(x) * self.weight * opened)
        return cast("Tensor", self.norm(x * opened) * self.weight)


def norm_of(form: NormForm, weights: WeightReader, name: str, size: int) -> nn.Module:
    """The norm of this name, of rows of `size` numbers."""
    weight = weights.vector(f"{name}.weight", size) if form.has_weight else torch.ones(size)
    return _made(form, weight, weights.vector(f"{name}.bias", size) if form.has_bias else None)


def norm_of_heads(
    norm: HeadNorm, weights: WeightReader, name: str, heads: int, head_dim: int, order: Tensor | None
) -> nn.Module:
    """The norm of this name of queries or keys; `order`: of a head's elements (`AttentionLayer.order`)."""
    size, form = norm.size(heads, head_dim), norm.form

    def read(kind: str) -> Tensor:
        if norm.listed:
            found = torch.stack([weights.vector(f"{name}.norms.{head}.{kind}", head_dim) for head in range(heads)])
        else:
            found = weights.vector(f"{name}.{kind}", *size)
        return found if order is None else found.unflatten(-1, (-1, head_dim))[..., order].view(size)

    return _made(form, read("weight") if form.has_weight else torch.ones(size), read("bias") if form.has_bias else None)


def _made(form: NormForm, weight: Tensor, bias: Tensor | None) -> nn.Module:
    if form.plus_one:
        weight = 1 + weight.float()
    if form.centred:
        return LayerNorm(weight, bias, form.eps)
    assert bias is None, "RMSNorm with a bias is not supported"
    return RMSNorm(weight, form.eps) if weight.ndim == 1 else HeadsRMSNorm(weight, form.eps)
