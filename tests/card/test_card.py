"""The card that is not there does what a card does: what waits, what a capture refuses, and what a play reads."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn

from tests.card import Card, here

pytest.importorskip("triton", reason="triton is not installed")


@pytest.fixture
def card() -> Iterator[Card]:
    with here() as found:
        yield found


@contextmanager
def capture(pool: object) -> Iterator[torch.cuda.CUDAGraph]:
    graph = torch.cuda.CUDAGraph()
    gc.disable()
    try:
        with torch.cuda.graph(graph, pool=pool), torch.inference_mode():
            yield graph
    finally:
        gc.enable()


def up(values: object) -> Tensor:
    return torch.tensor(values).pin_memory().to("cuda", non_blocking=True)


WAITS: dict[str, Callable[[Tensor], object]] = {
    "item": lambda x: x[0].item(),
    "float": lambda x: float(x[1]),
    "bool": lambda x: bool(x[1] > 0),
    "contains": lambda x: 3 in x,
    "tolist": lambda x: x.tolist(),
    "numpy": lambda x: x.numpy(),
    "cpu": lambda x: x.cpu(),
    "to": lambda x: x.to("cpu"),
    "copied down": lambda x: torch.empty(3).copy_(x),
    "nonzero": lambda x: x.nonzero(),
    "where": lambda x: torch.where(x > 0),
    "masked": lambda x: x[x > 0],
    "written where": lambda x: x.__setitem__(x > 0, up([1.0, 2.0])),
    "unique": lambda x: x.unique(),
    "equal": lambda x: torch.equal(x, x),
    "repeated": lambda x: x.repeat_interleave(x.long()),
    "tensor": lambda _: torch.tensor([1.0], device="cuda"),
    "pageable": lambda _: torch.ones(3).to("cuda"),
    "not awaited in vain": lambda _: torch.ones(3).to("cuda", non_blocking=True),
    "pinned and awaited": lambda _: torch.ones(3).pin_memory().cuda(),
    "copied up": lambda x: x.copy_(torch.ones(3)),
    "a number is copied up": lambda x: x.copy_(torch.tensor(1.0)),
    "a number": lambda x: x.__setitem__(1, 2.0),
    "an index of the host's": lambda x: x[torch.tensor([1, 0])],
    "synchronised": lambda _: torch.cuda.synchronize(),
    "stream": lambda _: torch.cuda.current_stream().synchronize(),
}


@pytest.mark.parametrize("name", WAITS)
def test_what_the_host_waits_for_is_noted_and_refused_in_a_capture(name: str, card: Card) -> None:
    x = up([1.0, 2.0, 0.0])
    WAITS[name](x)
    assert card.waits.total() == 1
    torch.cuda.set_sync_debug_mode("error")
    with pytest.raises(RuntimeError, match="synchronizing"):
        WAITS[name](x)
    with pytest.raises(RuntimeError, match="capturing"), capture(torch.cuda.graph_pool_handle()):
        WAITS[name](x)
    with pytest.raises(RuntimeError, match="capturing"), capture(torch.cuda.graph_pool_handle()):
        torch.empty(3, pin_memory=True)


def test_what_the_host_need_not_wait_for(card: Card) -> None:
    x = up([[1.0, 2.0], [3.0, 4.0]])
    x[1] = 5.0
    x[:, 0].add_(torch.tensor(2.0))
    assert (x + 1).argmax(-1).shape == (2,)
    assert (x.device.type, x.is_cuda, x.new_zeros(2).is_cuda, torch.ones_like(x, device="cpu").is_cuda) == (
        "cuda", True, True, False,
    )  # fmt: skip
    assert not card.waits
    assert x.tolist() == [[3.0, 2.0], [7.0, 5.0]]


def test_tensors_of_two_places_do_not_mix(card: Card) -> None:
    model = nn.Linear(2, 2).cuda()
    assert all(parameter.is_cuda and isinstance(parameter, nn.Parameter) for parameter in model.parameters())
    assert model(up([1.0, 2.0])).is_cuda
    for mixed in (lambda: model(torch.ones(2)), lambda: torch.cat([up([1.0]), torch.ones(1)])):
        with pytest.raises(RuntimeError, match="same device"):
            mixed()


def test_a_copy_to_the_host_arrives_when_it_is_waited_for(card: Card) -> None:
    x, there, done = up([1, 2]), torch.empty(2, dtype=torch.int64, pin_memory=True), torch.cuda.Event()
    there.copy_(x, non_blocking=True)
    done.record()
    x.zero_()
    assert there.tolist() != [1, 2]
    done.synchronize()
    assert there.tolist() == [1, 2]
    assert not card.waits


def test_what_is_being_copied_up_may_not_be_written(card: Card) -> None:
    pinned, done = torch.tensor([1.0, float("nan")]).pin_memory(), torch.cuda.Event()
    for _ in range(2):
        pinned.to("cuda", non_blocking=True)
        done.record()
        done.synchronize()
        pinned.add_(1)
    pinned.to("cuda", non_blocking=True)
    pinned.add_(1)
    with pytest.raises(AssertionError, match="before the copy from it was done"):
        torch.cuda.synchronize()


def test_a_play_reads_by_address_what_is_there_now(card: Card) -> None:
    """What was written since is read, what was given back is poison, numbers of the host's are those of the capture."""
    kept, lost, number, times = up([1.0, 2.0]), up([10.0, 20.0]), torch.tensor(100.0), [1]
    made = torch.zeros(2, device="cuda")
    with capture(torch.cuda.graph_pool_handle()) as graph:
        out = (kept + lost).reshape(1, 2) + number
        made.copy_(out[0] * times[0])
        times[0] += 1
    assert made.tolist() == [0.0, 0.0]
    assert out.isnan().all()
    graph.replay()
    assert out.tolist() == [[111.0, 122.0]]
    kept.fill_(3.0)
    number.fill_(0.0)
    graph.replay()
    assert made.tolist() == [113.0, 123.0]
    assert times == [2]
    del lost
    graph.replay()
    assert made.isnan().all()


def test_graphs_of_one_pool_have_each_others_memory_once_it_is_given_back(card: Card) -> None:
    pool, x = torch.cuda.graph_pool_handle(), up([1.0, 2.0])
    with capture(pool) as first:
        between = x + 1
        kept = between * 2
    address = between.data_ptr()
    del between
    with capture(pool) as second:
        other = x * 50
    assert other.data_ptr() == address != kept.data_ptr()
    second.replay()
    first.replay()
    assert kept.tolist() == [4.0, 6.0]
    assert other.tolist() == [2.0, 3.0], "the first graph has written there since"
