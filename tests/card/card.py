"""Which calls of torch are the card's, which are copies between it and the host, and which the host waits for."""

from __future__ import annotations

import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache, partial
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from pilotfish import engine
from tests.card.graph import ONLY_ALLOCATES, Capture, mapped, tensors_of
from tests.card.memory import poison

_ENGINE = engine.__path__[0]
DEVICE = torch.device("cuda", 0)
WAITS = "called a synchronizing CUDA operation"  # in torch's words
REFUSED = "operation not permitted when stream is capturing"  # in CUDA's
_SAID = {"device": DEVICE, "is_cuda": True, "is_cpu": False}  # of every tensor of the card
# Operations whose result or shape is made of values.
_READ = {
    "_local_scalar_dense", "nonzero", "nonzero_static", "masked_select", "is_nonzero", "equal", "item", "bincount",
    "unique_dim", "_unique2", "unique_consecutive", "allclose",
}  # fmt: skip
# Of these the host knows the answer.
_FREE = {
    "size", "dim", "numel", "stride", "is_contiguous", "storage_offset", "element_size", "is_floating_point", "__len__",
    "data_ptr", "untyped_storage", "_has_compatible_shallow_copy_type", "is_complex", "is_inference", "__hash__",
    "__deepcopy__", "_parse_to",
}  # fmt: skip


class OnCard(Tensor):
    """A tensor of the card."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError("a tensor of a card that is gone")


class ParameterOnCard(OnCard, nn.Parameter):
    """A parameter of the card."""


def is_here(leaf: object) -> bool:
    """Whether it is a tensor of the card."""
    return isinstance(leaf, OnCard)


def is_pinned(tensor: Tensor) -> bool:
    """Whether it lies in pinned memory."""
    return getattr(tensor, "lies_pinned", False)


def on_card(made: Any) -> Any:
    """The same; its tensors are the card's from now on."""
    for tensor in tensors_of(made):
        if not is_here(tensor):
            tensor.__class__ = ParameterOnCard if isinstance(tensor, nn.Parameter) else OnCard
    return made


