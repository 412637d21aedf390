"""What recording a round asks of CUDA, in which order; torch's calls are stood in for, so nothing is captured."""

from __future__ import annotations

import gc
import inspect
from contextlib import contextmanager

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from engine.device_loop.graphs import Graphs, MemoryBudget
from engine.device_loop.round import Round
from engine.device_loop.shapes import RoundShape
from tests.loops import loop_of, models


class Read(TorchDispatchMode):
    """Notes what captured operations were given: they will read it at the same address in every play."""

    def __init__(self) -> None:
        super().__init__()
        self.given: dict[int, StorageWeakRef] = {}
        self._made: dict[int, StorageWeakRef] = {}  # within a capture: that memory stays the graphs'

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.given |= {ref.cdata: ref for ref in self._refs((args, kwargs)) if ref.cdata not in self._made}
        out = function(*args, **(kwargs or {}))
        self._made |= {ref.cdata: ref for ref in self._refs(out) if ref.cdata not in self.given}
        return out

    @staticmethod
    def _refs(tree) -> list[StorageWeakRef]:
        return [StorageWeakRef(x.untyped_storage()) for x in tree_leaves(tree) if isinstance(x, torch.Tensor)]


class Card:
    """Notes what is asked for; within a capture operations run as ever."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.told: list[str] = []
        self.read = Read()
        self.graph = inspect.signature(torch.cuda.graph.__init__)
        for name in ("Stream", "CUDAGraph", "current_stream"):
            patch.setattr(torch.cuda, name, lambda: self)
        patch.setattr(torch.cuda, "graph_pool_handle", lambda: "the pool")
        patch.setattr(torch.cuda, "graph", self._graph)
        patch.setattr(torch.cuda, "stream", self._stream)
        verify = Round.verify
        patch.setattr(Round, "verify", lambda *args: self.told.append("verify") or verify(*args))

    def wait_stream(self, other: Card) -> None:
        self.told.append("wait")

    def replay(self) -> None:
        self.told.append("play")

    @contextmanager
    def _stream(self, stream: Card):
        self.told.append("on its stream")
        yield

    @contextmanager
    def _graph(self, graph: Card, **how: object):
        self.graph.bind(None, graph, **how)  # torch has these arguments
        assert how == {"pool": "the pool", "stream": self, "capture_error_mode": "thread_local"}
        assert not gc.isenabled()
        self.told.append("capture")
        with self.read:
            yield
        assert not gc.isenabled()
        self.told.append("captured")


@pytest.mark.parametrize("k", [0, 2])
def test_a_round_is_warmed_up_captured_and_played_and_what_it_reads_lives_on(
    k: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    card, free = Card(monkeypatch), iter([100, 60])
    loop = loop_of(models())
    graphs = Graphs(MemoryBudget(30, lambda: next(free)))
    assert graphs.has_room
    play = graphs(loop.round_of(RoundShape(2, k, True)))
    warm = ["wait", "on its stream", "verify", "verify", "wait"]
    drafting = ["capture", "captured"] if k else []
    played = ["play", "play"] if k else ["play"]
    assert card.told == [*warm, *drafting, "capture", "verify", "captured", *played]
    assert gc.isenabled()
    assert not graphs.has_room
    timer = []
    play(torch.tensor([0, 0]), lambda: timer.append(len(card.told)))
    assert timer == [len(card.told) - 1], "the mark is between drafting and verification"
    # A round is made for its recording alone; what dies with it would be read when others have its memory.
    gc.collect()
    assert len(card.read.given) > 20
    assert not [ref for ref in card.read.given.values() if ref.expired()]


def test_a_capture_that_fails_leaves_collection_on(monkeypatch: pytest.MonkeyPatch) -> None:
    Card(monkeypatch)
    loop = loop_of(models())
    round_ = loop.round_of(RoundShape(2, 1, True))
    monkeypatch.setattr(Graphs, "_warm_up", lambda *_: None)
    monkeypatch.setattr(Round, "propose", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        Graphs(MemoryBudget(30, lambda: 0))(round_)
    assert gc.isenabled()
