"""What `torch.cuda` offers, for the card that is not there."""

from __future__ import annotations

import gc
import inspect
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from functools import partial, partialmethod
from typing import Any

import pytest
import torch

from pilotfish.engine.kernels import reference
from pilotfish.engine.model.decoder.ops import LayerOps
from pilotfish.engine.sampling.distribution import choose
from tests.card.card import Card, Host
from tests.card.graph import Capture, Graph
from tests.card.memory import Pool

MEMORY = 80 << 30  # bytes
LAYER_OPS = {field.name for field in fields(LayerOps)}


class Stream:
    """All that is launched runs at once and in order: a stream is only told of."""

    def __init__(self, card: Card) -> None:
        self._card = card

    def wait_stream(self, _: Stream) -> None:
        self._card.told.append("wait")

    def synchronize(self) -> None:
        self._card.wait("a stream is synchronised")


class Event:
    """When the card came to this point, and which copies to the host lie before it."""

    def __init__(self, card: Card, **_: bool) -> None:
        self._card, self._copies, self.time = card, 0, 0.0

    def record(self) -> None:
        self._copies, self.time = self._card.num_copies, self._card.clock()

    def synchronize(self) -> None:
        self._card.land(self._copies)

    def elapsed_time(self, later: Event) -> float:
        """Milliseconds."""
        return (later.time - self.time) * 1e3


def _of(first: object, kind: type) -> type:
    """The class, whose first argument is given: type hints of others name it."""
    return type(kind.__name__, (kind,), {"__init__": partialmethod(kind.__init__, first)})


@contextmanager
def here(clock: Callable[[], float] = time.perf_counter, *, interprets: bool = False) -> Iterator[Card]:
    """Within it there is a card. Our kernels are what they mean in plain torch, or are interpreted: that takes long."""
    card, signature = Card(clock), inspect.signature(torch.cuda.graph.__init__)

    @contextmanager
    def capturing(graph: Graph, **how: Any) -> Iterator[None]:
        signature.bind(None, graph, **how)  # torch has these arguments
        assert card.capture is None, "a capture within a capture"
        assert not gc.isenabled(), "garbage may be collected in the midst of a capture"
        card.told.append("capture")
        card.capture = Capture(graph, how.get("pool") or Pool())
        try:
            yield
        finally:
            card.capture = None
        card.told.append("captured")

    @contextmanager
    def on_stream(_: Stream) -> Iterator[None]:
        card.told.append("on its stream")
        yield

    stands_in: dict[str, Any] = {
        "Stream": _of(card, Stream),
        "Event": _of(card, Event),
        "CUDAGraph": _of(card.told, Graph),
        "current_stream": lambda: Stream(card),
        "stream": on_stream,
        "graph": capturing,
        "graph_pool_handle": Pool,
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "get_device_capability": lambda *_: (9, 0),
        "get_device_name": lambda *_: "a card that is not there",
        "mem_get_info": lambda *_: (MEMORY, MEMORY),
        "memory_reserved": lambda *_: 0,
        "memory_allocated": lambda *_: 0,
        "empty_cache": lambda: None,
        "synchronize": lambda *_: card.wait("the device is synchronised"),
        "set_sync_debug_mode": lambda mode: setattr(card, "sync_debug_mode", mode),
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, stand_in in stands_in.items():
            patch.setattr(torch.cuda, name, stand_in)
        if interprets:
            _watch_launches(patch, card)
        else:
            _use_references(patch, card)
        with Host(card):
            yield card


def _use_references(patch: pytest.MonkeyPatch, card: Card) -> None:
    from pilotfish.engine.kernels import attention, experts, plan, rows, sampling

    attend = card.kernel(reference.attend)
    patch.setattr(plan, "plans_of", lambda *_, **__: None)
    patch.setattr(attention, "attend", lambda *args, plans, **how: attend(*args, **how))
    patch.setattr(sampling, "choose", card.kernel(choose))
    patch.setattr(sampling, "commit", card.kernel(reference.commit))
    for module in (rows, experts):
        for name in LAYER_OPS & vars(module).keys():
            patch.setattr(module, name, card.kernel(getattr(reference, name)))


def _watch_launches(patch: pytest.MonkeyPatch, card: Card) -> None:
    """Kernels that are interpreted are launches as well; they give nothing back, and only write."""
    from triton.runtime.interpreter import GridExecutor

    run = GridExecutor.__call__

    def launch(executor: GridExecutor, *args: Any, **kwargs: Any) -> None:
        with torch._C.DisableTorchFunction():
            if card.capture is not None:
                card.capture.launch(executor.fn.__name__, partial(run, executor), args, kwargs, [])
            else:
                card.launched.append(executor.fn.__name__)
                run(executor, *args, **kwargs)

    patch.setattr(GridExecutor, "__call__", launch)
