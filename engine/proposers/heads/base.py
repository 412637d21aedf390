"""The interface of heads: drafters trained for one target, on its hidden states or as an adapter of it (Uno)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pilotfish.engine.attention import Attend
from pilotfish.engine.control.prefill_budget import PrefillBudget
from pilotfish.engine.kv.arena import KVArena, KVLayout
from pilotfish.engine.model.decoder.stack import Tap
from pilotfish.engine.model.runner import Runner
from pilotfish.engine.proposers.base import Proposer
from pilotfish.engine.types import Adapter


@dataclass(frozen=True, slots=True)
class HeadContext:
    """The inputs of a head, besides its weights."""

    name: str  # of the proposer
    target: Runner
    tap: Tap  # reads the head's places
    arena: KVArena | None  # of the head's own K/V, if any
    attend: Attend
    prefill: PrefillBudget
    adapter: Adapter | None = None  # the loaded `Head.adapter`; None: none


@dataclass(frozen=True, slots=True)
class Head:
    """A loaded head, and its requirements."""

    places: tuple[int, ...]  # places of the target that it reads (`Tap`)
    layout: KVLayout | None  # of its own K/V; None: none
    proposer: Callable[[HeadContext], Proposer]
    adapter: Path | None = None  # folder of the low-rank adapter with which the target drafts; None: none
