"""A mixture's own routing code, computed so that a row's bits do not depend on its batch. Knows no family by name.

Which experts a row gets, and with which weights, is the family's own code. Two of its operations round a row in another
way in another batch: the router's product, where torch chooses the order of sums by the number of rows, and functions
like the sigmoid, where torch treats the end of a tensor in another way. Both are replaced while that code runs.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from engine.model.linear.activations import ELEMENTWISE
from engine.model.linear.experts import RoutedExperts, StackedExperts
from engine.model.linear.swap import is_in_router
from engine.native import PackedMatrix, multiplies, rows_for


class RouterMatrix:
    """A router's weight, `[experts, in]`, of any float type."""

    def __init__(self, weight: nn.Parameter) -> None:
        self._weight, self._packed = weight, cast("PackedMatrix | None", None)

    def is_read_by(self, weight: object) -> bool:
        """Whether `weight` is this one, or this one in another type."""
        mine = self._weight
        if not isinstance(weight, Tensor) or weight.shape != mine.shape:
            return False
        return weight is mine or weight.dtype != mine.dtype

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """`F.linear(x, weight, bias)` in the type of `x`, summed in float32 in the order of the inputs."""
        rows = x.reshape(-1, x.shape[-1])
        if not multiplies(torch.float32) or not x.is_cpu or rows_for(torch.float32, x.shape[-1]) is None:
            out = torch.cat([F.linear(row.clone(), self._weight.to(row.dtype), bias) for row in rows.split(1)])
        else:
            if self._packed is None:
                bias = None if bias is None else bias.detach().float()
                self._packed = PackedMatrix.of(self._weight.detach().float(), bias)
            out = self._packed.multiply(rows.float().contiguous(), None, x.dtype)
        return out.view(*x.shape[:-1], -1)


class _RowWise(TorchFunctionMode):
    """Replaces the operations that this module's docstring names, within a `with` block."""

    def __init__(self, routers: tuple[RouterMatrix, ...]) -> None:
        super().__init__()
        self._routers = routers

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear:
            return self._linear(*args, **(kwargs or {}))
        if func in ELEMENTWISE and len(args) == 1 and not kwargs:
            return ELEMENTWISE[func](args[0])
        return func(*args, **(kwargs or {}))

    def _linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:  # noqa: A002 - torch's name
        router = next((router for router in self._routers if router.is_read_by(weight)), None)
        return F.linear(input, weight, bias) if router is None else router.multiply(input, bias)


class RowWiseRouting(nn.Module):
    """Runs the module around some experts, and around their router, with row-wise operations."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self._routers = tuple(RouterMatrix(weight) for weight in _router_weights(inner))

    def multiplies(self, weight: object) -> bool:
        """Whether a product of the original with this matrix is row-wise."""
        return any(router.is_read_by(weight) for router in self._routers)

    def __getattr__(self, name: str) -> Any:
        """Return attributes of the original that a model reads."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the original."""
        with _RowWise(self._routers):
            return self.inner(*args, **kwargs)


def _router_weights(block: nn.Module) -> list[nn.Parameter]:
    """Matrices that a block's parts multiply in code of their own; plain matmuls outside of routers are packed."""
    return [
        weight
        for name, module in block.named_modules()
        if type(module) is not nn.Linear or is_in_router(name)
        for weight in module.parameters(recurse=False)
        if weight.ndim == 2
    ]


def make_routing_row_wise(model: nn.Module) -> None:
    """Wrap every module that has routed experts as its child, once."""
    ours = RoutedExperts, StackedExperts
    for name in [name for name, module in model.named_modules() if isinstance(module, ours)]:
        block = name.rpartition(".")[0]
        around = block.rpartition(".")[0]
        if block and not isinstance(model.get_submodule(around), RowWiseRouting):
            model.set_submodule(block, RowWiseRouting(model.get_submodule(block)))
