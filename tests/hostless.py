"""Modes that fail where code waits for the device or sends something to it, on a machine that has no device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

# Operations whose result or shape is made of values: on CUDA each waits for all work before it.
_WAITS = {
    "_local_scalar_dense", "nonzero", "nonzero_static", "masked_select", "is_nonzero", "equal", "item", "bincount",
    "unique_dim", "_unique2", "unique_consecutive", "allclose",
}  # fmt: skip
# How a number of Python's becomes a tensor, or a tensor a number: on CUDA an upload, or a wait.
_TOUCHES = {
    "tensor", "as_tensor", "from_numpy", "asarray", "scalar_tensor", "tolist", "numpy", "cpu", "item", "__bool__",
    "__int__", "__float__", "__index__", "__contains__", "pin_memory", "to_list",
}  # fmt: skip


class _NoWait(TorchDispatchMode):
    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.overloadpacket.__name__
        masks = [a for a in (args[1] if name in ("index", "index_put", "index_put_") else ()) if a is not None]
        if name in _WAITS or any(mask.dtype == torch.bool for mask in masks):
            raise AssertionError(f"{function} waits for the device")
        if name == "repeat_interleave" and not (kwargs or {}).get("output_size"):
            raise AssertionError(f"{function} has a shape made of values")
        if name == "lift_fresh":
            raise AssertionError("a tensor is made on the host")
        return function(*args, **(kwargs or {}))


class _NoTouch(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(function, "__name__", "") in _TOUCHES:
            raise AssertionError(f"{function.__name__}: the host touches a tensor's values")
        return function(*args, **(kwargs or {}))


@contextmanager
def looking_away() -> Iterator[None]:
    """Within it these modes see nothing: for what runs on the device and is only interpreted on the host."""
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        yield


@contextmanager
def hostless() -> Iterator[None]:
    """Within it no tensor's value comes to the host and none goes up."""
    with _NoWait(), _NoTouch():
        yield
