"""Counts what would be launched."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Counting(TorchDispatchMode):
    """Counts operations that would each be a launch: no views, and nothing that only takes memory."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        name = function.overloadpacket.__name__
        if name not in ("empty", "new_empty", "empty_like") and not (function.is_view and _shares(args[0], out)):
            self.names.append(name)
        return out


def _shares(given: Any, made: Any) -> bool:
    """Whether a view is one: `flatten`, `to` and others copy where they must."""
    tensors = [tensor for tensor in tree_leaves(made) if isinstance(tensor, torch.Tensor)]
    return all(tensor.untyped_storage().data_ptr() == given.untyped_storage().data_ptr() for tensor in tensors)
