"""Rounds as CUDA graphs: captured once and replayed without the host."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from pilotfish.engine.device_loop.round import Drafts, Round, Run
from pilotfish.engine.device_loop.slots import IDLE
from pilotfish.engine.kernels.args import Committed

A_ROUND = 16 << 20  # maximum bytes that the driver takes for one recorded round: about a kilobyte per kernel


class MemoryUse(NamedTuple):
    """Used bytes of a device."""

    in_all: int  # by all processes, including the driver
    here: int  # by torch in this process


class MemoryBudget:
    """The device memory that recorded rounds may take, and have taken, in bytes.

    The driver's part shows only in the device's total use, which also changes when other processes load models: beyond
    torch's own use in this process, at most `A_ROUND` is counted per round.
    """

    def __init__(self, most: int, use: Callable[[], MemoryUse]) -> None:
        self._most, self._use, self._taken = most, use, 0

    @property
    def is_left(self) -> bool:
        return self._taken < self._most

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Context that counts the memory of one recorded round."""
        before = self._use()
        yield
        after = self._use()
        here = after.here - before.here
        others = after.in_all - before.in_all - here
        self._taken += max(0, here + min(max(0, others), A_ROUND))


@dataclass(frozen=True, slots=True)
class RecordedRound:
    """The graphs of a round, and everything that they read by address: a graph keeps no tensor alive."""

    round: Round  # its constants were allocated before the capture, outside of the graphs' pool
    slots: Tensor  # [B] int64, written before each replay
    drafts: Drafts
    drafting: torch.cuda.CUDAGraph | None
    verifying: torch.cuda.CUDAGraph
    output: Committed

    def __call__(self, slots: Tensor, between: Callable[[], None]) -> Committed:
        """Replay both for these slots, and call `between` between them."""
        self.slots.copy_(slots)
        if self.drafting is not None:
            self.drafting.replay()
        between()
        self.verifying.replay()
        return self.output


class Graphs:
    """Records rounds in one memory pool and on one stream: they never run concurrently.

    The output of a round is in that pool, and its next replay overwrites it: a caller that keeps it must copy it first,
    on the same stream (as `results.PendingRound` does).
    """

    def __init__(self, budget: MemoryBudget) -> None:
        self._budget, self._pool, self._stream = budget, torch.cuda.graph_pool_handle(), torch.cuda.Stream()
        gc.collect()  # free garbage now, not during a capture

    @property
    def has_room(self) -> bool:
        return self._budget.is_left

    def __call__(self, round_: Round) -> Run:
        """One graph for drafting and one for verification, so that each can be timed; captured with idle places."""
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
        """Context that captures launches. Other threads may continue to use the device.

        Garbage collection is disabled in it: freeing a tensor or graph may call functions that are illegal during a
        capture.
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
        """Compile kernels, and let libraries select algorithms and allocate memory, on the stream of the capture."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for _ in range(2):
                round_.verify(slots, round_.propose(slots))
        torch.cuda.current_stream().wait_stream(self._stream)
