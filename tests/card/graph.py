"""What a capture records, and what a play of it does: kernels, with the memory and the numbers that they were given."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from tests.card.memory import Named, Pool

ONLY_ALLOCATES = "empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided"

_NUMBERS = {int, float, bool, type(None), str, torch.dtype, torch.device}


def mapped(function: Callable[[Any], Any], tree: Any) -> Any:
    """The same lists, tuples, dictionaries and dataclasses of ours, of other leaves."""
    if isinstance(tree, Tensor) or type(tree) in _NUMBERS:
        return function(tree)
    if isinstance(tree, dict):
        return {name: mapped(function, value) for name, value in tree.items()}
    if isinstance(tree, (list, tuple)) and not isinstance(tree, torch.Size):
        return type(tree)([mapped(function, value) for value in tree])
    if _is_ours(type(tree)):
        return type(tree)(**{each.name: mapped(function, getattr(tree, each.name)) for each in fields(tree)})
    return function(tree)


def tensors_of(tree: Any, found: list[Tensor] | None = None) -> list[Tensor]:
    """The tensors among the leaves."""
    found = [] if found is None else found
    if isinstance(tree, Tensor):
        found.append(tree)
    elif type(tree) not in _NUMBERS:
        if isinstance(tree, (list, tuple)):
            parts: Any = tree
        elif isinstance(tree, dict):
            parts = tree.values()
        else:
            parts = [getattr(tree, each.name) for each in fields(tree)] if _is_ours(type(tree)) else ()
        for part in parts:
            tensors_of(part, found)
    return found


@cache
def _is_ours(kind: type) -> bool:
    """Whether it is a dataclass of the engine's: what kernels are given and give back."""
    return is_dataclass(kind) and kind.__module__.startswith("pilotfish.engine.")


@dataclass(frozen=True, slots=True)
class Launch:
    """One kernel and what it is given; what it makes goes where it was to go when it was recorded."""

    name: str
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    made: list[Named | None]  # of each tensor that it gives back; None where that is one which it was given, or empty

    def run(self) -> None:
        args, kwargs = mapped(lambda leaf: leaf.tensor() if isinstance(leaf, Named) else leaf, (self.args, self.kwargs))
        made = self.function(*args, **kwargs)
        for where, tensor in zip(self.made, tensors_of(made) if self.made else (), strict=True):
            if where is not None:
                where.tensor().copy_(tensor)


class Graph:
    """As `torch.cuda.CUDAGraph`."""

    def __init__(self, told: list[str]) -> None:
        self.launches = list[Launch]()
        self.frozen = list[Tensor]()
        self._told = told

    def replay(self) -> None:
        self._told.append("play")
        with torch._C.DisableTorchFunction(), torch.inference_mode():
            for launch in self.launches:
                launch.run()


class Capture:
    """Takes the place of the card while a graph is recorded: nothing runs, and what would be made is poison."""

    def __init__(self, graph: Graph, pool: Pool) -> None:
        self._graph, self._pool = graph, pool

    def call(self, name: str, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Record a kernel; its results, as tensors of the pool or as those of its arguments that it writes."""
        given = dict[int, Tensor]()

        def stand_in(leaf: Any) -> Any:
            """Zeros, for which the kernel runs now, so that it tells the shapes of its results."""
            if not isinstance(leaf, Tensor):
                return leaf
            zeros = torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype).zero_()
            given[id(zeros)] = leaf
            standing.append(zeros)
            return zeros

        def allocated(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            if id(leaf) in given:
                made.append(None)
                return given[id(leaf)]
            tensor = self._pool.empty(leaf.shape, leaf.stride(), leaf.dtype)
            made.append(self._named(tensor) if tensor.numel() else None)
            return tensor

        standing, made = list[Tensor](), list[Named | None]()
        out = mapped(allocated, function(*mapped(stand_in, args), **mapped(stand_in, kwargs)))
        if name not in ONLY_ALLOCATES:
            self.launch(name, function, args, kwargs, made)
        return out

    def launch(self, name: str, function: Any, args: Any, kwargs: Any, made: list[Named | None]) -> None:
        """Record a kernel by the memory that it names; numbers are as they are now."""
        args, kwargs = mapped(self._named, (args, kwargs))
        self._graph.launches.append(Launch(name, function, args, kwargs, made))

    def frozen(self, number: Tensor) -> Tensor:
        """A number of the host's as a kernel is given it: by its value."""
        self._graph.frozen.append(number.clone())
        return self._graph.frozen[-1]

    def _named(self, leaf: Any) -> Any:
        return Named.of(leaf, self._pool) if isinstance(leaf, Tensor) and leaf.numel() else leaf
