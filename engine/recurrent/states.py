"""The states of one pass, in the form that transformers' models know: a cache.

A mixer that finds no earlier state in its cache takes its path for many tokens. On it, it hands new inputs of its
convolution to the cache, calls a few functions of its module (`library.py`), and hands the last state of its recurrence
to the cache. We replace the functions (`mixers.py`), so there is no last state; the cache itself only watches.
"""

from __future__ import annotations

from functools import partial
from types import FunctionType
from typing import Any, Protocol

from torch import Tensor
from transformers import Cache

from engine.errors import ModelError
from engine.recurrent.library import FUNCTIONS
from engine.recurrent.parts import PartSlots, StatePart
from engine.recurrent.plan import ScanPlan
from engine.recurrent.registry import StateRules


class Store(Protocol):
    """Where the states and logs of all parts are."""

    def of(self, number: int, part: StatePart) -> tuple[Tensor, Tensor]:
        """The states `[slots, *shape]` and logs `[slots, log_rows, width]` of the part with this number."""
        ...


class RaggedStates(Cache):
    """The states of a ragged batch in one pass. Parts have no names: every pass comes to them in the same order."""

    def __init__(self, plan: ScanPlan, store: Store, rules: StateRules) -> None:
        super().__init__(layers=[])
        self.rules = rules
        self._plan, self._store = plan, store
        self._functions = {name: partial(function, self) for name, function in FUNCTIONS.items()}
        self._bound: dict[FunctionType, FunctionType] = {}
        self._number = 0  # of the part whose turn it is
        self._waiting: Tensor | None = None  # inputs of a convolution that has not run yet

    def bound(self, forward: FunctionType) -> FunctionType:
        """A copy of a mixer's `forward` that calls our functions instead of its module's."""
        if forward not in self._bound:
            names = {**forward.__globals__, **self._functions}
            copy = FunctionType(forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__)
            copy.__kwdefaults__ = forward.__kwdefaults__
            self._bound[forward] = copy
        return self._bound[forward]

    def slots(self, part: StatePart) -> PartSlots:
        """The slots of the part whose turn it is; as in `library.Scan`."""
        states, log = self._store.of(self._number, part)
        self._number += 1
        return PartSlots(states, log, self._plan)

    def kept(self, rows: Tensor) -> Tensor:
        """As in `library.Scan`."""
        if rows is not self._waiting:
            raise ModelError("a convolution runs over other inputs than its layer keeps for later passes")
        self._waiting = None
        return rows

    def update_indexer(self, indexer_key_states: Tensor, layer_idx: int) -> Tensor:
        """Refuse a layer that attends only to positions that an index of its own chooses."""
        raise ModelError("a layer keeps an index of positions to attend to, which ours does not do")

    def check_all_ran(self) -> None:
        """Raise ModelError if a layer has kept inputs of a convolution that we know nothing of."""
        if self._waiting is not None:
            raise ModelError("a layer keeps earlier inputs for code of its own, not for a convolution that we know")

    # As mixers and attention call it:

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Nothing: attention keeps keys and values in the K/V arena."""
        return key_states, value_states

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """False, as older versions of transformers ask, so that a mixer takes its path for many tokens."""
        return False

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> None:
        """None, so that a mixer takes its path for many tokens."""

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> None:
        """None, so that a mixer takes its path for many tokens."""

    def update_conv_state(self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any) -> Tensor:
        """Take notice of the inputs of a convolution, `[1, C, T]`, and return them."""
        self.check_all_ran()
        self._waiting = conv_states
        return conv_states

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> Tensor:
        """Nothing: the rule has written the states to their slots, and returned an empty one."""
        self.check_all_ran()
        if recurrent_states.numel():
            raise ModelError("a layer keeps a state that none of the rules that we know has computed")
        return recurrent_states
