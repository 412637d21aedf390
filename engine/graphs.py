"""Rounds as CUDA graphs: what the device does is recorded once and played again, without the host between its parts."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
from torch import Tensor

from engine.resident import IDLE
from engine.round_loop import Run
from engine.rounds import Brought, Round

log = logging.getLogger(__name__)


class Graphs:
    """Records rounds, all in one pool of memory: they never run at the same time."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, round_: Round) -> Run:
        """Drafting and verification, a graph each, so that each can be timed; recorded on places of nobody."""
        slots = torch.full((round_.size,), IDLE, dtype=torch.int64, device=round_.device)
        _warm_up(round_, slots)
        drafting, verifying = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        if round_.k:
            with torch.cuda.graph(drafting, pool=self._pool):
                drafts = round_.propose(slots)
        else:
            drafts = round_.propose(slots)
        with torch.cuda.graph(verifying, pool=self._pool):
            brought = round_.verify(slots, drafts)
        log.info("recorded a round of %d places and %d drafts", round_.size, round_.k)

        def run(now: Tensor, between: Callable[[], None]) -> Brought:
            slots.copy_(now)
            if round_.k:
                drafting.replay()
            between()
            verifying.replay()
            return brought

        return run


def _warm_up(round_: Round, slots: Tensor) -> None:
    """Compile kernels and let libraries choose theirs: neither may happen while a graph is recorded."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            round_.verify(slots, round_.propose(slots))
    torch.cuda.current_stream().wait_stream(side)
