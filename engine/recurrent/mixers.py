"""Mixers of transformers' models that run over ragged batches: the same code, with a few functions replaced."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from types import FunctionType, MethodType
from typing import Any, cast

from torch import Tensor, nn

from engine.recurrent.library import FUNCTIONS
from engine.recurrent.states import RaggedStates


def prepare(model: nn.Module) -> bool:
    """Let all mixers of `model` run with `RaggedStates` as their cache; return whether it has any.

    With any other cache, and without one, they do what they did. A copy of the model has copies of its mixers.
    """
    mixers = [module for module in model.modules() if _calls_our_functions(type(module).forward)]
    for mixer in mixers:
        mixer.forward = MethodType(_ragged(type(mixer).forward), mixer)
        steps = getattr(mixer, "dt_proj", None)
        if isinstance(steps, nn.Module) and not isinstance(steps, StepProjection):
            mixer.dt_proj = StepProjection(steps)
    for module in model.modules() if mixers else ():
        if _is_told_its_layer(module) and not hasattr(module, "notes_layer"):
            module.register_forward_pre_hook(_note_layer, with_kwargs=True)
            module.notes_layer = True  # type: ignore[assignment]  # no parameter, and no module
    return bool(mixers)


class StepProjection(nn.Module):
    """The projection to step sizes in Mamba 1, which multiplies columns with its weight instead of calling it.

    Whatever stands for the weight calls the projection, so it may become a matmul of ours, in which there is no weight.
    """

    bias = None  # the product has it already

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    @property
    def weight(self) -> _Weight:
        """`weight @ columns` is the projection of the columns."""
        return _Weight(self.inner)

    def forward(self, rows: Tensor) -> Tensor:
        """`[..., in]` -> `[..., out]`."""
        return cast("Tensor", self.inner(rows))


@dataclass(frozen=True, slots=True)
class _Weight:
    projection: nn.Module

    def __matmul__(self, columns: Tensor) -> Tensor:
        """`[1, in, T]` -> `[1, out, T]`."""
        return cast("Tensor", self.projection(columns.transpose(1, 2))).transpose(1, 2)


def _calls_our_functions(forward: Callable[..., Any]) -> bool:
    function = inspect.unwrap(forward)
    return isinstance(function, FunctionType) and not FUNCTIONS.keys().isdisjoint(function.__code__.co_names)


@lru_cache
def _ragged(forward: Callable[..., Any]) -> Callable[..., Any]:
    """`forward` of a mixer's class, for instances that may be called with our cache."""
    function = inspect.unwrap(forward)  # decorators know nothing of our cache

    def ragged(self: nn.Module, *args: object, **kwargs: object) -> Any:
        states = next((arg for arg in (*args, *kwargs.values()) if isinstance(arg, RaggedStates)), None)
        return (forward if states is None else states.bound(function))(self, *args, **kwargs)

    return ragged


def _is_told_its_layer(module: nn.Module) -> bool:
    """Whether layers share it (Zamba's attention): the number of the layer is only an argument of each call."""
    return hasattr(module, "layer_idx") and "layer_idx" in inspect.signature(type(module).forward).parameters


def _note_layer(module: nn.Module, _: tuple[object, ...], kwargs: dict[str, Any]) -> None:
    module.layer_idx = kwargs.get("layer_idx", module.layer_idx)
