"""How many slots of states there are, for models whose layers keep a state that a length cannot roll back.

A state is large (megabytes for each layer), so slots share the memory for keys and values: they take at most half of
it, and where that is too little for all sequences, fewer run at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from engine.errors import ModelError
from engine.kv.states import StatePool, slots_per_sequence
from engine.recurrent.states import StateArena, StatePart, bytes_per_slot, parts_of
from engine.startup.memory import GIB

if TYPE_CHECKING:  # for types only: benchmarks/harness/bare.py passes its own class where pydantic is missing
    from engine.config import EngineConfig
    from engine.model.decoder.decoder import Model

TARGET = "target"  # as a key beside the names of proposers
_SHARE = 0.5  # of the memory for keys and values, at most
_SPARE = 1  # slots that no sequence gets: the empty state


@dataclass(frozen=True, slots=True)
class StatePlan:
    """The states of a target and of the models that draft for it, by `TARGET` and by proposer name."""

    parts: Mapping[str, tuple[StatePart, ...]]
    slots: Mapping[str, int]  # of each arena
    log_rows: int
    prefix_cache: bool  # whether it keeps states of the target

    @classmethod
    def of(cls, config: EngineConfig, models: Mapping[str, Model], memory: float) -> StatePlan:
        """Plan for `models`, by `TARGET` and by proposer name, within `memory` GiB for states, keys and values.

        Raises:
            ModelError: not even one sequence has room.
        """
        parts = {name: found for name, model in models.items() if (found := parts_of(model))}
        log_rows, most = max(1, config.num_draft_tokens), config.max_batch_size
        sizes = {name: bytes_per_slot(found, log_rows) for name, found in parts.items()}
        own = {name: slots_per_sequence(snapshots=config.prefix_cache and name == TARGET) for name in parts}
        budget = int(memory * GIB * _SHARE) - _SPARE * sum(sizes.values())
        one = sum(own[name] * size for name, size in sizes.items())
        if parts and budget < one:
            raise ModelError(
                f"kv_memory is {memory} GiB, and states take at most half of it; those of one sequence take {one} "
                "bytes: give more, or fewer num_draft_tokens"
            )
        running = min(most, budget // one) if parts else 0
        slots = {name: _SPARE + running * own[name] for name in parts}
        if TARGET in parts and config.prefix_cache:
            slots[TARGET] += min(2 * most, (budget - running * one) // sizes[TARGET])
        return cls(parts, slots, log_rows, config.prefix_cache)

    @property
    def gib(self) -> float:
        """GiB that all arenas of states take."""
        return sum(bytes_per_slot(parts, self.log_rows) * self.slots[name] for name, parts in self.parts.items()) / GIB

    def arena(self, name: str, device: torch.device) -> StateArena | None:
        """The arena of a model; None where its layers keep no state."""
        if name not in self.parts:
            return None
        return StateArena(self.parts[name], self.slots[name], self.log_rows, device)

    def pool(self, name: str) -> StatePool | None:
        """A new pool of the slots of a model; None where it keeps no state."""
        if name not in self.parts:
            return None
        return StatePool(self.slots[name], self.log_rows, snapshots=self.prefix_cache and name == TARGET)
