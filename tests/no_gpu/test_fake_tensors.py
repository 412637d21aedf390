"""Whole engines on a card that is not there: tensors without values, on `cuda:0`.

A CPU's tensor among the card's, an upload that the host waits for, a value read on the host: all of that runs on a CPU
and fails, or waits, on a card. Here it is seen; kernels do nothing. torch must have been built for CUDA.
"""

from __future__ import annotations

import sys
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton", reason="triton is not installed")

from triton.runtime.interpreter import GridExecutor

from engine.device_loop.loop import RoundLoop
from engine.device_loop.repertoire import as_it_is
from engine.device_loop.results import PendingRound
from engine.kernels import reference, rows
from engine.model.fusion.fuse_cuda import fuse_for_cuda
from tests import zoo
from tests.loops import engine_of, request

pytestmark = [
    pytest.mark.skipif(not torch.backends.cuda.is_built(), reason="torch was built without CUDA"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here, and it is asked instead"),
]
# What the host may read in a plain step; a round's mail is read from pinned memory.
READS = {"verification.py:_decide", "distribution.py:_support"}


class Event:
    """Everything has happened already."""

    def __init__(self, **_: bool) -> None: ...

    def record(self) -> None: ...

    def synchronize(self) -> None: ...

    def elapsed_time(self, _: Event) -> float:
        return 1e-3


class Watch(TorchDispatchMode):
    """Notes, by the line of our code, each value that the host reads (all are 1) and each upload that it waits for."""

    def __init__(self) -> None:
        super().__init__()
        self.reads, self.waits = Counter[str](), Counter[str]()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        if function is torch.ops.aten._local_scalar_dense.default:
            self.reads[_who()] += args[0].is_cuda
            return 1
        if function is torch.ops.aten.copy_.default and args[0].is_cuda:
            self._upload(args[1], is_async=args[2] if len(args) > 2 else options.get("non_blocking", False))
        if function is torch.ops.aten._to_copy.default and torch.device(options.get("device") or "cpu").type == "cuda":
            self._upload(args[0], is_async=options.get("non_blocking", False))
        return function(*args, **options)

    def _upload(self, source: Tensor, *, is_async: bool) -> None:
        if not source.is_cuda and not (is_async and getattr(source, "pinned", False)):
            self.waits[_who()] += 1


def _who() -> str:
    """The nearest function of ours: verification.py:_decide."""
    frame = sys._getframe(1)
    while frame is not None and "/engine/" not in frame.f_code.co_filename:
        frame = frame.f_back
    return f"{frame.f_code.co_filename.rpartition('/')[2]}:{frame.f_code.co_name}" if frame else "a test"


def pinned(tensor: Tensor) -> Tensor:
    tensor.pinned = True
    return tensor


def as_on_a_card(model: nn.Module) -> nn.Module:
    """Our kernels wherever they fit, and weights without values. Call it within the mode of such tensors."""
    for module in model.modules():
        if hasattr(module, "ops"):
            module.ops = rows
        for name, value in [*module._parameters.items(), *module._buffers.items()]:
            if value is None:
                continue
            there = torch.empty(value.shape, dtype=value.dtype, device="cuda")
            if name in module._parameters:
                module._parameters[name] = nn.Parameter(there, requires_grad=False)
            else:
                module._buffers[name] = there
    return model


def one_token_each(mail: PendingRound) -> list[list[int]]:
    return [[1] * (mail.k + 1) + [1, 0, 0] for _ in range(mail.size)]


@pytest.fixture(scope="module")
def served() -> tuple[Watch, Watch]:
    """What was seen of rounds' launches, and of everything else."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GridExecutor, "__call__", lambda *_, **__: None)
        patch.setattr(torch.Tensor, "pin_memory", pinned)
        patch.setattr(torch.cuda, "Event", Event)
        patch.setattr(PendingRound, "read", one_token_each)
        patch.setattr("engine.startup.build.check_ragged_contract", lambda *_: None)  # it compares numbers
        patch.setattr("engine.startup.loop.graph_budget", lambda *_: None)
        patch.setattr("engine.startup.loop.Graphs", lambda _: as_it_is)
        return serve(patch)


def serve(patch: pytest.MonkeyPatch) -> tuple[Watch, Watch]:
    """Four requests of all laws from their prompts to their ends."""
    pair = [zoo.ours(zoo.reference("gemma2")), zoo.near(zoo.reference("gemma2"))]
    for model in pair:
        fuse_for_cuda(model, reference)
    launching, watch, launch = Watch(), Watch(), RoundLoop.launch

    def watched(*args: Any) -> None:
        with launching:
            launch(*args)

    patch.setattr(RoundLoop, "launch", watched)
    with FakeTensorMode():
        engine = engine_of("gemma2", pair=[as_on_a_card(model) for model in pair], device="cuda", attention="auto")
        with watch:
            for i in range(1, 5):
                engine.add(request(i))
            while engine.has_work:
                engine.step()
                engine.check_invariants()
    assert engine.loop == "rounds", "a round failed"
    return launching, watch


def test_an_engine_runs_on_a_cards_tensors_alone(served) -> None:
    """No tensor of the CPU meets one of the card, and only a plain step's answer is read."""
    launching, watch = served
    assert not launching.reads
    assert watch.reads.keys() <= READS
    assert watch.reads["verification.py:_decide"], "nothing was seen"


def test_no_upload_is_waited_for(served) -> None:
    """What goes up lies in pinned memory; a number of Python's that is assigned does not."""
    launching, watch = served
    assert not launching.waits
    assert not watch.waits


def test_what_is_watched_is_seen() -> None:
    with FakeTensorMode(), Watch() as watch:
        there = torch.zeros(3, device="cuda")
        with pytest.raises(RuntimeError, match="device"):
            there + torch.zeros(3)
        there[1] = 2.0
        float(there[1])
    assert watch.waits.total() == watch.reads.total() == 1
