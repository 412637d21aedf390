"""Slots and logs of states as tensors. `engine/kv/states.py` decides which sequence has which slot."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from engine.kv.arena import LayerKV
from engine.kv.batch import RaggedBatch
from engine.recurrent import registry
from engine.recurrent.parts import PartSlots, StatePart
from engine.recurrent.plan import ScanPlan

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, slots=True)
class StateLayout:
    """The parts of a model's state, in the order in which a pass comes to them, and the layers that attend."""

    parts: tuple[StatePart, ...]
    attends: Mapping[int, LayerKV] | None = None  # by number of a layer; None for a decoder, which knows it
    keyword: str | None = None  # the argument of the model's forward that takes a cache; None for a decoder

    @classmethod
    def of(cls, model: PreTrainedModel) -> StateLayout | None:
        """The layout of a model; None, without a pass, for a model whose layers keep no state.

        A tiny pass shows that of a model of transformers, which is prepared for ragged batches (`mixers.prepare`).

        Raises:
            ModelError: it keeps a state in a way that we do not know.
        """
        own: tuple[StatePart, ...] | None = getattr(model, "state", None)  # of our decoder
        if own is not None:
            return cls(own) if own else None
        from engine.recurrent.mixers import prepare
        from engine.recurrent.probe import probe

        if model not in _KNOWN:
            _KNOWN[model] = cls(*probe(model)) if prepare(model) else None
        return _KNOWN[model]

    def bytes_per_slot(self, log_rows: int) -> int:
        """Bytes of one slot over all layers, with a log of `log_rows` rows."""
        return sum(part.num_bytes(log_rows) for part in self.parts)


_KNOWN: WeakKeyDictionary[PreTrainedModel, StateLayout | None] = WeakKeyDictionary()  # a pass takes time


class PassStates:
    """The states of a ragged batch in one pass. Parts have no names: every pass comes to them in the same order."""

    def __init__(self, plan: ScanPlan, arena: StateArena) -> None:
        self.rules = arena.rules
        self._plan, self._arena, self._number = plan, arena, 0  # of the part whose turn it is

    def slots(self, part: StatePart) -> PartSlots:
        """The slots of the part whose turn it is."""
        states, log = self._arena.of(self._number, part)
        self._number += 1
        return PartSlots(states, log, self._plan)


class StateArena:
    """The states of every sequence of one model."""

    def __init__(self, layout: StateLayout, num_slots: int, log_rows: int, device: torch.device) -> None:
        self.layout, self.log_rows = layout, log_rows
        self._tensors = [part.tensors(num_slots, log_rows, device) for part in layout.parts]
        self.rules = registry.choose(device)

    def keywords(self, batch: RaggedBatch) -> dict[str, object]:
        """Keywords for the forward of a model of transformers: our cache for this pass, by its name there."""
        if self.layout.keyword is None:
            return {}
        from engine.recurrent.states import RaggedStates

        return {self.layout.keyword: RaggedStates(ScanPlan.of(batch, self.log_rows), self, self.rules)}

    def during(self, batch: RaggedBatch) -> PassStates | None:
        """The states of a pass of a decoder; None for a model of transformers, which gets `keywords`."""
        return PassStates(ScanPlan.of(batch, self.log_rows), self) if self.layout.keyword is None else None

    def of(self, number: int, part: StatePart) -> tuple[Tensor, Tensor]:
        """As in `states.Store`."""
        assert part == self.layout.parts[number], "a pass came to the parts of the state in another order"
        return self._tensors[number]
