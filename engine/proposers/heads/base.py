"""What a head is: what was trained for one target and drafts from its hidden states, or as an adapter of it (Uno)."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from torch import Tensor

from engine.attention import Attend
from engine.control.prefill_budget import PrefillBudget
from engine.kv.arena import KVArena, KVLayout
from engine.kv.batch import Feed
from engine.model.runner import Runner
from engine.model.tap import Tap
from engine.proposers.base import Proposer
from engine.types import Adapter


@dataclass(frozen=True, slots=True)
class HeadContext:
    """What a head drafts with, besides its own weights."""

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


class FeatureChain(Protocol):
    """A head that goes on from the target's features, one token after the other, over an arena of its own.

    Fed (feature of position t, token t + 1) it makes a feature of t + 1, which stands for token t + 2.
    """

    def project(self, features: Tensor) -> Tensor:
        """The target's features `[n, width of its places]` as the head takes them, `[n, hidden]`."""
        ...

    def forward(self, feeds: Seq[Feed], features: Tensor) -> Tensor:
        """One pass, features `[T, hidden]` beside the tokens of `feeds`; new ones `[R, hidden]` at the last rows."""
        ...

    def logits(self, features: Tensor) -> Tensor:
        """float32 `[R, target's vocab]` of features that `forward` made; -inf for tokens that it never drafts."""
        ...
