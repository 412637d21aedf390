"""What a head is, trained for one target: it drafts from its hidden states, or as an adapter of it. Which there are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, cast

from engine.attention import Attend
from engine.choices import HEADS
from engine.control.prefill_budget import PrefillBudget
from engine.kv.arena import KVArena, KVLayout
from engine.model.decoder.families.described import ModelConfig
from engine.model.runner import Runner
from engine.model.tap import Tap
from engine.proposers.base import Proposer
from engine.types import Adapter

if TYPE_CHECKING:  # for types only: benchmarks/harness/bare.py passes its own class where pydantic is missing
    from engine.config import EngineConfig
    from engine.model.decoder.decoder import DecoderModel


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


def load_heads(config: EngineConfig, target: DecoderModel) -> dict[str, Head]:
    """Load the heads that `config` names, by proposer name. Each option has a module and a function of its name.

    Raises:
        ModelError: one of them does not fit this target.
    """
    heads = dict[str, Head]()
    for option in HEADS:
        if (name := getattr(config, option)) is not None:
            load = getattr(import_module(f"engine.proposers.heads.{option}"), f"load_{option}")
            heads[option] = load(name, getattr(config, f"{option}_revision"), target)
    if isinstance(cast("object", target.config), ModelConfig) and not config.mtp:
        return heads  # none of these families has such layers
    from engine.proposers.heads.mtp import load_mtp, tell_of_mtp

    if config.mtp:  # it is part of the target's own checkpoint
        heads["mtp"] = load_mtp(config.target, config.revision, target)
    else:
        tell_of_mtp(config.target, config.revision, target)
    return heads
