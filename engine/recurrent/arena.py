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
from engine.recurrent.parts import StatePart
from engine.recurrent.plan import ScanPlan

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, slots=True)
class StateLayout:
    """The parts of a model's state, in the order in which a pass comes to them, and the layers that attend."""

    parts: tuple[StatePart, ...]
    attends: Mapping[int, LayerKV]  # by number of a layer
    keyword: str  # the argument of the model's forward that takes a cache

    @classmethod
    def of(cls, model: PreTrainedModel) -> StateLayout | None:
        """The layout of a model; None, without a pass, for a model whose layers keep no state.

        A tiny pass shows it. The model is prepared for passes over ragged batches (`mixers.prepare`).

        Raises:
            ModelError: it keeps a state in a way that we do not know.
        """
        if getattr(model, "architecture", None) is not None:  # none of the table keeps any
            return None
        from engine.recurrent.mixers import prepare
        from engine.recurrent.probe import probe

        if model not in _KNOWN:
            _KNOWN[model] = cls(*probe(model)) if prepare(model) else None
        return _KNOWN[model]

    def bytes_per_slot(self, log_rows: int) -> int:
        """Bytes of one slot over all layers, with a log of `log_rows` rows."""
        return sum(part.num_bytes(log_rows) for part in self.parts)


_KNOWN: WeakKeyDictionary[PreTrainedModel, StateLayout | None] = WeakKeyDictionary()  # a pass takes time


class StateArena:
    """The states of every sequence of one model."""

    def __init__(self, layout: StateLayout, num_slots: int, log_rows: int, device: torch.device) -> None:
        self.layout, self.log_rows = layout, log_rows
        self._tensors = [part.tensors(num_slots, log_rows, device) for part in layout.parts]
        self._rules = registry.choose(device)

    def keywords(self, batch: RaggedBatch) -> dict[str, object]:
        """Keywords for the model's forward: our cache object for this pass, under the name that the model gives it."""
        from engine.recurrent.states import RaggedStates

        return {self.layout.keyword: RaggedStates(ScanPlan.of(batch, self.log_rows), self, self._rules)}

    def of(self, number: int, part: StatePart) -> tuple[Tensor, Tensor]:
        """As in `states.Store`."""
        assert part == self.layout.parts[number], "a pass came to the parts of the state in another order"
        return self._tensors[number]
