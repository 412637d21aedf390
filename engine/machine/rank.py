"""The rank of this process among the processes of one target, as torchrun sets it. Reads only environment variables."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from pilotfish.engine.errors import ModelError


@dataclass(frozen=True, slots=True)
class RankInfo:
    """The rank of a process that torchrun started, and the numbers of processes; without torchrun, a single process."""

    rank: int = 0  # rank 0 serves the requests
    size: int = 1
    local_rank: int = 0  # among the processes on this machine: the number of its GPU
    local_size: int = 1
    attempt: int = 0  # number of restarts by torchrun

    @classmethod
    def here(cls, environment: Mapping[str, str] = os.environ) -> RankInfo:
        """Read RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE. Raises ModelError for invalid values."""
        if "WORLD_SIZE" not in environment:
            return cls()
        size = _number(environment, "WORLD_SIZE", 1)
        rank = _number(environment, "RANK", 0)
        if not 0 <= rank < size:
            raise ModelError(f"RANK is {rank} and WORLD_SIZE is {size}; start all processes with torchrun")
        local_rank = _number(environment, "LOCAL_RANK", rank)
        local_size = _number(environment, "LOCAL_WORLD_SIZE", size)
        return cls(rank, size, local_rank, local_size, _number(environment, "TORCHELASTIC_RESTART_COUNT", 0))

    @property
    def leads(self) -> bool:
        """Whether this process serves the requests."""
        return self.rank == 0

    def check(self, tensor_parallel_size: int) -> None:
        """Raise ModelError unless the numbers of processes and shards are equal."""
        if self.size != tensor_parallel_size:
            raise ModelError(
                f"tensor_parallel_size is {tensor_parallel_size}, but WORLD_SIZE (number of processes) is "
                f"{self.size}: start one process per shard (torchrun --nproc-per-node {tensor_parallel_size})"
            )


def _number(environment: Mapping[str, str], name: str, default: int) -> int:
    written = environment.get(name, str(default))
    if not written.isdecimal():
        raise ModelError(f"{name} is {written!r}; expected an integer (torchrun sets it)")
    return int(written)
