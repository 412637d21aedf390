"""Tensor parallelism: the process group of a sharded target, and its passes.

Rank 0 serves the requests. A pass is the same call in each process, with the same batch, which rank 0 broadcasts first.
All ranks compute whole logits; only rank 0 uses them. `model/decoder/share.py` shards the matrices.

There are two kinds of traffic: the results of layers are summed on the devices; the broadcasts of rank 0 are small,
start on the host, and always use gloo.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from pilotfish.engine.errors import ModelError, RankLost
from pilotfish.engine.kv.batch import Feed
from pilotfish.engine.machine.rank import RankInfo
from pilotfish.engine.model.runner import Runner

T = TypeVar("T")
log = logging.getLogger(__name__)

_MEET = timedelta(minutes=10)  # timeout for the other processes at the start
_IDLE = timedelta(days=365)  # timeout for work: a server may have no requests for a long time
_FRAME, _LENGTH = 1 << 14, 8  # bytes of a broadcast (longer ones have two parts), and of its length


class Ranks:
    """The process group, as seen from this rank."""

    def __init__(self, place: RankInfo) -> None:
        self.place = place
        self._group = dist.new_group(backend="gloo", timeout=_IDLE)

    @classmethod
    def join(cls, place: RankInfo, device: torch.device) -> Ranks:
        """Join the process group at the address in torchrun's environment, and use the GPU of the local rank.

        Raises:
            ModelError: the GPU does not exist, or the other processes did not join.
        """
        if device.type == "cuda":
            if place.local_rank >= torch.cuda.device_count():
                raise ModelError(f"LOCAL_RANK is {place.local_rank}; torch finds {torch.cuda.device_count()} GPUs")
            torch.cuda.set_device(place.local_rank)
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        try:
            if not dist.is_initialized():
                dist.init_process_group(
                    backend, store=_meeting_place(place), rank=place.rank, world_size=place.size, timeout=_MEET
                )
            ranks = cls(place)
        except (RuntimeError, ValueError) as error:
            raise ModelError(f"rank {place.rank} of {place.size} could not join the process group: {error}") from error
        log.info("joined as rank %d of %d on %s", place.rank, place.size, device.type)
        return ranks

    def broadcast(self, message: object) -> None:
        """Broadcast numbers, dataclasses or lists of them from rank 0 to all other ranks. Raises RankLost."""
        from msgspec import msgpack  # optional with one process

        coded = msgpack.encode(message, enc_hook=list)  # hook: ranges
        framed = len(coded).to_bytes(_LENGTH, "little") + coded.ljust(_FRAME - _LENGTH, b"\0")
        with _as_rank_lost(self.place):
            for part in (framed[:_FRAME], framed[_FRAME:]):
                if part:
                    dist.broadcast(torch.frombuffer(bytearray(part), dtype=torch.uint8), 0, group=self._group)

    def receive(self, kind: type[T]) -> T:
        """Wait for the next broadcast of rank 0 and return it as `kind`. Raises RankLost."""
        from msgspec import msgpack

        message = torch.empty(_FRAME, dtype=torch.uint8)
        with _as_rank_lost(self.place):
            dist.broadcast(message, 0, group=self._group)
            stop = _LENGTH + int.from_bytes(message[:_LENGTH].numpy().tobytes(), "little")
            if stop > _FRAME:
                rest = torch.empty(stop - _FRAME, dtype=torch.uint8)
                dist.broadcast(rest, 0, group=self._group)
                message = torch.cat((message, rest))
        return msgpack.decode(message[_LENGTH:stop].numpy().tobytes(), type=kind)

    def total(self, part: Tensor) -> Tensor:
        """Sum the tensors of all ranks in rank order, rounded once.

        The order of all-reduce is not deterministic per element, so a row's bits would depend on other rows.
        """
        part = part.contiguous()
        parts = [torch.empty_like(part) for _ in range(self.place.size)]
        with _as_rank_lost(self.place):
            dist.all_gather(parts, part)
        found = parts[0].float()
        for other in parts[1:]:
            found += other
        return found.to(part.dtype)

    def minimum(self, number: float) -> float:
        """The minimum over all ranks. Raises RankLost."""
        result = torch.tensor(number, dtype=torch.float64)
        with _as_rank_lost(self.place):
            dist.all_reduce(result, dist.ReduceOp.MIN, group=self._group)
        return result.item()


class ShardedRunner:
    """The Runner of rank 0, which broadcasts each pass to the other ranks."""

    def __init__(self, inner: Runner, ranks: Ranks) -> None:
        self._inner, self._ranks = inner, ranks
        self.vocab_size = inner.vocab_size
        self._is_whole = True

    def forward(self, feeds: Seq[Feed]) -> Tensor:
        """As `Runner.forward`.

        Raises:
            RankLost: this pass or an earlier one failed. A rank may still be in a collective of the failed pass, which
            would conflict with those of the next.
        """
        if not self._is_whole:
            raise RankLost("an earlier pass over all ranks failed, so the ranks are not synchronised")
        self._is_whole = False
        try:
            self._ranks.broadcast(feeds)
            logits = self._inner.forward(feeds)
        except Exception as error:
            raise RankLost(f"a pass over all ranks failed: {error}") from error
        self._is_whole = True
        return logits


def worker_loop(ranks: Ranks, runner: Runner) -> None:
    """Run the passes of rank 0 until it broadcasts an empty message or ends. An error in a pass ends this process."""
    try:
        while feeds := ranks.receive(list[Feed]):
            runner.forward(feeds)
    except RankLost as error:
        log.info("rank 0 ended: %s", error)


def _meeting_place(place: RankInfo) -> Store:
    """The store at MASTER_ADDR and MASTER_PORT, with a prefix per attempt, because torchrun keeps earlier keys."""
    store, _, _ = next(rendezvous("env://", place.rank, place.size, timeout=_MEET))
    store.set_timeout(_MEET)
    return PrefixStore(f"attempt {place.attempt}", store)


@contextmanager
def _as_rank_lost(place: RankInfo) -> Iterator[None]:
    """Convert torch's error for a closed connection to RankLost."""
    try:
        yield
    except RuntimeError as error:
        raise RankLost(f"rank {place.rank} lost the connection to another rank: {error}") from error
