"""Activations whose result does not depend on a number's place.

torch computes whole vectors with one function, and the remainder at the end of a buffer, or of a thread's part of it,
with another function that may round differently. Here there is no remainder, and only one thread.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_VECTOR = 64  # twice the numbers in the longest vector of the shortest type
_SERIAL = 16384  # GELU uses several threads for more numbers than this; other activations for twice as many


class RowWise(nn.Module):
    """Runs an elementwise `inner` on whole rows, as many at once as torch computes in one thread."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        # GELU has one function for contiguous numbers and another for other layouts. SiLU, the most common, has one.
        self._as_it_lies = type(inner) is nn.SiLU
        self._most = (2 if self._as_it_lies else 1) * _SERIAL - 1

    def forward(self, x: Tensor) -> Tensor:
        """`[..., n]` -> `[..., n]`."""
        if not x.is_cpu:
            return self._whole(x)
        n = x.shape[-1]
        if n % _VECTOR:
            padded: Tensor = self(F.pad(x, (0, -n % _VECTOR)))
            return padded[..., :n]
        if x.numel() <= self._most:
            return self._whole(x)
        if n > self._most:
            return torch.cat([self(part) for part in x.split(self._most // _VECTOR * _VECTOR, -1)], -1)
        rows = x.reshape(-1, n).split(self._most // n)
        return torch.cat([self._whole(part) for part in rows]).view(x.shape)

    def _whole(self, x: Tensor) -> Tensor:
        done: Tensor = self.inner(x if self._as_it_lies else x.contiguous())
        return done


ELEMENTWISE: dict[Callable[..., Any], nn.Module] = {
    torch.sigmoid: RowWise(nn.Sigmoid()),
    Tensor.sigmoid: RowWise(nn.Sigmoid()),
    torch.tanh: RowWise(nn.Tanh()),
    Tensor.tanh: RowWise(nn.Tanh()),
    F.silu: RowWise(nn.SiLU()),
    F.softplus: RowWise(nn.Softplus()),
    F.logsigmoid: RowWise(nn.LogSigmoid()),
}
_NAMES = frozenset(function.__name__ for function in ELEMENTWISE) | {"ACT2FN"}


class RowWiseFunctions(nn.Module):
    """Runs a module whose own code calls activations as functions: gates of mixers and norms, some MLPs."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        """Return attributes of the original that a model reads."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the original."""
        with _Replaced():
            return self.inner(*args, **kwargs)


class _Replaced(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in ELEMENTWISE and len(args) == 1 and kwargs in (None, {}, {"inplace": False}):
            return ELEMENTWISE[func](args[0])
        return func(*args, **(kwargs or {}))


@cache
def _kinds() -> frozenset[object]:
    """Of modules that are activations."""
    from transformers import activations

    known = (found[0] if isinstance(found, tuple) else found for found in dict.values(activations.ACT2CLS))
    return frozenset(known) | {nn.SiLU, nn.GELU, nn.ReLU, nn.Tanh, nn.Sigmoid}


def make_row_wise(model: PreTrainedModel) -> None:
    """Wrap every activation module of `model`, and every module that calls activations in its own code."""
    for name, module in list(model.named_modules()):
        if type(module) in _kinds():
            model.set_submodule(name, RowWise(module))
    wrapped = [name for name, module in model.named_modules() if isinstance(module, RowWiseFunctions)]
    for name in [name for name, module in model.named_modules() if name and _calls_activations(module)]:
        if name.rpartition(".")[0] not in wrapped:
            model.set_submodule(name, RowWiseFunctions(model.get_submodule(name)))


def _calls_activations(module: nn.Module) -> bool:
    forward = inspect.unwrap(type(module).forward)
    is_foreign = type(module).__module__.startswith("transformers.models.")
    return is_foreign and isinstance(forward, FunctionType) and not _NAMES.isdisjoint(forward.__code__.co_names)
