"""Rounds as CUDA graphs: what the device does is recorded once and played again, without the host between its parts."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from engine.device_loop.round import Drafts, Round, Run
from engine.device_loop.slots import IDLE
from engine.kernels.args import Committed

A_ROUND = 16 << 20  # bytes that the driver takes for one recorded round at most: about a kilobyte for each kernel


class MemoryUse(NamedTuple):
    """Bytes of a device that are taken."""

    in_all: int  # by any process, the driver's own included
    here: int  # of these, by torch in this process


class MemoryBudget:
    """Bytes of device memory that recorded rounds may take, and how many they have taken.

    What the driver takes for them only shows in the memory of the device, where other processes load models meanwhile:
    of what torch has not taken here, no more than `A_ROUND` counts for a round.
    """

    def __init__(self, most: int, use: Callable[[], MemoryUse]) -> None:
        self._most, self._use, self._taken = most, use, 0

    @property
    def is_left(self) -> bool:
        return self._taken < self._most

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Count what is taken within, while one round is recorded."""
        before = self._use()
        yield
        after = self._use()
        here = after.here - before.here
        others = after.in_all - before.in_all - here
        self._taken += max(0, here + min(max(0, others), A_ROUND))


@dataclass(frozen=True, slots=True)
class RecordedRound:
    """The graphs of a round, and whatever they read by address: a graph itself keeps no tensor alive."""

    round: Round  # its constants were made before the capture, outside of the graphs' pool
    slots: Tensor  # [B] int64, written before each play
    drafts: Drafts
    drafting: torch.cuda.CUDAGraph | None
    verifying: torch.cuda.CUDAGraph
    output: Committed

    def __call__(self, slots: Tensor, between: Callable[[], None]) -> Committed:
        """Play both for these slots, and call `between` between them."""
        self.slots.copy_(slots)
        if self.drafting is not None:
            self.drafting.replay()
        between()
        self.verifying.replay()
        return self.output


class Graphs:
    """Records rounds, all in one pool of memory and on one stream: they never run at the same time.

    The output of a round is in that pool, and its next play overwrites it: a caller that keeps it copies it first,
    on the stream that plays (`results.PendingRound` does).
    """

    def __init__(self, budget: MemoryBudget) -> None:
        self._budget, self._pool, self._stream = budget, torch.cuda.graph_pool_handle(), torch.cuda.Stream()
        gc.collect()  # what is dead gives its memory back now, and not in the midst of a capture

    @property
    def has_room(self) -> bool:
        return self._budget.is_left

    def __call__(self, round_: Round) -> Run:
        """Drafting and verification, a graph each, so that each can be timed; recorded with idle places."""
        slots = torch.full((round_.size,), IDLE, dtype=torch.int64, device=round_.device)
        drafting = verifying = None
        with self._budget.taken():
            self._warm_up(round_, slots)
            if round_.k:
                with self._capture() as drafting:
                    drafts = round_.propose(slots)
            else:
                drafts = round_.propose(slots)
            with self._capture() as verifying:
                output = round_.verify(slots, drafts)
        recorded = RecordedRound(round_, slots, drafts, drafting, verifying, output)
        recorded(slots, lambda: None)  # the first launch of a graph uploads it to the device
        return recorded

    @contextmanager
    def _capture(self) -> Iterator[torch.cuda.CUDAGraph]:
        """Record what is launched within. Other threads may go on using the device.

        Meanwhile nothing is collected: the end of a tensor or a graph that is garbage may call what a capture refuses.
        """
        graph, was_on = torch.cuda.CUDAGraph(), gc.isenabled()
        gc.disable()
        try:
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                yield graph
        finally:
            if was_on:
                gc.enable()

    def _warm_up(self, round_: Round, slots: Tensor) -> None:
        """Compile kernels and let libraries choose theirs and take their memory, on the stream of the capture."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for _ in range(2):
                round_.verify(slots, round_.propose(slots))
        torch.cuda.current_stream().wait_stream(self._stream)
