"""The card's memory as a recorded graph knows it: by address, whoever has it when the graph is played."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, UntypedStorage
from torch.multiprocessing.reductions import StorageWeakRef

_ROUNDED = 512  # bytes: as torch's allocator rounds sizes, so that other shapes get the same memory


def poison(dtype: torch.dtype) -> float | int | bool:
    """What is read where nothing was written, or where memory was given back."""
    if dtype.is_floating_point:
        return float("nan")
    return True if dtype == torch.bool else torch.iinfo(dtype).max // 3


class Memory(Protocol):
    """A stretch of memory, named by where it is."""

    def storage(self) -> UntypedStorage | None:
        """What is there, or None once its owner has given it back."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Outside:
    """Memory that was allocated outside of captures. Its name keeps it from nothing."""

    ref: StorageWeakRef

    def storage(self) -> UntypedStorage | None:
        found: UntypedStorage | None = UntypedStorage._new_with_weak_ptr(self.ref.cdata)
        return found


class Block:
    """Memory of a pool, which keeps it for good: another tensor may have it once that which has it is gone."""

    def __init__(self, size: int) -> None:
        self._bytes = np.empty(size, np.uint8)
        self._storage = torch.from_numpy(self._bytes).untyped_storage()
        self._taken: StorageWeakRef | None = None

    @property
    def is_free(self) -> bool:
        return self._taken is None or self._taken.expired()

    @property
    def address(self) -> int:
        return self._storage.data_ptr()

    def take(self) -> UntypedStorage:
        """Give it to a tensor, whose storage is one of its own: that it dies tells that the block is free."""
        made = torch.from_numpy(self._bytes).untyped_storage()
        self._taken = StorageWeakRef(made)
        return made

    def storage(self) -> UntypedStorage:
        return self._storage


class Pool:
    """Memory that captures allocate from, and nobody else."""

    def __init__(self) -> None:
        self._blocks: defaultdict[int, list[Block]] = defaultdict(list)
        self._at: dict[int, Block] = {}

    def empty(self, shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A tensor in the first block of its size that nobody has."""
        words = 1 + sum((n - 1) * step for n, step in zip(shape, stride, strict=True)) if 0 not in shape else 0
        size = max(1, -(-words * dtype.itemsize // _ROUNDED)) * _ROUNDED
        block = next((block for block in self._blocks[size] if block.is_free), None)
        if block is None:
            block = Block(size)
            self._blocks[size].append(block)
            self._at[block.address] = block
        return torch.empty(0, dtype=dtype).set_(block.take(), 0, shape, stride).fill_(poison(dtype))

    def block_of(self, storage: UntypedStorage) -> Block | None:
        return self._at.get(storage.data_ptr())


@dataclass(frozen=True, slots=True)
class Named:
    """A tensor as a launch that was recorded knows it."""

    memory: Memory
    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor, pool: Pool) -> Named:
        storage = tensor.untyped_storage()
        memory = pool.block_of(storage) or Outside(StorageWeakRef(storage))
        return cls(memory, tensor.dtype, tensor.storage_offset(), tuple(tensor.shape), tensor.stride())

    def tensor(self) -> Tensor:
        """What is there now: poison, if its owner has given it back."""
        storage = self.memory.storage()
        if storage is None:
            return torch.empty_strided(self.shape, self.stride, dtype=self.dtype).fill_(poison(self.dtype))
        return torch.empty(0, dtype=self.dtype).set_(storage, self.offset, self.shape, self.stride)