class Card:
    """What happens on the card, and what the host waits for. `tests.card.here` puts one in."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.told = list[str]()  # captures, plays and changes of streams, in order
        self.launched = list[str]()  # kernels outside of captures, by name
        self.waits = Counter[str]()  # by the nearest function of the engine
        self.uploads, self.sync_debug_mode = 0, "default"
        self.capture: Capture | None = None
        self._landing, self._num_landed = list[Callable[[], object]](), 0  # what it does as each copy is done

    def wait(self, why: str) -> None:
        """The host waits until the card has done all that it was told to do."""
        if self.capture is not None:
            raise RuntimeError(f"{REFUSED}: {why}")
        self.waits[_nearest()] += 1
        if self.sync_debug_mode == "error":
            raise RuntimeError(f"{WAITS}: {why}")
        if self.sync_debug_mode == "warn":
            warnings.warn(f"{WAITS}: {why}", stacklevel=_depth())
        self.land(self.num_copies)

    @property
    def num_copies(self) -> int:
        """Copies to and from the host so far that nobody waited for when they were asked for."""
        return self._num_landed + len(self._landing)

    def land(self, count: int) -> None:
        """Let the first `count` of these copies be done."""
        while self._num_landed < count:
            self._landing.pop(0)()
            self._num_landed += 1

    def kernel(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function as one kernel, which gives back tensors or writes what it is given."""

        def launch(*args: Any, **kwargs: Any) -> Any:
            strangers = [t for t in tensors_of((args, kwargs)) if not is_here(t)]
            assert not strangers, f"{function.__name__} is given a tensor of the host"
            with torch._C.DisableTorchFunction():
                return on_card(self.call(function.__name__, function, args, kwargs))

        return launch

    def call(self, name: str, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Launch a kernel, or record it."""
        if self.capture is not None:
            return self.capture.call(name, function, args, kwargs)
        if name not in ONLY_ALLOCATES:
            self.launched.append(name)
        return function(*args, **kwargs)

    def upload(self, tensor: Tensor, *, is_async: bool) -> Tensor:
        """A copy on the card."""
        if not (is_async and is_pinned(tensor)):
            self.wait("a copy from memory that is not pinned")
        elif self.capture is None:
            self._landing.append(partial(_check_unchanged, tensor, tensor.clone()))
        self.uploads += 1
        return on_card(self.call("copy", torch.clone, (tensor,), {}))

    def download(self, tensor: Tensor) -> Tensor:
        """A copy on the host."""
        self.wait("a copy to the host")
        copied = tensor.clone()
        copied.__class__ = Tensor
        return copied

    def copy(self, target: Tensor, source: Tensor, *, is_async: bool) -> Tensor:
        """As `target.copy_(source)`, of which one is the card's."""
        if is_here(target):
            if not is_here(source):
                source = self.upload(source, is_async=is_async)
            return on_card(self.call("copy_", Tensor.copy_, (target, source), {}))
        if not (is_async and is_pinned(target)):
            return target.copy_(self.download(source))
        if self.capture is not None:
            raise RuntimeError(f"{REFUSED}: a copy to the host")
        self._landing.append(partial(target.copy_, source.clone()))
        return target.fill_(poison(target.dtype))


def _check_unchanged(source: Tensor, sent: Tensor) -> None:
    now, then = (tensor.reshape(-1).view(torch.uint8) for tensor in (source, sent))
    assert torch.equal(now, then), "pinned memory was written before the copy from it was done"


class Launches(TorchDispatchMode):
    """Within it operations of torch are kernels on the card."""

    def __init__(self, card: Card) -> None:
        super().__init__()
        self._card = card

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and to keep it from that takes longer than most kernels

    def __torch_dispatch__(self, function: OpOverload, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = function.overloadpacket.__name__, kwargs or {}
        masks = args[1] if name in ("index", "index_put", "index_put_", "_index_put_impl_") else ()
        is_sized = name == "repeat_interleave" and not kwargs.get("output_size")
        if name in _READ or is_sized or any(mask is not None and mask.dtype == torch.bool for mask in masks):
            self._card.wait(str(function))
        elif _is_of_others(function):
            with self:
                return function.decompose(*args, **kwargs)
        return function(*args, **kwargs) if function.is_view else self._card.call(name, function, args, kwargs)


@cache
def _is_of_others(function: OpOverload) -> bool:
    """Whether it is made of other operations, on every device; a matmul is looked at as one."""
    key = torch._C.DispatchKey.CompositeImplicitAutograd
    is_one = function.overloadpacket.__name__ in ("linear", "matmul")
    return not is_one and torch._C._dispatch_has_kernel_for_dispatch_key(function.name(), key)


class Host(TorchFunctionMode):
    """Sends each call of torch to where its tensors are."""

    def __init__(self, card: Card) -> None:
        super().__init__()
        self._card = card

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = getattr(function, "__name__", ""), dict(kwargs or {})
        with torch._C.DisableTorchFunctionSubclass():
            if name in ("__get__", "__set__"):
                return self._attribute(function, *args)
            if name in _COPIES and any(map(is_here, args)):
                return _COPIES[name](self._card, *args, **kwargs)
            if name in _MOVES:
                return _MOVES[name](self._card, *args, **kwargs)
            return function(*args, **kwargs) if name in _FREE else self._call(name, function, args, kwargs)

    def _call(self, name: str, function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        asked = kwargs.get("device")
        goes_there = asked is not None and torch.device(asked).type == "cuda"
        given = [is_here(tensor) for tensor in tensors_of((args, kwargs))]
        if not goes_there and not any(given):
            is_wanted_pinned = kwargs.pop("pin_memory", False)
            made = function(*args, **kwargs)
            return _pin(self._card, made) if is_wanted_pinned else made
        if goes_there:
            kwargs["device"] = "cpu"
            if name in ("tensor", "as_tensor", "asarray"):
                self._card.wait(f"torch.{name} on the card")
        if name == "__setitem__" and not isinstance(args[2], Tensor) and not args[0][args[1]].ndim:
            self._card.wait("a number is written to the card by itself")
        if not all(given):
            args, kwargs = mapped(lambda leaf: self._brought(name, leaf), (args, kwargs))
        with Launches(self._card):
            made = function(*args, **kwargs)
        return made if asked is not None and not goes_there else on_card(made)

    def _brought(self, name: str, leaf: Any) -> Any:
        """An argument: a number of the host's goes with the launch, an index goes up, and all else is a mistake."""
        if not isinstance(leaf, Tensor) or is_here(leaf):
            return leaf
        if not leaf.ndim:
            return leaf if self._card.capture is None else self._card.capture.frozen(leaf)
        if name in ("__getitem__", "__setitem__"):
            return self._card.upload(leaf, is_async=False)
        raise RuntimeError(f"Expected all tensors to be on the same device, but {name} has one of the host's")

    def _attribute(self, function: Any, owner: Tensor, *values: Any) -> Any:
        name = function.__self__.__name__
        if is_here(owner) and not values:
            return _SAID[name] if name in _SAID else on_card(function(owner))
        function_returns = function(owner, *values)
        if name == "data" and any(map(is_here, values)):  # how `nn.Module.to` moves parameters
            on_card(owner)
        return function_returns


def _to(card: Card, tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """As `Tensor.to`."""
    for other in (arg for arg in args if isinstance(arg, Tensor)):
        args = (DEVICE if is_here(other) else other.device), other.dtype, *args[1:]
    place = next((x for x in (*args, kwargs.get("device")) if isinstance(x, str | torch.device)), None)
    dtype = next((x for x in (*args, kwargs.get("dtype")) if isinstance(x, torch.dtype)), tensor.dtype)
    is_async = kwargs.get("non_blocking", False) or True in [x for x in args if isinstance(x, bool)]
    goes_there = is_here(tensor) if place is None else torch.device(place).type == "cuda"
    if not goes_there:
        return card.download(tensor).to(dtype) if is_here(tensor) else tensor.to(*args, **kwargs)
    if not is_here(tensor):
        tensor = card.upload(tensor, is_async=is_async)
    with Launches(card):
        return on_card(tensor.to(dtype, copy=kwargs.get("copy", False)))


def _pin(card: Card, tensor: Tensor, *_: Any) -> Tensor:
    """A copy in pinned memory."""
    if card.capture is not None:
        raise RuntimeError(f"{REFUSED}: pinned memory is allocated")
    copied = tensor.clone()
    copied.lies_pinned = True  # type: ignore[attr-defined]
    return copied


_MOVES: dict[str, Callable[..., Tensor]] = {
    "to": _to,
    "cuda": lambda card, tensor, *_, **how: _to(card, tensor, DEVICE, **how),
    "cpu": lambda card, tensor, *_: _to(card, tensor, "cpu"),
    "pin_memory": _pin,
}
_COPIES: dict[str, Callable[..., Any]] = {
    "copy_": lambda card, target, source, non_blocking=False: card.copy(target, source, is_async=non_blocking),
    "tolist": lambda card, tensor: card.download(tensor).tolist(),
    "numpy": lambda card, tensor, **how: card.download(tensor).numpy(**how),
}


def _frames() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _nearest() -> str:
    """The nearest function of the engine: verification.py:_read."""
    places = ((frame.f_code.co_filename.rpartition("/"), frame.f_code.co_name) for frame in _frames())
    return next((f"{file}:{name}" for (path, _, file), name in places if path.startswith(_ENGINE)), "a test")


def _depth() -> int:
    """How many frames up from `Card.wait` the first one is that is neither the card's nor torch's."""
    files = (frame.f_code.co_filename for frame in _frames())
    return next(i for i, file in enumerate(files) if "/tests/card/" not in file and "/torch/" not in file)
