"""The group of processes that hold one target, and broadcasts of integers from rank 0 to the others. Knows no model.

There are two separate kinds of traffic. What layers compute is summed where it lies, on the devices. The broadcasts of
rank 0 are small, start on the host, and always go through gloo, whatever the device is.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from engine.errors import ModelError, RankLost
from engine.machine.rank import RankInfo

if TYPE_CHECKING:
    from collections.abc import Iterator

log = logging.getLogger(__name__)

_MEET = timedelta(minutes=10)  # the longest wait for the other processes at the start
_IDLE = timedelta(days=365)  # the longest wait for work: a server may be without requests for a long time
_FRAME = 1024  # integers in one broadcast; a longer message is sent in two parts


class Ranks:
    """This process's end of the group."""

    def __init__(self, place: RankInfo) -> None:
        self.place = place
        self._talk = dist.new_group(backend="gloo", timeout=_IDLE)

    @classmethod
    def join(cls, place: RankInfo, device: torch.device) -> Ranks:
        """Join the other processes at the address in torchrun's environment, and take the GPU of the local rank.

        Raises:
            ModelError: there is no such GPU, or the other processes did not join.
        """
        if device.type == "cuda":
            if place.local_rank >= torch.cuda.device_count():
                raise ModelError(f"LOCAL_RANK is {place.local_rank}; torch sees {torch.cuda.device_count()} GPUs here")
            torch.cuda.set_device(place.local_rank)
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        try:
            if not dist.is_initialized():
                dist.init_process_group(
                    backend, store=_meeting_place(place), rank=place.rank, world_size=place.size, timeout=_MEET
                )
            ranks = cls(place)
        except (RuntimeError, ValueError) as error:
            raise ModelError(f"rank {place.rank} of {place.size} did not meet the others: {error}") from error
        log.info("rank %d of %d, on %s", place.rank, place.size, device.type)
        return ranks

    def broadcast(self, numbers: Seq[int]) -> None:
        """Broadcast integers from rank 0 to all other ranks. Raises RankLost."""
        message = torch.zeros(max(_FRAME, 1 + len(numbers)), dtype=torch.int64)
        message[0] = len(numbers)
        message[1 : 1 + len(numbers)] = torch.tensor(numbers, dtype=torch.int64)
        with _losses_told(self.place):
            dist.broadcast(message[:_FRAME], 0, group=self._talk)
            if len(message) > _FRAME:
                dist.broadcast(message[_FRAME:], 0, group=self._talk)

    def receive(self) -> list[int]:
        """Wait for the next broadcast of rank 0 and return it. Raises RankLost."""
        message = torch.empty(_FRAME, dtype=torch.int64)
        with _losses_told(self.place):
            dist.broadcast(message, 0, group=self._talk)
            stop = 1 + int(message[0])
            if stop > _FRAME:
                rest = torch.empty(stop - _FRAME, dtype=torch.int64)
                dist.broadcast(rest, 0, group=self._talk)
                message = torch.cat((message, rest))
        return message[1:stop].tolist()

    def total(self, part: Tensor) -> Tensor:
        """Return the sum of the tensors of this shape that all ranks pass, in the order of ranks, where they lie.

        It is rounded once. Sums that libraries compute (all-reduce) have another order for each place in a tensor, so a
        row's bits would depend on the rows before it.
        """
        part = part.contiguous()
        parts = [torch.empty_like(part) for _ in range(self.place.size)]
        with _losses_told(self.place):
            dist.all_gather(parts, part)
        found = parts[0].float()
        for other in parts[1:]:
            found += other
        return found.to(part.dtype)

    def minimum(self, number: float) -> float:
        """Return the smallest of the numbers that all ranks pass. Raises RankLost."""
        brought = torch.tensor(number, dtype=torch.float64)
        with _losses_told(self.place):
            dist.all_reduce(brought, dist.ReduceOp.MIN, group=self._talk)
        return brought.item()


def _meeting_place(place: RankInfo) -> Store:
    """The store at MASTER_ADDR and MASTER_PORT, with a prefix per attempt: torchrun keeps keys of earlier attempts."""
    store, _, _ = next(rendezvous("env://", place.rank, place.size, timeout=_MEET))
    store.set_timeout(_MEET)
    return PrefixStore(f"attempt {place.attempt}", store)


@contextmanager
def _losses_told(place: RankInfo) -> Iterator[None]:
    """Turn torch's error for a peer that closed its connection into RankLost."""
    try:
        yield
    except RuntimeError as error:
        raise RankLost(f"rank {place.rank} has lost another one: {error}") from error
