"""What a head is: what was trained for one target and drafts from its hidden states, or as an adapter of it (Uno)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from engine.attention import Attend
from engine.control.prefill_budget import PrefillBudget
from engine.kv.arena import KVArena, KVLayout
from engine.model.decoder.stack import Tap
from engine.model.runner import Runner
from engine.proposers.base import Proposer
from engine.types import Adapter


@dataclass(frozen=True, slots=True)
class HeadContext:
    """What a head drafts with, besides its own weights."""

    name: str  # of the proposer
    target: Runner
    tap: Tap  # reads the places that the head asked for
    arena: KVArena | None  # of the head's own K/V, if it asked for one
    attend: Attend
    prefill: PrefillBudget
    adapter: Adapter | None = None  # the one of `Head.adapter`, loaded; None: the head named none


@dataclass(frozen=True, slots=True)
class Head:
    """A head that is loaded, and what it needs in order to draft."""

    places: tuple[int, ...]  # of the target that it reads (`Tap`)
    layout: KVLayout | None  # of its own K/V; None: it keeps none
    proposer: Callable[[HeadContext], Proposer]
    adapter: Path | None = None  # folder of the low-rank adapter with which the target drafts; None: it needs none
