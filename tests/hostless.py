"""Modes that fail where code waits for the device or sends something to it, on a machine that has no device.

And one that counts what would be launched there.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

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


class _Sent(TorchDispatchMode):
    """Tells what was made on the host from what stands on the device; only `Tensor.to` leads from one to the other."""

    def __init__(self) -> None:
        super().__init__()
        self._made: list[Any] = []  # kept, so that no other tensor gets the place of one
        self._on_host: set[int] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        are_hosts = [self.is_on_host(tensor) for tensor in given if tensor.numel()]
        if any(are_hosts) and not all(are_hosts):
            raise AssertionError(f"{function} of tensors of the host and of the device: a copy that is waited for")
        out = function(*args, **(kwargs or {}))
        if (are_hosts and all(are_hosts)) or function.overloadpacket.__name__ == "lift_fresh":
            self.note(out)
        return out

    def is_on_host(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self._on_host

    def note(self, made: Any) -> None:
        for tensor in tree_leaves(made):
            if isinstance(tensor, torch.Tensor) and tensor.numel():
                self._made.append(tensor)
                self._on_host.add(tensor.untyped_storage().data_ptr())


class _NoElement(TorchFunctionMode):
    """Refuses `t[i] = 5`: on CUDA, where t[i] is one element, a copy that the host waits for."""

    def __init__(self, sent: _Sent) -> None:
        super().__init__()
        self._sent = sent

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(function, "__name__", "")
        if name == "__setitem__" and not isinstance(args[2], torch.Tensor) and not self._sent.is_on_host(args[0]):
            raise AssertionError(f"t[{args[1]}] = {args[2]}: a number is written to the device by itself")
        out = function(*args, **(kwargs or {}))
        if name in ("from_numpy", "pin_memory"):
            self._sent.note(out)
        if (name == "to" or (kwargs or {}).get("device") is not None) and self._sent.is_on_host(out):
            with _disable_current_modes():
                return out.clone()
        return out


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
def sent_in_pieces() -> Iterator[None]:
    """Within it nothing goes up to the device but whole tensors, by `Tensor.to`; what comes down is not looked at."""
    sent = _Sent()
    with sent, _NoElement(sent):
        yield


@contextmanager
def hostless() -> Iterator[None]:
    """Within it no tensor's value comes to the host and none goes up."""
    with _NoWait(), _NoTouch():
        yield
