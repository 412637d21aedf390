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
_SPARE = 2  # slots that no sequence gets: the empty state, and one that padding may write


@dataclass(frozen=True, slots=True)
class StatePlan:
    """The states of a target and of the models that draft for it, by `TARGET` and by proposer name."""

    parts: Mapping[str, tuple[StatePart, ...]]
    num_slots: int  # of the target's arena
    num_draft_slots: int  # of each draft model's arena
    log_rows: int
    snapshots: bool  # whether the prefix cache keeps states

    @classmethod
    def of(cls, config: EngineConfig, models: Mapping[str, Model], memory: float) -> StatePlan:
        """Plan for `models`, by `TARGET` and by proposer name, within `memory` GiB for states, keys and values.

        Raises:
            ModelError: not even one sequence has room.
        """
        parts = {name: found for name, model in models.items() if (found := parts_of(model))}
        log_rows, most = max(1, config.num_draft_tokens), config.max_batch_size
        each = {name: bytes_per_slot(found, log_rows) for name, found in parts.items()}
        target, drafts = each.pop(TARGET, 0), sum(each.values())
        own, own_draft = (slots_per_sequence(snapshots=kept) for kept in (config.prefix_cache, False))
        budget = int(memory * GIB * _SHARE) - _SPARE * (target + drafts)
        one = own * target + own_draft * drafts
        if parts and budget < one:
            raise ModelError(
                f"kv_memory is {memory} GiB, and states take at most half of it; those of one sequence take {one} "
                "bytes: give more, or fewer num_draft_tokens"
            )
        running = min(most, budget // one) if parts else 0
        kept = min(2 * most, (budget - running * one) // target) if target and config.prefix_cache else 0
        return cls(
            parts,
            _SPARE + running * own + kept,
            _SPARE + running * own_draft,
            log_rows,
            snapshots=config.prefix_cache,
        )

    @property
    def gib(self) -> float:
        """GiB that all arenas of states take."""
        sizes = {name: bytes_per_slot(parts, self.log_rows) for name, parts in self.parts.items()}
        target = sizes.pop(TARGET, 0) * self.num_slots
        return (target + sum(sizes.values()) * self.num_draft_slots) / GIB

    def arena(self, name: str, device: torch.device) -> StateArena | None:
        """The arena of a model; None where its layers keep no state."""
        parts = self.parts.get(name)
        slots = self.num_slots if name == TARGET else self.num_draft_slots
        return None if parts is None else StateArena(parts, slots, self.log_rows, device)

    @property
    def target_pool(self) -> StatePool | None:
        """A new pool of the target's slots."""
        if TARGET not in self.parts:
            return None
        return StatePool(self.num_slots - 1, self.log_rows, snapshots=self.snapshots)

    def pool_of(self, name: str) -> StatePool | None:
        """A new pool of the slots of what drafts under this name; None where it keeps no state."""
        if name not in self.parts:
            return None
        return StatePool(self.num_draft_slots - 1, self.log_rows, snapshots=False)

    @property
    def scratch(self) -> int:
        """The target's slot that padding may write: it is behind those of the pool."""
        return self.num_slots - 1
